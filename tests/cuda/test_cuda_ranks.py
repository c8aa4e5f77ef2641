"""Groups of several GPUs: sums over ranks, whole models against the CPU's ranks and against themselves, and a killed
rank. Ranks that are threads of this process need a GPU each; processes share the GPUs that exist.
"""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import psutil
import pytest

from allspark_client import AsModelConfig, ClientEngine
from allspark_launch.group.background import background_group, shipped_model
from allspark_server.runtime.device import SHARED_GPUS
from allspark_server.runtime.plan import SamplingParams
from support.driver import Driver, shared_memories, together
from support.gpu_toys import DTYPES16, FLOAT16_MAX, executor, rounded
from support.seed import SEED

pytestmark = pytest.mark.cuda
VOCAB = 512


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    print(f"ALLSPARK_TEST_SEED={SEED}")
    monkeypatch.setenv(SHARED_GPUS, "1")


def unit(ranks: int) -> dict[str, str]:
    """A GPU for each rank; if there are fewer GPUs, in turn."""
    from allspark_server import _cuda

    count = _cuda.device_count()
    return {"compute_unit": "CUDA:" + ",".join(str(rank % count) for rank in range(ranks))}


def needs(gpus: int) -> None:
    from allspark_server import _cuda

    if _cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")


def on_gpus(ranks: int, directory=None, **fields) -> Driver:
    """Ranks on GPUs of their own, because a thread's GPU work may wait for everything that runs there, including a
    waiting rank.
    """
    needs(ranks)
    return Driver(directory or shipped_model(), ranks, engine_max_length=512, cache_memory=64 << 20,
                  **{"max_step_tokens": 256, **unit(ranks), **fields})


def as_type(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values, rounded to this type."""
    return rounded(x, dtype).astype(np.float32)


# -- the sum -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("width", [1, 7, 8, 53, 200, 3584, 4100, 8192])
@pytest.mark.parametrize("dtype, way", [("float32", "read"), ("float32", "host"),
                                        *((half, way) for half in DTYPES16 for way in ("read", "pushed", "host"))])
def test_ranks_are_added_in_order(ranks, width, dtype, way):
    """Bit by bit; a row's bits are independent of others; and the norm is correct."""
    gpu, rng = executor(), np.random.default_rng(SEED)
    parts = (rng.normal(size=(ranks, 67, width)) * 10.0 ** rng.integers(-3, 3, (ranks, 67, 1))).astype(np.float32)
    y, norm = rng.normal(size=(67, width)).astype(np.float32), rng.normal(size=width).astype(np.float32)
    total = np.zeros_like(y)
    for part in as_type(parts, dtype):
        total = total + part
    for adds, expected in ((False, total), (True, y + total)):
        found, normed = gpu.sum_ranks(parts, y, norm, dtype, adds, way)
        assert found.tobytes() == expected.tobytes()
        exact = expected.astype(float)
        exact = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + 1e-6) * norm
        np.testing.assert_allclose(normed, exact, rtol=2e-5, atol=1e-6)
        few, few_normed = gpu.sum_ranks(parts[:, 5:8], y[5:8], norm, dtype, adds, way)
        assert few.tobytes() == found[5:8].tobytes() and few_normed.tobytes() == normed[5:8].tobytes()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("width", [53, 200, 3584, 4104, 8192, 8300])
def test_many_rows_of_a_cta_are_added_in_order(ranks, width):
    """With more rows than CTAs."""
    gpu, rng = executor(), np.random.default_rng(SEED)
    parts = rng.normal(size=(ranks, 700, width)).astype(np.float32)
    y, norm = rng.normal(size=(700, width)).astype(np.float32), rng.normal(size=width).astype(np.float32)
    total = np.zeros_like(y)
    for part in as_type(parts, "bfloat16"):
        total = total + part
    found, normed = gpu.sum_ranks(parts, y, norm, "bfloat16", True, "read")
    assert found.tobytes() == (y + total).tobytes()
    few, few_normed = gpu.sum_ranks(parts[:, 650:], y[650:], norm, "bfloat16", True, "read")
    assert few.tobytes() == found[650:].tobytes() and few_normed.tobytes() == normed[650:].tobytes()


@pytest.mark.parametrize("way", ["read", "pushed", "host"])
@pytest.mark.parametrize("dtype", DTYPES16)
def test_parts_that_are_no_numbers_or_do_not_fit_in_order(dtype, way):
    """NaNs of both signs are not taken for memory that is not written yet; float16 clamps values beyond its range."""
    gpu, rng = executor(), np.random.default_rng(SEED)
    parts, zeros, ones = rng.normal(size=(3, 9, 200)).astype(np.float32), np.zeros((9, 200)), np.ones(200)
    parts[1, 2, 7], parts[2, 4, 199] = 1e6, -7e4
    parts.view(np.uint32)[0, 1, 3], parts.view(np.uint32)[2, 5, 0] = 0xFFFFFFFF, 0x7FFFFFFF
    total = zeros.astype(np.float32)
    for part in as_type(parts, dtype):
        total = total + part
    found, _ = gpu.sum_ranks(parts, zeros.astype(np.float32), ones.astype(np.float32), dtype, False, way)
    np.testing.assert_array_equal(found, total)
    assert np.isnan(found).sum() == 2 and (abs(found[2, 7]) < FLOAT16_MAX + 9) == (dtype == "float16")


@pytest.mark.parametrize("form", DTYPES16)
@pytest.mark.parametrize("n, k", [(3584, 448), (100, 200), (53, 70), (260, 1030), (16640, 200)])
def test_partial_sums_are_the_products_rounded(n, k, form):
    """With every kernel, for few rows and many."""
    gpu, rng = executor(), np.random.default_rng(SEED)
    handle = gpu.add_matrix(n, k, form)
    gpu.fill_matrix(handle, (rng.normal(size=(n, k)) * k**-0.5).astype(np.float32), "F32")
    for rows in (1, 5, 17, 100, 300, 700):
        x = rng.normal(size=(rows, k)).astype(np.float32)
        for algo in ("any", "mma", "prefill") if rows > 256 else ("any", "mma", "split_k", "stream_k", "prefill"):
            whole, found = gpu.multiply(handle, x, n, algo=algo), gpu.multiply(handle, x, n, algo=algo, rounded=True)
            assert as_type(whole, form).tobytes() == found.tobytes(), (rows, algo)


def test_partial_sums_of_a_matrix_in_parts_are_the_products_rounded():
    """A matrix too large to be widened at once: the columns of each part are at their places."""
    gpu, rng, n, k = executor(), np.random.default_rng(SEED), 16448, 8256
    handle, scales = gpu.add_matrix(n, k, "int4", 64), np.full((n, k // 64), 0x3B80, np.uint16)  # 2^-8
    gpu.fill_quantized(handle, rng.integers(0, 256, (n, k // 2), np.uint8), scales, np.zeros_like(scales), 4, k, 64)
    x = rng.normal(size=(300, k)).astype(np.float32)
    whole, found = (gpu.multiply(handle, x, n, rounded=each) for each in (False, True))
    assert as_type(whole, "bfloat16").tobytes() == found.tobytes() and whole[:, -320:].any(0).all()


# -- whole models ------------------------------------------------------------------------------------------------------
def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_float32_is_the_cpus(ranks):
    """Logits and greedy ids of as many CPU ranks, in chunks, with heads and features that do not divide evenly."""
    with on_gpus(ranks, weight_dtype="float32") as gpu, \
            Driver(shipped_model(), ranks, weight_dtype="float32", engine_max_length=512) as cpu:
        for length in (1, 33, 200):
            ids, logits = gpu.generate(prompt_of(length), 24, chunk=100)
            expected, others = cpu.generate(prompt_of(length), 24)
            for found, other, a, b in zip(logits, others, ids, expected):
                assert np.abs(found - other).max() < 1e-3 * other.std()
                if a != b:
                    best = np.sort(other)[-2:]
                    assert best[1] - best[0] < 1e-3 * other.std()
                    break


@pytest.mark.parametrize("name", ["qwen2-gqa-tied", "llama-dynamic", "qwen3-bf16-sharded", "llama-bf16-heads-of-64"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_awkward_heads(name, ranks):
    """KV heads shared by two ranks, for example 14 query heads and 2 KV heads on 3 ranks."""
    pytest.importorskip("transformers")
    from support.checkpoints import checkpoint

    with on_gpus(ranks, checkpoint(name), weight_dtype="float32") as gpu, \
            Driver(checkpoint(name), ranks, weight_dtype="float32") as cpu:
        for length in (1, 65, 300):
            prompt = np.random.default_rng(length).integers(0, 1000, length).tolist()
            found, expected = gpu.generate(prompt, 4, chunk=90)[1], cpu.generate(prompt, 4)[1]
            assert np.abs(found[0] - expected[0]).max() < 1e-3 * expected[0].std()
    for dtype, tolerance in (("bfloat16", 0.2), ("float16", 0.2 / 4)):
        with on_gpus(ranks, checkpoint(name), weight_dtype=dtype) as gpu, \
                on_gpus(1, checkpoint(name), weight_dtype=dtype) as one:
            prompt = np.random.default_rng(1).integers(0, 1000, 300).tolist()
            found, expected = gpu.generate(prompt, 1)[1][0], one.generate(prompt, 1)[1][0]
            assert np.abs(found - expected).max() < tolerance * expected.std()


@pytest.mark.parametrize("dtype", ["float32", *DTYPES16])
def test_bits_do_not_depend_on_chunks_and_others(dtype):
    prompts = [prompt_of(n) for n in (1, 5, 70, 129, 33)]
    found = []
    for chunk in (256, 47, 9):
        with on_gpus(2, weight_dtype=dtype, engine_max_batch=8) as gpu:
            found.append([row.tobytes() for row in together(gpu, prompts, min(chunk, 256 // len(prompts)))])
    alone = []
    with on_gpus(2, weight_dtype=dtype, engine_max_batch=8) as gpu:
        for prompt in prompts:
            alone.append(together(gpu, [prompt], 64)[0].tobytes())
    assert found[0] == found[1] == found[2] == alone


@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_do_not_depend_on_how_partial_sums_move(ranks):
    """Those of few rows are pushed, those of more rows read."""
    prompt, found = prompt_of(500), set()
    for chunk in (500, 300, 64):
        with on_gpus(ranks, weight_dtype="bfloat16", max_step_tokens=512) as gpu:
            found.add(together(gpu, [prompt], chunk)[0].tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("dtype", ["float32", *DTYPES16])
def test_a_missing_rank_is_reported(monkeypatch, dtype):
    """The step of a single rank ends with an error instead of waiting for ever."""
    from allspark_server.runtime.device import Gpu

    monkeypatch.setattr(Gpu, "share", lambda self, e, rows, outputs: e.share(rows, outputs, 1.5).hex())
    with on_gpus(2, weight_dtype=dtype) as gpu:
        from allspark_server.runtime.plan import SAMPLE, NewSlot, StepPlan, WorkItem

        plan = StepPlan(new=[NewSlot(0, [1, 2, 3], SamplingParams(do_sample=False, prompt_len=3).encode())],
                        work=[WorkItem(0, 3, SAMPLE, spans=[0])]).encode()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank 1 waited 1 s on its GPU for rank 0 in a sum over ranks"):
            gpu.runners[1].step(plan)
        assert time.monotonic() - began < 10


def test_addresses_are_checked(monkeypatch):
    from allspark_server import _cuda, _native

    pair = shared_memories(2)
    gpu = _cuda.Executor(0, _native.HostSampler(1, shared_memory=pair[0]), pair[0])
    address = gpu.share(16)
    with pytest.raises(ValueError, match="incomplete"):
        gpu.connect([address, b"x"])
    with pytest.raises(ValueError, match="with an address of each"):
        gpu.connect([address])
    with pytest.raises(ValueError, match="rank 1 is of another build, group or model"):
        gpu.connect([address, address])
    monkeypatch.setenv("ALLSPARK_PEER_ACCESS", "0")
    assert not _cuda.reaches_peer(0, 0)
    by_host = gpu.share(16)
    with pytest.raises(ValueError, match="differ on whether GPUs reach each other: set ALLSPARK_PEER_ACCESS=0"):
        gpu.connect([address, by_host])
    with pytest.raises(ValueError, match="there is no GPU 99"):
        _cuda.reaches_peer(0, 99)


@pytest.mark.parametrize("connected", [0, 1, 2])
def test_memory_of_a_load_that_failed_is_freed(connected):
    """Before ranks had the addresses; after one of two could not connect; after both have."""
    from allspark_server import _cuda, _native

    def load() -> None:
        gpus = [_cuda.Executor(0, _native.HostSampler(1, shared_memory=each), each) for each in shared_memories(2)]
        for gpu in gpus:
            gpu.add_op("all_reduce", [gpu.add_tensor(1 << 14)], [], [], {})
        addresses = [gpu.share(1 << 14) for gpu in gpus]  # 2 GiB each
        for gpu in gpus[:connected]:
            gpu.connect(addresses)
        if connected == 1:
            with pytest.raises(ValueError, match="incomplete"):
                gpus[1].connect([b"x", addresses[1]])
        ends = [threading.Thread(target=lambda: gpus.pop()) for _ in range(2)]
        for end in ends:
            end.start()
        del gpu
        for end in ends:
            end.join()

    load()
    before = _cuda.memory_info(0)[0]
    for _ in range(3):
        load()
    assert _cuda.memory_info(0)[0] > before - (4 << 30)


@pytest.mark.parametrize("fields", [{"weight_dtype": "int4"}, {"weight_dtype": "int8"},
                                    {"weight_dtype": "w8a8"}, {"weight_dtype": "float8"},
                                    {"cache_mode": "AsCacheQuantI8"}, {"cache_mode": "AsCacheQuantU4"},
                                    {"cache_dtype": "float8"}, {"cache_dtype": "float16"}, {"weight_dtype": "float16"},
                                    {"weight_dtype": "float16", "cache_dtype": "bfloat16"},
                                    {"weight_dtype": "bfloat16", "cache_dtype": "float16"},
                                    {"weight_dtype": "float16", "cache_mode": "AsCacheQuantI8"}],
                         ids=lambda fields: "-".join(map(str, fields.values())))
def test_formats_and_caches(fields):
    """The same bits alone, in a batch and in chunks; and near those of one rank."""
    pytest.importorskip("transformers")
    from support.checkpoints import checkpoint

    directory, prompts = checkpoint("qwen2-gqa-tied"), [prompt_of(n) for n in (1, 70, 129, 33)]
    found = []
    with on_gpus(2, directory, engine_max_batch=8, **fields) as gpu:
        for chunk in (64, 9):
            found.append([row.tobytes() for row in together(gpu, prompts, chunk)])
        alone = [together(gpu, [prompt], 64)[0] for prompt in prompts]
    assert found[0] == found[1] == [row.tobytes() for row in alone]
    with on_gpus(1, directory, engine_max_batch=8, **fields) as one:
        for row, other in zip(alone, together(one, prompts, 64)):
            assert np.sqrt(np.mean((row - other)**2)) < 0.4 * other.std()


def test_bits_with_graphs_and_without(monkeypatch):
    from allspark_server.runtime.device import Gpu

    def allocate(self, executor, rows, sizes, cache_dtype, outputs, drafts, masks, adapters):
        executor.allocate(rows, *sizes, cache_dtype, outputs, masks, drafts=drafts, graphs=False, **adapters)

    found = []
    for _ in range(2):
        with on_gpus(2) as gpu:
            ids, logits = gpu.generate(prompt_of(70), 20)
            found.append((ids, [row.tobytes() for row in logits]))
        monkeypatch.setattr(Gpu, "allocate", allocate)
    assert found[0] == found[1]


def test_ranks_have_the_gpus_in_the_order_given():
    found = []
    for unit_ in ("CUDA:0,1", "CUDA:1,0"):
        with on_gpus(2, compute_unit=unit_) as gpu:
            assert [runner._device._index for runner in gpu.runners] == gpu.config.device_ids
            ids, logits = gpu.generate(prompt_of(33), 5)
            found.append((ids, [row.tobytes() for row in logits]))
    assert found[0] == found[1]


# -- groups of processes -----------------------------------------------------------------------------------------------
CONFIGS = [{"do_sample": False}, {"seed": 3, "temperature": 1.2, "top_k": 20}, {"seed": 4, "top_p": 0.9},
           {"do_sample": False, "logprobs": False}, {"seed": 5, "min_p": 0.05, "repetition_penalty": 1.2}]


def ask(engine, number: int, config: dict, new: int = 40, after: int = 0, then=lambda: None) -> tuple:
    started = engine.start_request("m", {"input_ids": prompt_of(1 + 29 * number)},
                                   {"max_new_tokens": new, "eos_token_id": -1, "logprobs": True, **config})
    return started[2], after, then


def collect(asked) -> tuple[list, list]:
    results, after, then = asked
    ids, logprobs = [], []
    for elements in results:
        ids += elements.ids_from_generate
        logprobs += elements.token_logprobs_list
        if after and len(ids) >= after:
            after = 0
            then()
    return ids, logprobs


def test_a_group_of_two_processes_and_a_killed_rank():
    """The same bytes alone and together, with graphs and prefix cache; also after any rank was killed, busy or idle."""
    needs(2)
    words = ["--gpus", unit(2)["compute_unit"].removeprefix("CUDA:")]
    with background_group(words, timeout=120) as group, \
            ClientEngine(group.addresses[0], reconnect_timeout=120) as engine:
        engine.install_model(AsModelConfig(model_name="m", model_path=str(shipped_model()), engine_max_length=512,
                                           cache_memory=256 << 20, **unit(2)))
        engine.start_model("m")
        assert engine.get_rank_nums() == 2 and engine.get_model_info("m").isa.startswith("sm_")
        alone = [collect(ask(engine, i, config)) for i, config in enumerate(CONFIGS)]
        assert all(len(ids) == 40 for ids, _ in alone)
        asked = [ask(engine, i, config) for i, config in enumerate(CONFIGS)]
        assert [collect(each) for each in asked] == alone
        long = collect(ask(engine, 2, CONFIGS[1], 300))

        def kill(rank: int) -> None:
            processes = psutil.Process(group.supervisor_pid).children(recursive=True)
            [p for p in processes if p.cmdline()[1:3] == ["-m", "allspark_server"]][rank].kill()
        for rank in (-1, 0):    # the other one waits for it inside a kernel
            assert collect(ask(engine, 2, CONFIGS[1], 300, 100, partial(kill, rank))) == long
            assert collect(ask(engine, 0, CONFIGS[0])) == alone[0]
            kill(rank)          # while the group is idle
            assert collect(ask(engine, 0, CONFIGS[0])) == alone[0]


def asked_of_processes(ranks: int, dtype: str) -> list:
    """Greedy outputs of two prompts, and the sampled ones of the others, of a group whose ranks share GPUs."""
    words, greedy = ["--gpus", unit(ranks)["compute_unit"].removeprefix("CUDA:")], {"do_sample": False}
    with background_group(words, timeout=120) as group, ClientEngine(group.addresses[0]) as engine:
        engine.install_model(AsModelConfig(model_name="m", model_path=str(shipped_model()), engine_max_length=512,
                                           cache_memory=64 << 20, weight_dtype=dtype, **unit(ranks)))
        engine.start_model("m")
        assert engine.get_rank_nums() == ranks
        found = [collect(ask(engine, number, greedy, 12)) for number in (0, 3)]
        asked = [ask(engine, number, config, 12) for number, config in ((1, CONFIGS[1]), (0, greedy), (3, greedy))]
        sampled, *again = [collect(each) for each in asked]
        assert again == found
    return [*found, sampled]


@pytest.mark.parametrize("ranks, dtype", [(2, "bfloat16"), (2, "float16"), (3, "float32"), (3, "bfloat16"),
                                          (3, "float16"), (4, "float32"), (3, "float8"), (3, "w8a8")])
def test_processes_share_gpus(ranks, dtype):
    """With any number of GPUs; heads and features do not divide evenly by three. The same bytes alone and together; in
    float32 the greedy ids equal those of as many CPU ranks up to near-ties.
    """
    found = asked_of_processes(ranks, dtype)[:2]
    if dtype != "float32":
        return
    with Driver(shipped_model(), ranks, weight_dtype="float32", engine_max_length=512) as cpu:
        for number, (ids, _) in zip((0, 3), found):
            expected, logits = cpu.generate(prompt_of(1 + 29 * number), 12)
            for a, b, row in zip(ids, expected, logits):
                if a != b:
                    best = np.sort(row)[-2:]
                    assert best[1] - best[0] < 1e-3 * row.std()
                    break


@pytest.mark.parametrize("ranks, dtype", [(2, "bfloat16"), (3, "float32"), (3, "w8a8")])
def test_groups_that_share_by_host_memory_have_the_same_bytes(monkeypatch, ranks, dtype):
    """As if GPUs did not reach each other: sums, argmaxes and samples go through host memory."""
    found = []
    for access in ("1", "0"):
        monkeypatch.setenv("ALLSPARK_PEER_ACCESS", access)
        found.append(asked_of_processes(ranks, dtype))
    assert found[0] == found[1]

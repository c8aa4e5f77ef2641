"""Adapters on the GPU: low-rank products against the reference backend, whole models against the CPU's; a row's bits
are independent of other rows.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.expert_toys import ADAPTER_GATES, MOST_RANK, AdaptedExperts
from reference.plan import SAMPLE
from reference.toy import OUTPUTS, Toy, item, plan, spans_for, start
from support.gpu_toys import FLOAT16_FACTOR, compiled
from support.seed import SEED

pytestmark = pytest.mark.cuda

VOCAB, MOST = 53, 40
EXACT, ROUNDED = 2e-5, 8e-2  # relative to the values' root mean square; where values are rounded to bfloat16
LENGTHS, WHICH = (1, 30, 45, 1, 17, 2), (0, -1, 1, 0, -1, 1)  # prompts of one step, and their adapters


@pytest.fixture(autouse=True)
def seed():
    print(f"ALLSPARK_TEST_SEED={SEED}")


class Adapted:
    """A linear with its targets' adapters, and perhaps a gate, on the GPU and in the reference."""

    def __init__(self, k: int, blocks: list[int], ranks: list[dict[int, int]], form: str, gated: bool, dtype: str,
                 bias: bool, of_outputs: bool = False):
        """`ranks` of each adapter are those of its targets, which are `blocks`. With `of_outputs`, only rows with
        outputs are computed.
        """
        own, n = Toy(SEED), sum(blocks)
        x = own.embedding(VOCAB, k, own.rng.normal(size=(VOCAB, k)))
        x = own.op("rms_norm", (x,), k, (own.vector(k),), eps=1e-5, unit_offset=False)
        if of_outputs:
            x = own.op("select_rows", (x,), k, rows=OUTPUTS)
        matrix = own.program.add_matrix(n, k, form, 0)
        own.weights[matrix] = own.rng.normal(size=(n, k)) * k**-0.5
        y = own.op("linear", (x,), n, (matrix, own.vector(n)) if bias else (matrix,))
        for target, columns in enumerate(blocks):
            own.op("lora", (y, x), None, (), target=target, offset=sum(blocks[:target]), columns=columns)
        y = own.op("silu_mul", (y,), n // 2) if gated else y
        if of_outputs:
            own.op("sample", (y,), vocab_begin=0, vocab_size=own.program.tensors[y][0])
        else:
            own.finish(y)
        self.gpu = compiled(own, adapters=len(ranks) + 1, adapter_rank=MOST, adapter_dtype=dtype)
        self.runner, rng, known = own.runner(), np.random.default_rng(SEED + 1), []
        for index, of_targets in enumerate(ranks):
            filled, pairs = self.gpu.new_adapter(), {}
            for target, rank in of_targets.items():
                a = (rng.normal(size=(rank, k)) * k**-0.5).astype(np.float32)
                b = rng.normal(size=(blocks[target], rank)).astype(np.float32)
                assert filled.set(target, a, "F32", b, "F32", 0.7) == 0
                pairs[target] = (a.astype(float), 0.7 * b)
            self.gpu.set_adapter(index, filled)
            known.append(pairs)
        self.runner.set_adapter([known])


def step_of(prompts, which) -> bytes:
    work = [item(slot, len(p), SAMPLE, spans=spans_for(len(p), 8 * slot), adapter=adapter)
            for slot, (p, adapter) in enumerate(zip(prompts, which))]
    return plan(work, [start(slot, p) for slot, p in enumerate(prompts)])


def rows_of(gpu, prompts, which) -> list[bytes]:
    """Bits of the logits of each row."""
    found = [row.tobytes() for row in gpu.step(step_of(prompts, which), True).logits]
    gpu.step(plan([], free=range(len(prompts))))
    return found


@pytest.mark.parametrize("form, dtype, tolerance", [("float32", "float32", EXACT), ("bfloat16", "bfloat16", ROUNDED),
                                                    ("bfloat16", "float32", ROUNDED),
                                                    ("float16", "float16", ROUNDED * FLOAT16_FACTOR),
                                                    ("float16", "float32", ROUNDED * FLOAT16_FACTOR)])
@pytest.mark.parametrize("k, blocks, gated", [
    (1, [1], False), (7, [3, 5, 2], False), (96, [40, 8, 9], False), (257, [130], False), (1091, [513, 600], False),
    (64, [24, 24], True), (95, [13, 13], True), (200, [2, 2], True), (130, [258], True), (2049, [64, 64], True),
    (33, [1, 2, 3, 4, 5, 6], False), (5003, [40, 72], False), (9000, [9, 130], False),
])
def test_products_of_low_rank(k, blocks, gated, form, dtype, tolerance):
    """Against the reference; and every row has the same bits alone and beside others."""
    ranks = [{target: 1 + (7 * target + 15) % MOST for target in range(len(blocks))}, {len(blocks) - 1: MOST}]
    own = Adapted(k, blocks, ranks, form, gated, dtype, bias=True)
    rng = np.random.default_rng(SEED + 2)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    data = step_of(prompts, WHICH)
    expected = own.runner.step(data).logits
    found = own.gpu.step(data, True).logits
    own.gpu.step(plan([], free=range(len(prompts))))
    scale = np.sqrt(np.mean(expected**2))
    error = np.abs(found - expected).max() / scale
    print(f"error {error:.2e} of {tolerance}")
    assert error <= tolerance
    beside = [row.tobytes() for row in found]
    assert rows_of(own.gpu, prompts, WHICH) == beside
    for prompt, adapter, row in zip(prompts, WHICH, beside):
        assert rows_of(own.gpu, [prompt], [adapter]) == [row]
    others = rows_of(own.gpu, prompts, [-1 if adapter == 0 else adapter for adapter in WHICH])
    assert [a == b for a, b in zip(others, beside)] == [adapter != 0 for adapter in WHICH]
    own.gpu.set_adapter(0, None)
    with pytest.raises(ValueError, match="adapter 0, which is not loaded"):
        own.gpu.step(data)
    assert rows_of(own.gpu, prompts, [-1 if adapter == 0 else adapter for adapter in WHICH]) == others


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_with_outputs_have_their_adapters(dtype):
    """Adapters of a head: the bits of all rows."""
    rng = np.random.default_rng(SEED + 2)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    found = [rows_of(Adapted(96, [40, 9], [{0: 5, 1: 8}, {1: 3}], dtype, False, dtype, True, of_outputs).gpu,
                     prompts, WHICH) for of_outputs in (False, True)]
    different = {(prompt[-1], adapter) for prompt, adapter in zip(prompts, WHICH)}  # nothing else is in the last row
    assert found[0] == found[1] and len(set(found[0])) == len(different)


def test_matrices_that_cannot_be_are_refused():
    own = Adapted(31, [12, 5], [{0: 3}], "float32", False, "float32", False)
    filled = own.gpu.new_adapter()
    a, b = np.ones((3, 31), np.float32), np.ones((5, 3), np.float32)
    for target, first, second, match in ((2, a, b, "target 2 of 2"), (-1, a, b, "target -1"),
                                         (0, a, b, "3 x 31 and 5 x 3; target 0 has 31 inputs and 12 columns"),
                                         (1, a[:, :30], b, "3 x 30"), (1, a[:2], b, "2 x 31 and 5 x 3"),
                                         (1, np.ones((MOST + 1, 31), np.float32), np.ones((5, MOST + 1), np.float32),
                                          "ranks are at most 40")):
        with pytest.raises(ValueError, match=match):
            filled.set(target, first, "F32", second, "F32", 1.0)
    b[2, 1], a[0, 0] = np.nan, np.inf
    assert filled.set(1, a, "F32", b, "F32", 1.0) == 2
    with pytest.raises(ValueError, match="there is no adapter 2"):
        own.gpu.set_adapter(2, filled)
    with pytest.raises(ValueError, match="adapters are float32, bfloat16 or float16, not int8"):
        compiled(Toy(SEED), adapters=1, adapter_rank=4, adapter_dtype="int8")
    for form, dtype in (("float16", "bfloat16"), ("bfloat16", "float16")):
        with pytest.raises(ValueError, match="adapters of another 16-bit type than the weights"):
            Adapted(31, [12, 5], [{0: 3}], form, False, dtype, False)


# -- experts -----------------------------------------------------------------------------------------------------------
def experts_on_gpu(dtype: str, *sizes, **more) -> AdaptedExperts:
    """dtype: of the adapters."""
    return AdaptedExperts(Toy(SEED), lambda own: compiled(own, adapters=3, adapter_rank=MOST_RANK,
                                                          adapter_dtype=dtype), *sizes, **more)


@pytest.mark.parametrize("form, group, dtype, tolerance", [
    ("float32", 0, "float32", EXACT), ("bfloat16", 0, "bfloat16", ROUNDED), ("bfloat16", 0, "float32", ROUNDED),
    ("float16", 0, "float16", ROUNDED * FLOAT16_FACTOR), ("int8", 0, "float32", ROUNDED),
    ("int4", 32, "bfloat16", ROUNDED), ("w8a8", 0, "float32", 2 * ROUNDED), ("float8", 0, "float32", 4 * ROUNDED)])
@pytest.mark.parametrize("gates", ADAPTER_GATES)
@pytest.mark.parametrize("experts, top, width, inner", [(1, 1, 1, 1), (3, 2, 7, 5), (10, 3, 96, 31), (33, 8, 64, 40),
                                                        (5, 5, 260, 130), (128, 8, 70, 96)])
def test_experts_of_low_rank(experts, top, width, inner, gates, form, group, dtype, tolerance):
    """Against the reference; and every row has the same bits alone and beside others, with an adapter or without."""
    if group and width < 32:
        pytest.skip("there are others")
    own = experts_on_gpu(dtype, experts, top, width, inner, form, group, gates)
    rng = np.random.default_rng(SEED + 2)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    data = step_of(prompts, WHICH)
    expected, found = own.reference.step(data).logits, own.native.step(data, True).logits
    own.native.step(plan([], free=range(len(prompts))))
    error = np.abs(found - expected).max() / max(np.sqrt(np.mean(expected**2)), 1e-3)
    print(f"error {error:.2e} of {tolerance}")
    assert error <= tolerance
    beside = [row.tobytes() for row in found]
    for prompt, adapter, row in zip(prompts, WHICH, beside):
        assert rows_of(own.native, [prompt], [adapter]) == [row]
    plain = rows_of(own.native, prompts, [-1] * len(prompts))  # the form without adapters, whose ops are fused
    assert all(row == bare for row, bare, adapter in zip(beside, plain, WHICH) if adapter < 0)
    assert any(row != bare for row, bare, adapter in zip(beside, plain, WHICH) if adapter == 0)


@pytest.mark.parametrize("begin, count", [(0, 4), (3, 5), (9, 1)])
def test_whole_experts_of_a_rank_have_their_adapters(begin, count):
    own = experts_on_gpu("float32", 10, 3, 40, 24, begin=begin, count=count)
    rng = np.random.default_rng(SEED + 2)
    data = step_of([rng.integers(0, VOCAB, length).tolist() for length in LENGTHS], WHICH)
    expected, found = own.reference.step(data).logits, own.native.step(data, True).logits
    assert np.abs(found - expected).max() <= EXACT * max(np.sqrt(np.mean(expected**2)), 1e-3)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "mixtral"])
def test_logits_with_adapters_of_experts_are_the_cpus(tmp_path, name, world):
    lora = pytest.importorskip("test_lora")
    from allspark_server import _cuda

    if _cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    base = lora.checkpoints.checkpoint(name)
    directory = lora.adapters.write_parameters(tmp_path / "one", base, rank=5)
    unit = ",".join(map(str, range(world)))
    with lora.Adapted(name, directory, world, weight_dtype="float32", compute_unit=f"CUDA:{unit}") as gpu, \
            lora.Adapted(name, directory, weight_dtype="float32") as cpu:
        for length in (1, 7, 129):
            prompt = lora.checkpoints.prompt_of(length)
            for row, other in zip(gpu.generate(prompt, 4)[1], cpu.generate(prompt, 4)[1]):
                assert np.sqrt(np.mean((row - other)**2)) < 1e-3 * other.std()


# -- whole models ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, on_cpu, tolerance", [("float32", "float32", 1e-3), ("bfloat16", "bfloat16", 5.0),
                                                      ("float16", "bfloat16", 1.0)])
@pytest.mark.parametrize("name", ["qwen2-gqa-tied", "llama-biases", "phi3-window", "glm4"])
def test_logits_are_the_cpus(tmp_path, name, dtype, on_cpu, tolerance):
    """In float32. In bfloat16, adapters of random matrices take logits far from these: on the CPU by 1 to 22 % of their
    deviation, on an H200 by 1.1 to 3.4 times that, whether adapters' sums are in float32 or by mma.sync. float16 is
    nearer than the CPU's bfloat16.
    """
    def far(a, b):
        return np.sqrt(np.mean((a - b)**2))

    lora = pytest.importorskip("test_lora")
    if name not in lora.EVERY:
        pytest.skip("no such checkpoint")
    targets = lora.targets_of(name)
    directory = lora.adapters.write_adapter(tmp_path / "one", lora.checkpoints.checkpoint(name), targets, rank=5)
    new = 4 if dtype == "float32" else 1
    with lora.Adapted(name, directory, weight_dtype=dtype, compute_unit="CUDA:0") as gpu, \
            lora.Adapted(name, directory, weight_dtype="float32") as cpu, \
            lora.Adapted(name, directory, weight_dtype=on_cpu) as alike:
        for length in (1, 7, 129):
            prompt = lora.checkpoints.prompt_of(length)
            found, expected, cpus = (each.generate(prompt, new)[1] for each in (gpu, cpu, alike))
            for row, other, rough in zip(found, expected, cpus):
                assert far(row, other) < tolerance * (other.std() if dtype == "float32" else far(rough, other))


@pytest.mark.parametrize("name", ["qwen2-gqa-tied", "qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("fields", [
    {"weight_dtype": "float32"}, {"weight_dtype": "bfloat16"}, {"weight_dtype": "float16"}, {"weight_dtype": "w8a8"},
    {"weight_dtype": "float8"}, {"weight_dtype": "int4", "weight_group_size": 32},
], ids=lambda fields: fields["weight_dtype"])
def test_bits_depend_on_nothing_else_in_the_batch(tmp_path, fields, name):
    """Rows with an adapter have the bits that they have alone; rows without one, the bits of a batch without adapters.
    Decode runs recorded graphs.
    """
    lora = pytest.importorskip("test_lora")
    base = lora.checkpoints.checkpoint(name)
    if name == lora.NAME:
        first = lora.adapters.write_adapter(tmp_path / "first", base, rank=16)
    else:
        first = lora.adapters.write_parameters(tmp_path / "first", base, rank=16)
    second = lora.adapters.write_adapter(tmp_path / "second", base, ["q_proj", "down_proj"], rank=3)
    prompts = [lora.checkpoints.prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    with lora.Driver(base, engine_max_batch=6, compute_unit="CUDA:0", **fields) as driver:
        plain = [lora.logits_of(driver, [(prompt, -1)], 5)[0] for prompt in prompts]
        for runner in driver.runners:
            runner.load_adapter(0, str(first)), runner.load_adapter(1, str(second))
        alone = [lora.logits_of(driver, [(prompt, adapter)], 5)[0] for prompt, adapter in zip(prompts, WHICH)]
        together = lora.logits_of(driver, list(zip(prompts, WHICH)), 5)
        assert lora.logits_of(driver, list(zip(prompts, WHICH)), 5) == together
        swapped = lora.logits_of(driver, list(zip(prompts, [1 - a if a >= 0 else a for a in WHICH])), 5)
    assert together == alone
    for i, adapter in enumerate(WHICH):
        assert (together[i] == plain[i]) == (adapter < 0), i
        assert (together[i] == swapped[i]) == (adapter < 0), i


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-3), ("bfloat16", 0.2), ("float16", 0.2 / 4)])
def test_on_several_gpus(tmp_path, dtype, tolerance):
    """The ranks' parts of an adapter add up to the result of the CPU's ranks; rows without an adapter keep their
    bits.
    """
    lora = pytest.importorskip("test_lora")
    from allspark_server import _cuda

    if _cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    base = lora.checkpoints.checkpoint(lora.NAME)
    directory = lora.adapters.write_adapter(tmp_path / "one", base, rank=6)
    prompts = [lora.checkpoints.prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    with lora.Driver(base, 2, engine_max_batch=6, compute_unit="CUDA:0,1", weight_dtype=dtype) as gpu, \
            lora.Driver(base, 2, engine_max_batch=6, weight_dtype="float32") as cpu:
        plain = [lora.logits_of(gpu, [(prompt, -1)], 4)[0] for prompt in prompts]
        for runner in (*gpu.runners, *cpu.runners):
            runner.load_adapter(0, str(directory))
        which = [min(adapter, 0) for adapter in WHICH]
        alone = [lora.logits_of(gpu, [(prompt, adapter)], 4)[0] for prompt, adapter in zip(prompts, which)]
        together = lora.logits_of(gpu, list(zip(prompts, which)), 4)
        expected = lora.logits_of(cpu, list(zip(prompts, which)), 1)
    assert together == alone
    for i, adapter in enumerate(which):
        assert (together[i] == plain[i]) == (adapter < 0), i
        found, exact = (np.frombuffer(rows[i][0], np.float32) for rows in (together, expected))
        assert np.abs(found - exact).max() < tolerance * exact.std()

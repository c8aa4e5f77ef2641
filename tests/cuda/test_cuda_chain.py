"""Ops of few rows that have one launch (native/cuda/chain.h) have the bits of launches one by one: of every format and
kind of layer, at awkward sizes, recorded or not, on one GPU and of several ranks, time after time."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import traceback

import numpy as np
import pytest

from allspark_server import _native
from gpu_toys import compiled
from reference.plan import DRAW
from reference.toy import OUTPUTS, Toy, item, plan, start

pytestmark = pytest.mark.cuda

SEED = int(os.environ.get("ALLSPARK_TEST_SEED", int.from_bytes(os.urandom(3), "little")))
VOCAB, PROMPT, SLOTS = 53, 3, 33
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33)
FORMS = ["bfloat16", "float8", "int4", "int8", "w8a8", "w4a8"]
KINDS = ["qwen2", "llama", "qwen3", "gemma"]
# hidden, query heads, KV heads, of so many features, inner
SHAPES = {"small": (24, 3, 1, 64, 37), "odd": (200, 5, 1, 72, 331), "even": (512, 8, 2, 64, 1408),
          "0.5b": (896, 14, 2, 64, 4864), "tall": (3584, 4, 1, 128, 640), "wide": (4224, 2, 1, 64, 200)}


@pytest.fixture(autouse=True)
def seed():
    """Shown with a failure; ALLSPARK_TEST_SEED makes the same inputs again."""
    print(f"ALLSPARK_TEST_SEED={SEED}")


def model(kind: str, form: str, shape: str, seed: int = 0, layers: int = 2, ranks: int = 1) -> Toy:
    """The same one for a seed. ranks: sums over so many of them."""
    own, (hidden, heads, kv, dim, inner) = Toy(SEED + seed), SHAPES[shape]
    gemma, width = kind == "gemma", (heads + 2 * kv) * dim
    norm = {"eps": 1e-6, "unit_offset": gemma}

    def matrix(n, k):
        handle = own.program.add_matrix(n, k, form, 0)
        own.weights[handle] = (own.rng.random((n, k), np.float32) - 0.5) * np.float32((12 / k)**0.5)
        return handle

    def summed(branch):
        if ranks > 1:
            own.op("all_reduce", (branch,))
        return branch

    def add(x, branch):
        if gemma:
            branch = own.op("rms_norm", (branch,), hidden, (own.vector(hidden),), **norm)
        own.op("add", (x, branch))

    x = own.embedding(VOCAB, hidden, own.rng.normal(size=(VOCAB, hidden)), scale=1.5 if gemma else 1.0)
    own.rotary(dim)
    summed(x)
    for layer in range(layers):
        normed = own.op("rms_norm", (x,), hidden, (own.vector(hidden),), **norm)
        bias = (own.vector(width),) if kind == "qwen2" else ()
        qkv = own.op("linear", (normed,), width, (matrix(width, hidden), *bias))
        for offset, count in ((0, heads), (heads * dim, kv)) if kind == "qwen3" else ():
            own.op("head_norm", (qkv,), None, (own.vector(dim),), eps=1e-6, heads=count, head_dim=dim, offset=offset)
        own.op("rope", (qkv,), offset=0, heads=heads + kv, head_dim=dim)
        attended = own.attention(qkv, heads, kv, dim, layer=layer)
        add(x, summed(own.op("linear", (attended,), hidden, (matrix(hidden, heads * dim),))))
        normed = own.op("rms_norm", (x,), hidden, (own.vector(hidden),), **norm)
        both = own.op("linear", (normed,), 2 * inner, (matrix(2 * inner, hidden),))
        gated = own.op("gelu_tanh_mul" if gemma else "silu_mul", (both,), inner)
        bias = (own.vector(hidden),) if kind == "llama" else ()
        add(x, summed(own.op("linear", (gated,), hidden, (matrix(hidden, inner), *bias))))
    last = own.op("select_rows", (x,), hidden, rows=OUTPUTS)
    last = own.op("rms_norm", (last,), hidden, (own.vector(hidden),), **norm)
    own.op("sample", (own.op("linear", (last,), VOCAB, (matrix(VOCAB, hidden),)),), vocab_begin=0, vocab_size=VOCAB)
    return own


def logits_of(gpu, rows: int, steps: int = 4) -> list[bytes]:
    """Of a step with prompts, and of such that decode: started one by one, recorded, replayed."""
    prompts = [[(7 * slot + i) % VOCAB for i in range(PROMPT)] for slot in range(rows)]
    data = plan([item(slot, PROMPT, DRAW, spans=[slot]) for slot in range(rows)],
                [start(slot, prompt) for slot, prompt in enumerate(prompts)])
    found = [gpu.step(data, True).logits.tobytes()]
    for _ in range(steps):
        found.append(gpu.step(plan([item(slot, 1, DRAW) for slot in range(rows)]), True).logits.tobytes())
    gpu.step(plan([], free=range(rows)))
    return found


def both(*what, **more) -> list:
    """A model with chains, and without."""
    own = model(*what)
    return [on_gpu(own, chains, **more) for chains in (True, False)]


def on_gpu(own: Toy, chains: bool, **more):
    return compiled(own, "bfloat16", slots=SLOTS, chains=chains, recovers=False, **more)


def compare(chained, single, rows=ROWS) -> None:
    for count in rows:
        assert logits_of(chained, count) == logits_of(single, count), f"{count} rows"


def test_there_are_chains():
    """And so these tests compare something."""
    for form in ("bfloat16", "float8"):
        chained, single = both("qwen2", form, "even")
        if chained.capability != 90:
            pytest.skip("kernels for chains are for capability 9.0")
        for rows in (1, 8, 32):
            assert chained.launches(rows) <= single.launches(rows) - 2, (form, rows)
        assert chained.launches(256) == single.launches(256)


@pytest.mark.parametrize("shape", ["small", "odd", "even"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_single_launches(kind, form, shape):
    compare(*both(kind, form, shape))


@pytest.mark.parametrize("shape", ["0.5b", "tall", "wide"])
@pytest.mark.parametrize("form", FORMS)
def test_larger_sizes(form, shape):
    compare(*both("qwen2", form, shape), rows=(1, 8, 9, 32))


def test_without_graphs():
    compare(*both("llama", "bfloat16", "odd", graphs=False), rows=(1, 5, 32))


@pytest.mark.parametrize("form", ["bfloat16", "float8", "w8a8"])
def test_time_after_time(form):
    chained, single = both("qwen2", form, "0.5b")
    for rows in (1, 7, 32):
        expected = logits_of(single, rows, 8)
        for turn in range(50):
            assert logits_of(chained, rows, 8) == expected, (rows, turn)


@pytest.mark.parametrize("form", ["bfloat16", "float8"])
def test_rows_without_an_adapter_have_the_same_bits_beside_rows_with_one(form):
    """The form of a program with ops for adapters has other chains."""
    def adapted(chains: bool):
        own, hidden, inner = Toy(SEED), 200, 300

        def matrix(n, k):
            handle = own.program.add_matrix(n, k, form, 0)
            own.weights[handle] = own.rng.normal(size=(n, k)) * k**-0.5
            return handle

        x = own.embedding(VOCAB, hidden, own.rng.normal(size=(VOCAB, hidden)))
        for _ in range(2):
            normed = own.op("rms_norm", (x,), hidden, (own.vector(hidden),), eps=1e-6)
            gates = own.op("linear", (normed,), 2 * inner, (matrix(2 * inner, hidden),))
            own.op("lora", (gates, normed), None, (), target=0, offset=0, columns=inner)
            gated = own.op("silu_mul", (gates,), inner)
            own.op("add", (x, own.op("linear", (gated,), hidden, (matrix(hidden, inner),))))
        last = own.op("rms_norm", (x,), hidden, (own.vector(hidden),), eps=1e-6)
        own.finish(own.op("linear", (last,), VOCAB, (matrix(VOCAB, hidden),)))
        gpu = on_gpu(own, chains, adapters=1, adapter_rank=8, adapter_dtype="bfloat16")
        filled, rng = gpu.new_adapter(), np.random.default_rng(SEED)
        a, b = (rng.normal(size=size).astype(np.float32) for size in ((8, hidden), (inner, 8)))
        assert filled.set(0, a, "F32", b, "F32", 0.1) == 0
        gpu.set_adapter(0, filled)
        return gpu

    def logits(gpu, adapters):
        work = [item(slot, 1, DRAW, spans=[slot], adapter=adapter) for slot, adapter in enumerate(adapters)]
        found = gpu.step(plan(work, [start(slot, [slot % VOCAB]) for slot in range(len(adapters))]), True).logits
        gpu.step(plan([], free=range(len(adapters))))
        return [row.tobytes() for row in found]

    chained, single = adapted(True), adapted(False)
    for rows in (1, 2, 9, 32):
        mixed, none = [slot % 2 - 1 for slot in range(rows)], [-1] * rows
        expected = logits(single, mixed)
        assert logits(chained, mixed) == expected
        assert logits(chained, none)[::2] == expected[::2] == logits(single, none)[::2]


# -- ranks -------------------------------------------------------------------------------------------------------------
def window_of(rank: int, ranks: int, path: str):
    size = -(-_native.Window.bytes_needed(ranks) // mmap.PAGESIZE) * mmap.PAGESIZE
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), size * ranks)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return memory, _native.Window(rank, ranks, [address + r * size for r in range(ranks)], False, 60.0)


def rank_of(rank: int, ranks: int, path: str, seed: int, cases: list, pipe) -> None:
    """A process: for each case, of (kind, form, shape) and numbers of rows, logits with chains and without."""
    global SEED
    SEED = seed
    try:
        from allspark_server import _cuda

        for number, (what, all_rows, times) in enumerate(cases):
            own, found = model(*what, seed=100 + rank, ranks=ranks), []
            for turn, chains in enumerate((True, False)):
                memory, window = window_of(rank, ranks, f"{path}/{number}-{turn}")
                gpu = on_gpu(own, chains, device=rank % _cuda.device_count(), window=window)
                found.append([logits_of(gpu, rows) for rows in all_rows for _ in range(times if chains else 1)])
                window.broadcast(b"".join(window.gather(b"") or []))  # nobody leaves before all have what they want
                del gpu
                window.close()
                del memory
            pipe.send(found)
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks(ranks, tmp_path):
    """In processes, which share GPUs if need be: sums over ranks, with their norms, and products that quantize them."""
    cases = [(("qwen2", "bfloat16", "even"), (1, 7, 8, 32), 10), (("gemma", "bfloat16", "odd"), (1, 9), 1),
             (("llama", "float8", "even"), (1, 8, 32), 10), (("qwen3", "int4", "odd"), (1, 9), 1),
             (("llama", "w8a8", "even"), (2, 32), 1)]
    size = -(-_native.Window.bytes_needed(ranks) // mmap.PAGESIZE) * mmap.PAGESIZE
    for number in range(len(cases)):
        for turn in range(2):
            (tmp_path / f"{number}-{turn}").write_bytes(bytes(size * ranks))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(ranks):
        own, other = context.Pipe()
        what = (rank, ranks, str(tmp_path), SEED, cases, other)
        processes.append(context.Process(target=rank_of, args=what, daemon=True))
        pipes.append(own)
        processes[-1].start()
    try:
        for what, all_rows, times in cases:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(60), f"{what}: nothing of rank {rank}"
                found = pipe.recv()
                assert isinstance(found, list), found
                chained, single = found
                for at, rows in enumerate(all_rows):
                    for turn in range(times):
                        assert chained[at * times + turn] == single[at], (what, rank, rows, turn)
    finally:
        for process in processes:
            process.kill()
            process.join(10)

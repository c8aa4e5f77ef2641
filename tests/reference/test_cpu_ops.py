"""Every op of the CPU backend against the reference backend: programs of one op between embedding and sampling, with
new inputs in each run, and sizes that are 1, odd and prime.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from allspark_server import _native
from allspark_server.runtime.plan import STATES
from reference.backend import StepResult, compile
from reference.batch import Limits, Slots
from reference.plan import GIVEN, LOOKUP, SAMPLE
from reference.toy import ALL, OUTPUTS, Toy, generate, item, plan, spans_for, start
from support.driver import shared_memories
from support.latent_toys import VOCAB, embedded, indexed, selective
from support.recurrent_toys import SHAPES, SSD_SHAPES, STATE_KINDS, recurrent_model, with_conv, with_delta, with_ssd
from support.seed import SEED

LENGTHS = (1, 2, 17, 33, 70)  # of the prompts of one step
EXACT = 2e-5  # relative to the values' root mean square


@pytest.fixture(autouse=True)
def seed():
    """Shown with a failure; ALLSPARK_TEST_SEED makes the same inputs again."""
    print(f"ALLSPARK_TEST_SEED={SEED}")


def toy():
    return Toy(SEED)


def compiled(own: Toy, threads: int = 2, rank: int = 0, world: int = 1, window=None, dtype="float32", masks: int = 0,
             fused: bool = True, long: bool = False, **more):
    """The same program in the CPU backend; `long` allows contexts of more than 1,000 positions; `more` are arguments of
    allocate().
    """
    executor = _native.Executor(rank, world, window, [], threads)
    for group in own.cache_groups:
        executor.add_cache_group(*group)
    stacks = {op["weights"][0]: op["attributes"]["experts"] for op in own.program.ops if op["name"] == "expert_linear"}
    stacks |= {op["weights"][0]: op["attributes"]["heads"] for op in own.program.ops if op["name"] == "head_linear"}
    for handle, (n, k, form, group) in enumerate(own.program.weights):
        values = own.weights[handle].astype(np.float32)
        if not k:
            assert executor.add_vector(values) == handle
            continue
        assert executor.add_matrix(n, k, form, group, stacks.get(handle, 1)) == handle
        executor.fill_matrix(handle, values, "F32")
        own.weights[handle] = np.stack([executor.read_row(handle, row) for row in range(n)])  # as it recovers them
    for row_set in own.program.row_sets[2:]:
        executor.add_row_set(*row_set)
    for width, rows, _ in own.program.tensors:
        executor.add_tensor(width, rows)
    for op in own.program.ops:
        executor.add_op(op["name"], op["inputs"], op["outputs"], op["weights"], op["attributes"])
    executor.allocate(max_rows=2048 if long else 256, max_slots=8, max_length=2048 if long else 128, span_size=16,
                      cache_dtype=dtype, masks=masks, fused=fused,
                      **{"max_outputs": 64, "num_spans": 256 if long else 64, **more})
    return executor


def prompts():
    rng = np.random.default_rng(SEED + 1)
    return [rng.integers(0, VOCAB, n).tolist() for n in LENGTHS]


def step_of(given) -> bytes:
    """A step that computes all prompts whole and samples after each."""
    work = [item(slot, len(p), SAMPLE, spans=spans_for(len(p), 8 * slot)) for slot, p in enumerate(given)]
    return plan(work, [start(slot, p) for slot, p in enumerate(given)])


def compare(own: Toy, tolerance: float = EXACT, threads: int = 2, cache: str = "float32") -> None:
    """Compares logits of every prompt's last row. The program must end with `sample`."""
    executor, data = compiled(own, threads, dtype=cache), step_of(prompts())
    found = executor.step(data, True)
    expected = own.runner().step(data)
    scale = max(np.sqrt(np.mean(expected.logits**2)), 1e-3)
    error = np.abs(found.logits - expected.logits).max() / scale
    print(f"error {error:.2e} of {tolerance}")
    assert error <= tolerance
    if tolerance == EXACT:
        chosen = np.take_along_axis(expected.logits, found.tokens[:, None], 1)[:, 0]
        assert (expected.logits.max(1) - chosen <= 1e-4 * scale).all()
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-3)


WIDTHS = (1, 7, 31, 96, 257)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_embedding_select_rows_and_sample(width, threads):
    own = toy()
    own.finish(embedded(own, width))
    compare(own, threads=threads)


def test_scaled_embedding():
    own = toy()
    own.finish(own.embedding(VOCAB, 31, own.rng.normal(size=(VOCAB, 31)), scale=31**0.5))
    compare(own)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width, unit_offset):
    own = toy()
    own.finish(own.op("rms_norm", (embedded(own, width),), width, (own.vector(width),), eps=1e-5,
                      unit_offset=unit_offset))
    compare(own)


@pytest.mark.parametrize("gate, numbers", [
    ("silu_mul", {}), ("gelu_tanh_mul", {}), ("clamped_silu_mul", {"alpha": 1.702, "limit": 5.0})])
@pytest.mark.parametrize("width", WIDTHS)
def test_add_and_gates(width, gate, numbers):
    own = toy()
    both = own.embedding(VOCAB, 2 * width, 4 * own.rng.normal(size=(VOCAB, 2 * width)))
    x = own.op(gate, (both,), width, **numbers)
    own.finish(own.op("add", (x, own.op(gate, (both,), width, **numbers))))
    compare(own)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("op, attributes", [("scale", {"factor": -1.7}), ("soft_cap", {"cap": 2.5})])
@pytest.mark.parametrize("width", WIDTHS)
def test_scale_and_soft_cap(width, op, attributes, threads):
    own = toy()
    x = own.embedding(VOCAB, width, 4 * own.rng.normal(size=(VOCAB, width)))
    own.finish(own.op(op, (x,), **attributes))
    compare(own, threads=threads)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("heads, dim, offset", [(1, 2, 0), (3, 5, 7), (2, 64, 1), (7, 16, 0)])
def test_head_norm(heads, dim, offset, unit_offset):
    own = toy()
    x = embedded(own, offset + heads * dim + 3)
    own.finish(own.op("head_norm", (x,), None, (own.vector(dim),), eps=1e-6, heads=heads, head_dim=dim, offset=offset,
                      unit_offset=unit_offset))
    compare(own)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("q, k, rest", [(1, 1, 0), (6, 2, 3), (65, 0, 0), (65, 31, 31), (192, 64, 64)])
def test_norm_of_all_queries_and_all_keys(q, k, rest, threads):
    own = toy()
    x = embedded(own, q + k + rest)
    sums = own.op("qk_square_sums", (x,), 2, q_columns=q, k_offset=q, k_columns=k)
    weights = (own.vector(q), own.vector(k)) if k else (own.vector(q),)
    own.op("qk_norm", (x, sums), None, weights, eps=1e-6, q_width=2 * q, k_width=k, q_columns=q, k_columns=k)
    own.finish(x)
    compare(own, threads=threads)


FORMATS = [("float32", 0, EXACT), ("bfloat16", 0, 2e-2), ("int8", 0, 2e-3), ("int8", 32, 2e-3), ("int4", 0, 2e-3),
           ("int4", 32, 2e-3), ("w8a8", 0, 5e-2), ("w4a8", 32, 5e-2)]  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n, k", [(1, 1), (3, 7), (41, 31), (97, 64), (130, 257)])
@pytest.mark.parametrize("form, group, tolerance", FORMATS)
def test_linear(n, k, form, group, tolerance, bias):
    own = toy()
    x = embedded(own, k)
    matrix = own.program.add_matrix(n, k, form, group)
    own.weights[matrix] = own.rng.normal(size=(n, k))
    own.finish(own.op("linear", (x,), n, (matrix, own.vector(n)) if bias else (matrix,)))
    compare(own, tolerance)


@pytest.mark.parametrize("dim, rotary_dim", [(2, 2), (10, 10), (64, 64), (16, 6)])
@pytest.mark.parametrize("table", [{}, {"attention_factor": 1.25},
                                   {"dynamic": True, "base": 10000.0, "factor": 2.0, "original_max": 20},
                                   {"dynamic": True, "base": 10000.0, "original_max": 17, "growth": "powers"},
                                   {"long_table": True, "original_max": 20}])
@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
def test_rotary_table_and_rope(dim, rotary_dim, table, pairs):
    if table.get("dynamic") and rotary_dim == 2:
        pytest.skip("a dynamic base has the exponent dim / (dim - 2)")
    own = toy()
    x = embedded(own, 1 + 3 * dim)
    frequencies = own.vector((1e4 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32))
    tables = [frequencies] + [own.vector(rotary_dim // 2)] * ("long_table" in table)
    own.op("rotary_table", (), None, tables, rotary_dim=rotary_dim, **table)
    own.finish(own.op("rope", (x,), offset=1, heads=3, head_dim=dim, rotary_dim=rotary_dim, pairs=pairs))
    compare(own)


CACHES = [("float32", EXACT), ("bfloat16", 5e-2), ("int8", 0.1), ("uint4", 1.2)]


@pytest.mark.parametrize("cache, tolerance", CACHES)
@pytest.mark.parametrize("heads", [(1, 1, 2), (3, 1, 5), (6, 2, 24), (5, 5, 33), (4, 2, 128)])
def test_span_attention(heads, cache, tolerance):
    q_heads, kv_heads, dim = heads
    own = toy()
    own.finish(own.attention(embedded(own, (q_heads + 2 * kv_heads) * dim), *heads))
    compare(own, tolerance, cache=cache)


VARIANTS = [{"window": 1}, {"window": 20}, {"soft_cap": 1.5}, {"sinks": True}, {"alibi": True}, {"logn": 9.0},
            {"window": 33, "soft_cap": 2.0, "sinks": True, "alibi": True, "logn": 20.0}]  # fmt: skip


@pytest.mark.parametrize("cache, tolerance", CACHES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v))
def test_attention_with(variant, cache, tolerance):
    own = toy()
    x = embedded(own, 10 * 24)
    weights = [own.vector(6)] * bool(variant.get("sinks"))
    weights += [own.vector(np.linspace(0.05, 0.5, 6))] * bool(variant.get("alibi"))
    own.finish(own.attention(x, 6, 2, 24, weights, **variant))
    compare(own, tolerance, cache=cache)


def same_in_chunks(model, cache: str, threads: int, chunks=(1290, 333, 47)) -> None:
    """The same bits of long prompts in steps of many rows and of few, near the reference with a cache of floats."""
    results, lengths = [], [1290, 515]
    for chunk in chunks:
        own = model()
        executor, rng = compiled(own, threads, dtype=cache, long=True), np.random.default_rng(3)
        found = []
        for slot, length in enumerate(lengths):
            prompt, new = rng.integers(0, VOCAB, length).tolist(), True
            for begin in range(0, length, chunk):
                count, last = min(chunk, length - begin), begin + chunk >= length
                spans = list(range(100 * slot + -(-begin // 16), 100 * slot + -(-(begin + count) // 16)))
                result = executor.step(plan([item(slot, count, SAMPLE if last else 0, spans=spans)],
                                            [start(slot, prompt)] if new else []), True)
                new = False
            found.append(result.logits.tobytes())
        results.append(found)
    assert all(found == results[0] for found in results)
    if cache == "float32":
        rng = np.random.default_rng(3)
        for slot, length in enumerate(lengths):
            prompt = rng.integers(0, VOCAB, length).tolist()
            expected = own.runner(num_spans=(128,), max_length=2048, max_rows=2048).step(
                plan([item(0, length, SAMPLE, spans=spans_for(length))], [start(0, prompt)])).logits
            error = np.abs(np.frombuffer(results[0][slot], np.float32) - expected[0]).max()
            assert error <= EXACT * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cache", [cache for cache, _ in CACHES])
@pytest.mark.parametrize("window", [0, 1, 100, 128, 300, 1100])
def test_bits_of_a_window_do_not_depend_on_chunks(window, cache, threads):
    """Contexts of several KV splits, the first of which a window leaves behind."""
    def model():
        own = Toy(7)
        own.finish(own.attention(embedded(own, 4 * 16), 2, 1, 16, window=window))
        return own

    same_in_chunks(model, cache, threads)


@pytest.mark.parametrize("inner", [1, 5, 37])
def test_what_is_computed_together(inner):
    """`add` and `rms_norm`, `linear` and `silu_mul`: ops that the backend may run as one."""
    own = toy()
    x = embedded(own, 29)
    y = own.op("linear", (x,), 29, (own.matrix(29, 29),))
    own.op("add", (x, y))
    normed = own.op("rms_norm", (x,), 29, (own.vector(29),), eps=1e-6)
    both = own.op("linear", (normed,), 2 * inner, (own.matrix(2 * inner, 29), own.vector(2 * inner)))
    own.op("add", (x, own.op("linear", (own.op("silu_mul", (both,), inner),), 29, (own.matrix(29, inner),))))
    own.finish(x)
    compare(own)


# -- latent attention -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads, inputs, outputs, offset", [(1, 1, 1, 0), (3, 7, 33, 5), (5, 64, 20, 0),
                                                            (4, 48, 131, 1)])
def test_head_linear(heads, inputs, outputs, offset, threads):
    own = toy()
    x = embedded(own, offset + heads * inputs + 2)
    own.finish(own.op("head_linear", (x,), heads * outputs, (own.matrix(heads * outputs, inputs),), heads=heads,
                      offset=offset))
    compare(own, threads=threads)


@pytest.mark.parametrize("dtype, tolerance", [("float32", EXACT), ("bfloat16", 3e-2), ("int8", 5e-2)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads, latent, rope", [(1, 1, 1), (3, 20, 6), (16, 64, 16), (17, 33, 7), (5, 131, 64)])
def test_latent_attention(heads, latent, rope, threads, dtype, tolerance):
    own = Toy(SEED, groups=(("latent", 0),))
    x = embedded(own, 31)
    absorbed, rotated, kept = (own.op("linear", (x,), width, (own.matrix(width, 31),))
                               for width in (heads * latent, heads * rope + 3, latent + rope))
    own.finish(own.op("latent_attention", (absorbed, rotated, kept), heads * latent, layer=0, latent_dim=latent,
                      rope_dim=rope, scale=0.3 / np.sqrt(31 * (latent + rope))))
    compare(own, tolerance, threads, dtype)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width, threads):
    own = toy()
    x = embedded(own, width)
    own.finish(own.op("layer_norm", (x,), width, (own.vector(width), own.vector(width)), eps=1e-6))
    compare(own, threads=threads)


@pytest.mark.parametrize("dtype, tolerance", [("float32", EXACT), ("bfloat16", 3e-2), ("int8", 5e-2)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads, latent, rope, selected", [(1, 1, 1, 1), (3, 20, 6, 7), (16, 64, 16, 16),
                                                           (17, 33, 7, 33), (5, 131, 64, 128)])
def test_attention_over_selected_positions(heads, latent, rope, selected, threads, dtype, tolerance):
    own = Toy(SEED, groups=(("latent", 0),))
    own.finish(selective(own, heads, latent, rope, selected))
    compare(own, tolerance, threads, dtype)


@pytest.mark.parametrize("threads, cache", [
    (3, "float32"), (3, "bfloat16"), (3, "int8"), pytest.param(1, "float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("selected", [pytest.param(1, marks=pytest.mark.slow), 128, 300])
def test_bits_of_selected_positions_do_not_depend_on_chunks(selected, threads, cache):
    """Tokens repeat, so many scores are equal."""
    def model():
        own = Toy(7, groups=(("latent", 0),))
        own.finish(selective(own, 20, 12, 4, selected))
        return own

    same_in_chunks(model, cache, threads, (1290, 333, 47, 7))


@pytest.mark.parametrize("threads, selected, heads, dim", [
    (1, 1, 1, 1), (3, 50, 3, 7), (3, 129, 17, 33), (1, 700, 16, 32),
    pytest.param(3, 129, 64, 128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
def test_indexer(threads, selected, heads, dim, cache):
    """The positions themselves."""
    own = Toy(SEED, groups=(("latent", 0),))
    own.finish(indexed(own, heads, dim, selected, layer=0)[1])
    executor = compiled(own, threads, dtype=cache, long=True)
    runner = own.runner(num_spans=(128,), max_length=2048, max_rows=2048)
    given = [own.rng.integers(0, VOCAB, length).tolist() for length in (1, 131, 20, 716, 301)]
    rows = [(1, SAMPLE), (131, SAMPLE), (20, SAMPLE), (700, 0), (301, SAMPLE)]
    work = [item(slot, count, flags, spans=spans_for(count, (0, 1, 10, 12, 60)[slot]))
            for slot, (count, flags) in enumerate(rows)]
    for data in (plan(work, [start(slot, prompt) for slot, prompt in enumerate(given)]),  # many rows, then few
                 plan([item(3, 16, SAMPLE, spans=[80])])):
        np.testing.assert_array_equal(executor.step(data, True).logits, runner.step(data).logits)


# -- layers with a state -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("taps, bias, activated", [(1, False, True), (2, True, False), (4, False, True),
                                                   (4, True, True), (7, False, False)])
@pytest.mark.parametrize("channels", [1, 7, 64, 131])
def test_causal_conv(channels, taps, bias, activated, threads):
    own = toy()
    own.finish(with_conv(own, embedded(own, channels), channels, taps, bias, activated))
    compare(own, threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rate", [-3.0, 0.0, 4.0])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("bound", [0.0, -5.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_delta(shape, bound, channels, rate, threads):
    own = toy()
    own.finish(with_delta(own, embedded(own, 31), *shape, channels, rate, bound))
    compare(own, threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rate, limits", [(-3.0, {}), (0.0, {"least_step": 0.3, "most_step": 0.9}), (4.0, {})])
@pytest.mark.parametrize("shape", SSD_SHAPES)
def test_ssd(shape, rate, limits, threads):
    own = toy()
    own.finish(with_ssd(own, embedded(own, 31), *shape, rate, **limits))
    compare(own, threads=threads)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("heads, dim", [(1, 1), (3, 7), (2, 64), (5, 33)])
def test_gated_rms_norm(heads, dim, gate, gate_first):
    own = toy()
    x = own.embedding(VOCAB, heads * dim, 4 * own.rng.normal(size=(VOCAB, heads * dim)))
    gates = own.op("linear", (x,), heads * dim, (own.matrix(heads * dim, heads * dim),))
    weight = own.vector(heads * dim if gate_first else dim)
    own.finish(own.op("gated_rms_norm", (x, gates), None, (weight,), eps=1e-3, head_dim=dim, gate=gate,
                      gate_first=gate_first))
    compare(own)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_relu_square(width, threads):
    own = toy()
    own.finish(own.op("relu_square", (own.embedding(VOCAB, width, own.rng.normal(size=(VOCAB, width))),)))
    compare(own, threads=threads)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gate", ["sigmoid_gate", "multiply"])
def test_gates_of_each_value(gate, width):
    own = toy()
    x = own.embedding(VOCAB, width, 20 * own.rng.normal(size=(VOCAB, width)))
    own.finish(own.op(gate, (x, own.op("linear", (x,), width, (own.matrix(width, width),)))))
    compare(own)


LONG = 330


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_bits_of_states_do_not_depend_on_chunks_batches_or_threads(kind):
    """A prompt cut everywhere, alone and beside others, in slots that other sequences had before."""
    prompt = np.random.default_rng(3).integers(0, VOCAB, LONG).tolist()
    other = np.random.default_rng(4).integers(0, VOCAB, 100).tolist()

    def logits(executor, chunks, slot, beside=False):
        found, begin, new = None, 0, [start(slot, prompt)]
        while begin < LONG:
            count = min(next(chunks), LONG - begin)
            work = [item(slot, count, SAMPLE if begin + count == LONG else 0,
                         spans=list(range(100 * slot + -(-begin // 16), 100 * slot + -(-(begin + count) // 16))))]
            if beside and begin == 0:
                new, work = [start(slot + 1, other), *new], [
                    item(slot + 1, 100, SAMPLE, spans=spans_for(100, 100 * slot + 50)), *work]
            found = executor.step(plan(work, new), True).logits[-1:].tobytes()
            begin, new = begin + count, []
        executor.step(plan([], free=[slot, slot + 1] if beside else [slot]), False)
        return found

    def always(count):
        while True:
            yield count

    def varying():
        rng = np.random.default_rng(SEED)
        while True:
            yield int(rng.integers(1, 80))

    executor = compiled(recurrent_model(7, kind), 1, long=True)
    expected = logits(executor, always(LONG), 0)
    for count in (1, 2, 7, 63, 64, 65, 131):
        assert logits(executor, always(count), 0) == expected, count
    for _ in range(5):
        assert logits(executor, varying(), 1, beside=True) == expected
    for threads in (2, 3):
        assert logits(compiled(recurrent_model(7, kind), threads, long=True), varying(), 0, True) == expected
    exact = recurrent_model(7, kind).runner(num_spans=(128,), max_length=2048, max_rows=2048).step(
        plan([item(0, LONG, SAMPLE, spans=spans_for(LONG))], [start(0, prompt)])).logits[0]
    assert np.abs(np.frombuffer(expected, np.float32) - exact).max() <= EXACT * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("kind", STATE_KINDS)
@pytest.mark.parametrize("length", [1, 40, 57, 61, 62, 63, 64, 65, 120, 127])
def test_rejected_drafts_leave_no_trace_in_states(length, kind):
    """Right, wrong and partly right drafts, also beyond a multiple of 64 positions."""
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    executor = compiled(recurrent_model(9, kind), 2, long=True)
    expected, result, _ = generate(CpuSteps(executor), prompt, 20)
    for right in (0, 1, 3, 6):
        def guess(tokens, right=right):
            ahead = expected[len(tokens):len(tokens) + 6]
            return [*ahead[:right], *((token + 1) % VOCAB for token in ahead[right:])]

        found, drafted, steps = generate(CpuSteps(executor), prompt, 20, flags=GIVEN, guess=guess)
        assert found == expected and (steps < 20) == (right > 0)
        np.testing.assert_array_equal(drafted.logits[:20], result.logits[:20])


def test_a_state_that_is_not_there_is_refused():
    executor = compiled(recurrent_model(9, "delta"))
    prompt = prompts()[3]
    executor.step(plan([item(0, 33, spans=spans_for(33))], [start(0, prompt)]), True)
    executor.step(plan([], free=[0]), False)
    with pytest.raises(ValueError, match="slot 0 starts with 16 cached positions but no recurrent state"):
        executor.step(plan([item(0, 17, spans=spans_for(33))], [start(0, prompt, cached=16)]), True)


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_a_state_is_saved_and_loaded_with_its_bits(kind):
    """Through spans of the cache to another slot: the next rows' logits are those of the sequence itself."""
    executor, size = compiled(recurrent_model(9, kind), 2, long=True), 150
    prompt = np.random.default_rng(SEED).integers(0, VOCAB, size).tolist()
    own, state = spans_for(size), list(range(20, 220))
    expected = executor.step(plan([item(0, size, SAMPLE, spans=own)], [start(0, prompt)]), True).logits
    executor.step(plan([], free=[0], sections=[(STATES, [1, len(state), 0, 128, *state])]), False)
    found = executor.step(plan([item(1, size - 128, SAMPLE, spans=own)], [start(1, prompt, cached=128)],
                               sections=[(STATES, [0, len(state), 1, 128, *state])]), True).logits
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("words, problem", [
    ([1, 1, 0, 128, 20], "a copy of the state of slot 0 at position 128 and 1 spans"),
    ([1, 200, 0, 65, *range(20, 220)], "at position 65"),
    ([1, 200, 9, 128, *range(20, 220)], "of slot 9"),
    ([1, 200, 0, 128, *range(100, 300)], "the state takes"),
    ([1, 200, 0, 64, *range(20, 220)], "slot 0 has its recurrent state at position 0, not 64"),
    ([2, 200, 0, 64, *range(20, 220)], "copies of states are of 202 words each"),
    ([1, 200, 0, 64], "invalid number of spans of a state: 200"),
])
def test_copies_of_states_that_cannot_be(words, problem):
    executor = compiled(recurrent_model(9, "delta"), 2, long=True)
    executor.step(plan([item(0, 33, spans=spans_for(33))], [start(0, prompts()[3])]), True)
    with pytest.raises(ValueError, match=problem):
        executor.step(plan([], sections=[(STATES, words)]), False)


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_cache_groups_that_the_backend_does_not_have_are_refused():
    executor = _native.Executor()
    logits = executor.add_tensor(8, OUTPUTS)
    executor.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": 8})
    executor.add_cache_group("recurrent")
    with pytest.raises(ValueError, match="the CPU backend has no cache group of kind recurrent"):
        executor.allocate(max_rows=8, max_slots=8, max_length=16, span_size=16, num_spans=8, cache_dtype="float32")


# -- steps -------------------------------------------------------------------------------------------------------------
def small_model():
    own = toy()
    x = embedded(own, 24)
    own.rotary(8)
    for layer in range(2):
        qkv = own.op("linear", (x,), 40, (own.matrix(40, 24),))
        own.op("rope", (qkv,), offset=0, heads=4, head_dim=8)
        attended = own.attention(qkv, 3, 1, 8, layer=layer)
        own.op("add", (x, own.op("linear", (attended,), 24, (own.matrix(24, 24),))))
    selected = own.op("select_rows", (x,), 24, rows=OUTPUTS)
    own.op("sample", (own.op("linear", (selected,), VOCAB, (own.matrix(VOCAB, 24),)),), vocab_begin=0, vocab_size=VOCAB)
    return own


class CpuSteps:
    """The executor with the interface through which the reference's tests drive a runner."""

    def __init__(self, executor):
        self.executor, self.slots = executor, Slots(Limits())

    def step(self, data: bytes):
        result = self.executor.step(data, True)
        names = ("counts", "tokens", "status", "logprobs", "top_ids", "top_logprobs", "logits")
        return StepResult(**{name: np.asarray(getattr(result, name)) for name in names}).finished()


@pytest.mark.parametrize("flags, chunk", [(0, 5), (0, 100), (LOOKUP, 100), (GIVEN, 7)])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 5, "temperature": 1.5, "top_logprobs": 4}])
def test_whole_sequences(flags, chunk, sampling):
    """Prompts in chunks and both kinds of drafts: both backends give the same tokens up to near-ties."""
    own = small_model()
    executor, prompt = compiled(own), prompts()[3][:16] * 2  # something to look up
    expected, exact, _ = generate(own.runner(), prompt, 20, **sampling)

    def guess(tokens):
        ahead = expected[len(tokens):len(tokens) + 3]
        return [*ahead[:2], (ahead[2] + 1) % VOCAB] if len(ahead) == 3 else []

    drafts, given = 4 if flags == LOOKUP else 0, guess if flags == GIVEN else None
    found, result, _ = generate(CpuSteps(executor), prompt, 20, chunk=chunk, flags=flags, drafts=drafts, guess=given,
                                **sampling)
    same = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), 20)
    assert same == 20 or sampling or np.ptp(np.sort(exact.logits[same])[-2:]) < 1e-3
    scale = np.sqrt(np.mean(exact.logits**2))
    assert np.abs(result.logits[:same] - exact.logits[:same]).max(initial=0) <= 1e-4 * scale
    np.testing.assert_allclose(result.logprobs[:same], exact.logprobs[:same], atol=1e-3)
    if same == 20:  # and both backends had the same drafts
        again = generate(own.runner(), prompt, 20, chunk=chunk, flags=flags, drafts=drafts, guess=given, **sampling)[1]
        assert result.counts.tolist() == again.counts.tolist()
        assert flags != GIVEN or result.counts.max() == 3


def test_all_reduce():
    """Two ranks, each with half of K and of the vocabulary."""
    width, inner = 19, 10
    rng = np.random.default_rng(SEED)
    table, up, down = rng.normal(size=(VOCAB, width)), rng.normal(size=(inner, width)), rng.normal(size=(36, inner))
    toys = []
    for rank in range(2):
        own, ids = toy(), slice(26 * rank, 26 if rank == 0 else VOCAB)
        part = own.matrix(ids.stop - ids.start, width, table[ids])
        x = own.op("embedding", (), width, (part,), ALL, vocab_begin=ids.start)
        own.op("all_reduce", (x,))
        half = slice(5 * rank, 5 * rank + 5)
        y = own.op("linear", (own.op("linear", (x,), 5, (own.matrix(5, width, up[half]),)),), 36,
                   (own.matrix(36, 5, down[:, half]),))
        selected = own.op("select_rows", (own.op("all_reduce", (y,)),), 36, rows=OUTPUTS)
        head = own.matrix(18, 36, np.eye(36)[18 * rank:18 * rank + 18])
        own.op("sample", (own.op("linear", (selected,), 18, (head,)),), vocab_begin=18 * rank, vocab_size=36)
        toys.append(own)
    data, shared = step_of(prompts()), shared_memories(2)
    executors = [compiled(own, 1, rank, 2, shared[rank]) for rank, own in enumerate(toys)]
    with ThreadPoolExecutor(2) as pool:
        found = [f.result() for f in [pool.submit(e.step, data, True) for e in executors]]
    expected = compile([own.program for own in toys], [own.weights for own in toys], Limits()).step(data)
    logits = np.concatenate([part.logits for part in found], 1)
    assert np.abs(logits - expected.logits).max() <= EXACT * np.sqrt(np.mean(expected.logits**2))
    np.testing.assert_array_equal(found[0].tokens, expected.tokens)

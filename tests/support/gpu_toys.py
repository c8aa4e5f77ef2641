"""Toy programs (reference/toy.py) in the CUDA backend."""

from __future__ import annotations

import numpy as np

from allspark_server import _native
from reference.plan import GIVEN, PROMPT, SAMPLE
from reference.rounding import as_bf16
from reference.toy import OUTPUTS, Toy, item, plan, spans_for, start

from .seed import SEED


def executor(threads: int = 2, ranks=None, gpu: int = 0):
    """An executor of one rank, or of one of several `ranks`, whose shared memory this is."""
    from allspark_server import _cuda

    return _cuda.Executor(gpu, _native.HostSampler(threads, shared_memory=ranks), ranks)


def compiled(own: Toy, cache: str = "float32", masks: int = 0, graphs: bool = True, long: bool = False,
             outputs: int = 64, slots: int = 8, **more):
    """Builds a toy program as a CUDA executor and writes the matrices' recovered values back into the toy.

    `long` allows contexts of more than 1,000 positions; `more` are arguments of allocate(). Matrices are always filled
    from the values first given, because quantizing recovered values again may change them.
    """
    found, given = executor(), own.__dict__.setdefault("given", {})
    matrices = {"expert_linear": "experts", "head_linear": "heads"}
    stacks = {op["weights"][0]: op["attributes"][matrices[op["name"]]] for op in own.program.ops
              if op["name"] in matrices}
    for handle, (n, k, form, group) in enumerate(own.program.weights):
        values, recovered = given.get(handle, (None, None))
        if own.weights[handle] is not recovered:
            values = np.asarray(own.weights[handle], np.float32)
        if not k:
            assert found.add_vector(values) == handle
            continue
        assert found.add_matrix(n, k, form, group, stacks.get(handle, 1)) == handle
        if form == "mxfp4":
            assert found.fill_mx(handle, *mx_of(values)) == 0
        else:
            assert found.fill_matrix(handle, values, "F32") == np.count_nonzero(~np.isfinite(values))
        own.weights[handle] = found.read_rows(handle)
        given[handle] = values, own.weights[handle]
    for kind, window in own.cache_groups:
        found.add_cache_group(kind, window)
    for row_set in own.program.row_sets[2:]:
        found.add_row_set(*row_set)
    for width, rows, _ in own.program.tensors:
        found.add_tensor(width, rows)
    for op in own.program.ops:
        found.add_op(op["name"], op["inputs"], op["outputs"], op["weights"], op["attributes"])
    found.allocate(max_rows=2048 if long else 256, max_slots=slots, max_length=2048 if long else 128,
                   span_size=16, cache_dtype=cache, max_outputs=outputs, masks=masks, graphs=graphs,
                   **{"num_spans": max(256 if long else 64, 8 * slots), **more})
    return found


def mx_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in MXFP4 as a checkpoint has them: two values a byte [rows, columns / 2], scales [rows, columns / 32]."""
    groups = values.reshape(len(values), -1, 32)
    exponents = np.clip(np.ceil(np.log2(np.maximum(np.abs(groups).max(2), 1e-30) / 6)), -100, 1)
    sizes = np.abs(groups) / 2.0 ** exponents[..., None]
    codes = np.abs(sizes[..., None] - [0, 0.5, 1, 1.5, 2, 3, 4, 6]).argmin(3).astype(np.uint8)
    codes = (codes | (groups < 0) * np.uint8(8)).reshape(values.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, (exponents + 127).astype(np.uint8)


def warmed(gpu, count: int = 3):
    """The executor after its whole warm-up."""
    done, total = gpu.warm_up(0)
    assert done == 0 and total > 0
    while done < total:
        before = done
        done, again = gpu.warm_up(count)
        assert done == min(before + count, total) and again == total
    assert gpu.warm_up(count) == (total, total)
    return gpu


LENGTHS = (1, 2, 17, 33, 70)  # lengths of the prompts of a step
VOCAB = 53
EXACT, ROUNDED = 2e-5, 2e-2  # relative to the values' root mean square; ROUNDED: products of bfloat16
# Sums of products in three parts, which tensor cores round towards zero: up to 1.3 of EXACT in 6 runs of all shapes.
IN_PARTS = 2.5 * EXACT
#: tolerance of float16 relative to bfloat16's: float16 has three more bits of mantissa
FLOAT16_FACTOR = 1 / 8
DTYPES16 = ("bfloat16", "float16")
FLOAT16_MAX = 65504.0  # float16's largest value


def toy():
    return Toy(SEED)


def embedded(own: Toy, width: int) -> int:
    return own.embedding(VOCAB, width, own.rng.normal(size=(VOCAB, width)))


def step_of(given) -> bytes:
    """A step that computes all prompts whole and samples after each."""
    work = [item(slot, len(p), SAMPLE, spans=spans_for(len(p), 8 * slot)) for slot, p in enumerate(given)]
    return plan(work, [start(slot, p) for slot, p in enumerate(given)])


def compare(own: Toy, tolerance: float = EXACT, cache: str = "float32", mean: float = np.inf) -> None:
    """Compares logits of every prompt's last row with the reference backend's. The program must end with `sample`.
    tolerance, mean: of the greatest error and of the errors' root mean square, relative to that of the logits.
    """
    rng = np.random.default_rng(SEED + 1)
    data = step_of([rng.integers(0, VOCAB, n).tolist() for n in LENGTHS])
    found = compiled(own, cache).step(data, True)
    expected = own.runner().step(data)
    scale = max(np.sqrt(np.mean(expected.logits**2)), 1e-3)
    errors = np.abs(found.logits - expected.logits) / scale
    error, of_all = errors.max(), np.sqrt(np.mean(errors**2))
    print(f"error {error:.2e} of {tolerance}, root mean square {of_all:.2e}")
    assert error <= tolerance and of_all <= mean
    if tolerance <= IN_PARTS:   # which the bounds below follow from
        chosen = np.take_along_axis(expected.logits, found.tokens[:, None], 1)[:, 0]
        assert (expected.logits.max(1) - chosen <= 1e-4 * scale).all()
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-3)


def of_bytes(x: np.ndarray) -> np.ndarray:
    """Rows quantized to 8 bits, recovered."""
    top = np.abs(x).max(1, keepdims=True)
    return np.rint(x * (np.float32(127) / top)).astype(float) * (top / np.float32(127))


def as_float8(x: np.ndarray, group: int = 0) -> np.ndarray:
    """Rows in e4m3 with a scale each, or for each group of columns, recovered."""
    if group:
        return np.hstack([as_float8(x[:, first:first + group]) for first in range(0, x.shape[1], group)])
    top = np.abs(x).max(1, keepdims=True)
    scaled = (x * (np.float32(448) / top)).astype(float)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 1e-30))), -6) - 3)
    return np.clip(np.rint(scaled / step) * step, -448, 448).astype(np.float32) * (top / np.float32(448))


def rounded(x: np.ndarray, form: str) -> np.ndarray:
    """`x` rounded to a type; values beyond the type's range are clamped to it."""
    if form == "float16":
        return np.clip(x, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16).astype(float)
    return np.where(np.isnan(x), np.nan, as_bf16(x)) if form == "bfloat16" else x.astype(float)


HEADS = [(1, 1, 2), (3, 1, 5), (6, 2, 24), (5, 5, 33), (4, 2, 64), (7, 1, 64), (6, 6, 96), (4, 2, 128), (2, 1, 256),
         (40, 2, 64), (3, 1, 80)]


def logits_of_rows(gpu, prompts, rows_of_chunk) -> list[bytes]:
    """Logits of every position of every prompt, as bytes. Every step computes a chunk of each prompt that is not
    finished.
    """
    computed, found, first_span = [0] * len(prompts), [b""] * len(prompts), [0]
    for prompt in prompts:
        first_span.append(first_span[-1] - -len(prompt) // 16)
    while any(c < len(p) for c, p in zip(computed, prompts)):
        work, new = [], []
        for slot, prompt in enumerate(prompts):
            begin, count = computed[slot], min(rows_of_chunk(), len(prompt) - computed[slot])
            if not count:
                continue
            spans = range(first_span[slot] - -begin // 16, first_span[slot] - -(begin + count) // 16)
            flags = PROMPT | (SAMPLE if begin + count == len(prompt) else 0)
            work.append(item(slot, count, flags, outputs=count, spans=list(spans)))
            new += [start(slot, prompt)] if not begin else []
        logits, at = gpu.step(plan(work, new), True).logits, 0
        for each in work:
            found[each.slot] += logits[at:at + each.rows].tobytes()
            at, computed[each.slot] = at + each.rows, computed[each.slot] + each.rows
    return found


# -- steps -------------------------------------------------------------------------------------------------------------
def small_model(form: str = "float32", dim: int = 8):
    own = toy()
    x = embedded(own, 24)

    def matrix(n, k):
        handle = own.program.add_matrix(n, k, form, 0)
        own.weights[handle] = own.rng.normal(size=(n, k)) * k**-0.5
        return handle

    own.rotary(dim)
    for layer in range(2):
        normed = own.op("rms_norm", (x,), 24, (own.vector(24),), eps=1e-6)
        qkv = own.op("linear", (normed,), 5 * dim, (matrix(5 * dim, 24), own.vector(5 * dim)))
        own.op("rope", (qkv,), offset=0, heads=4, head_dim=dim)
        attended = own.attention(qkv, 3, 1, dim, layer=layer)
        own.op("add", (x, own.op("linear", (attended,), 24, (matrix(24, 3 * dim),))))
        both = own.op("linear", (own.op("rms_norm", (x,), 24, (own.vector(24),), eps=1e-6),), 74, (matrix(74, 24),))
        own.op("add", (x, own.op("linear", (own.op("silu_mul", (both,), 37),), 24, (matrix(24, 37),))))
    selected = own.op("select_rows", (x,), 24, rows=OUTPUTS)
    normed = own.op("rms_norm", (selected,), 24, (own.vector(24),), eps=1e-6)
    own.op("hidden_states", (normed,))
    own.op("sample", (own.op("linear", (normed,), VOCAB, (matrix(VOCAB, 24),)),), vocab_begin=0, vocab_size=VOCAB)
    return own


def tokens_of(gpu, prompts, flags=0, chunk=100, drafts=0, steps=12, **sampling):
    """Tokens and logprob bits of prompts that run together."""
    found = [[] for _ in prompts]
    new = [start(slot, p, **sampling) for slot, p in enumerate(prompts)]
    computed, spans, lengths = [0] * len(prompts), [0] * len(prompts), [len(p) for p in prompts]
    rng = np.random.default_rng(0)
    while min(len(f) for f in found) < steps:
        work = []
        for slot, _p in enumerate(prompts):
            rows = min(chunk, lengths[slot] - computed[slot])
            last = computed[slot] + rows == lengths[slot]
            known = rng.integers(0, VOCAB, drafts).tolist() if flags & GIVEN and last else []
            wanted = drafts if last and flags else 0
            needed = -(-(computed[slot] + rows + wanted) // 16)
            fresh = list(range(8 * slot + spans[slot], 8 * slot + max(spans[slot], needed)))
            work.append(item(slot, rows, (SAMPLE | flags) if last else 0, known=known, drafts=wanted, spans=fresh))
            spans[slot], computed[slot] = max(spans[slot], needed), computed[slot] + rows
        result, new, at, num_sampled = gpu.step(plan(work, new)), [], 0, 0
        for slot, each in enumerate(work):
            if each.flags & SAMPLE:
                count = int(result.counts[num_sampled])
                found[slot] += [(int(result.tokens[i]), result.logprobs[i].tobytes()) for i in range(at, at + count)]
                lengths[slot] += count
                computed[slot] = lengths[slot] - 1
                at, num_sampled = at + count, num_sampled + 1
    return [f[:steps] for f in found]

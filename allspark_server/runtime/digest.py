"""A digest of the results that this build computes on this machine, from small models run on fixed inputs.

Two machines with the same digest compute the same bits: the digest covers every kernel, the rotary table and the
sampler. Inputs are derived from integers, so they are equal on every machine.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from allspark_client.config import UNQUANTIZED
from allspark_server.runtime.native import cuda_library, native_library
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, SPAN = 96, 3, 1, 40, 160, 1100, 32
EXPERTS, TOP = 7, 3
RANK = 21
LONG = 1190  # tokens: more than one KV split of attention
WEIGHTS = (("float32", 0), ("bfloat16", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32))
# Formats of quantized checkpoints that other tools write: type, group size, layout of scales.
FOREIGN: tuple[tuple[str, int, dict[str, Any]], ...] = (
           ("int4", 32, {"scales": "float16", "zeros": "points"}),
           ("w8a8", 0, {"scales": "float32", "zeros": "none"}),
           ("int4", 32, {"scales": "float16", "zeros": "offsets", "super_group": 256, "scale_bits": 8, "center": 0}),
           ("int8", 16, {"scales": "float16", "zeros": "none", "super_group": 256, "scale_bits": 8, "center": 32}),
           ("e4m3", 64, {"scales": "float32", "zeros": "none"}), ("nf4", 64, {"scales": "float32", "zeros": "none"}))
CACHES = ("float32", "bfloat16", "int8", "uint4")
SAMPLINGS = (
    SamplingParams(do_sample=False, logprobs=True, top_logprobs=5),
    SamplingParams(seed=11, logprobs=True),
    SamplingParams(seed=12, temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.2),
    SamplingParams(seed=13, temperature=3.0, top_k=1050, top_p=0.99, logprobs=True),
)


def fixed_values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float32 values in [-1, 1) of this shape, computed exactly by splitmix64."""
    count = int(np.prod(shape))
    x = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(40)
    return (x.astype(np.float32) * np.float32(2**-23) - np.float32(1)).reshape(shape)


def _on_cpu() -> Any:
    return native_library().Executor(num_threads=1)


def _executor(weights: str, group: int, cache: str, experts: bool = False, empty: Callable = _on_cpu,
              adapted: bool = False) -> Any:
    """An executor with a model of one layer.

    experts: replace the MLP by experts of a quarter of its size. empty: makes an empty executor of a device. adapted:
    add an adapter of the weights' type.
    """
    native, e = native_library(), empty()
    seeds = iter(range(1, 100))

    def matrix(rows: int, columns: int, stack: int = 1, dtype: str = weights) -> int:
        identity = e.add_matrix(rows, columns, dtype, group if dtype == weights else 0, stack)
        values = fixed_values((rows, columns), next(seeds))
        e.fill_matrix(identity, values * np.float32(2.5 / math.sqrt(columns)), "F32")
        return identity

    def vector(size: int, middle: float = 0.0) -> int:
        return e.add_vector(np.float32(middle) + fixed_values((size,), next(seeds)) * np.float32(0.25))

    qkv_width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    x, y, qkv, context, both, hidden, last, logits = (e.add_tensor(width, rows) for width, rows in (
        (HIDDEN, False), (HIDDEN, False), (qkv_width, False), (HEADS * HEAD_DIM, False), (2 * INNER, False),
        (INNER, False), (HIDDEN, True), (VOCAB, True)))
    embedding = matrix(VOCAB, HIDDEN)
    frequencies = np.ldexp(np.float32(1), -np.arange(HEAD_DIM // 2, dtype=np.int32))  # exact
    e.add_op("rotary_table", [], [], [e.add_vector(frequencies)], {
        "rotary_dim": HEAD_DIM, "dynamic": 1, "base": 1e4, "factor": 2, "original_max": 1000})
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})
    e.add_op("rms_norm", [x], [y], [vector(HIDDEN, 1)], {"eps": 1e-6})
    e.add_op("linear", [y], [qkv], [matrix(qkv_width, HIDDEN), vector(qkv_width)], {})
    if adapted:
        e.add_op("lora", [qkv, y], [], [], {"target": 0, "offset": 0, "columns": qkv_width})
    e.add_op("head_norm", [qkv], [], [vector(HEAD_DIM, 1)],
             {"offset": 0, "heads": HEADS, "head_dim": HEAD_DIM, "eps": 1e-6})
    e.add_op("rope", [qkv], [], [], {"offset": 0, "heads": HEADS + KV_HEADS, "head_dim": HEAD_DIM})
    e.add_op("span_attention", [qkv], [context], [], {
        "layer": 0, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "group": HEADS // KV_HEADS,
        "scale": 0.15625})
    e.add_op("linear", [context], [y], [matrix(HIDDEN, HEADS * HEAD_DIM)], {})
    e.add_op("add", [x, y], [x], [], {})
    e.add_op("rms_norm", [x], [y], [vector(HIDDEN, 1)], {"eps": 1e-6})
    if experts:
        inner, routed = INNER // 4, e.add_row_set(native.ALL_ROWS, TOP)
        scores, both, hidden, out = (e.add_tensor(width, routed) for width in (1, 2 * inner, inner, HIDDEN))
        router = e.add_tensor(EXPERTS)
        e.add_op("linear", [y], [router], [matrix(EXPERTS, HIDDEN, dtype="float32")], {})
        e.add_op("router", [router], [scores], [], {"top_k": TOP})
        e.add_op("expert_linear", [y], [both], [matrix(EXPERTS * 2 * inner, HIDDEN, EXPERTS)], {"experts": EXPERTS})
        e.add_op("silu_mul", [both], [hidden], [], {})
        e.add_op("expert_linear", [hidden], [out], [matrix(EXPERTS * HIDDEN, inner, EXPERTS)], {"experts": EXPERTS})
        e.add_op("combine_experts", [out, scores], [y], [], {})
    else:
        e.add_op("linear", [y], [both], [matrix(2 * INNER, HIDDEN)], {})
        e.add_op("silu_mul", [both], [hidden], [], {})
        e.add_op("linear", [hidden], [y], [matrix(HIDDEN, INNER)], {})
        if adapted:
            e.add_op("lora", [y, hidden], [], [], {"target": 1, "offset": 0, "columns": HIDDEN})
    e.add_op("add", [x, y], [x], [], {})
    e.add_op("rms_norm", [x], [y], [vector(HIDDEN, 1)], {"eps": 1e-6})
    e.add_op("select_rows", [y], [last], [], {})
    e.add_op("linear", [last], [logits], [embedding], {})
    e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": VOCAB})
    room = {"adapters": 1, "adapter_rank": RANK, "adapter_dtype": weights} if adapted else {}
    e.allocate(LONG + 16, len(SAMPLINGS), LONG + 16, SPAN, LONG // SPAN + 16, cache, **room)
    if adapted:
        adapter = e.new_adapter()
        for target, (columns, rows) in enumerate(((HIDDEN, qkv_width), (INNER, HIDDEN))):
            adapter.set(target, fixed_values((RANK, columns), next(seeds)), "F32",
                        fixed_values((rows, RANK), next(seeds)), "F32", 0.0625)
        e.set_adapter(0, adapter)
    return e


def _run(executor: Any, lengths: tuple[int, ...], adapter: int = -1) -> str:
    """Digest of logits and sampled tokens: a step with prompts of these lengths, then a step of single tokens."""
    digest = hashlib.sha256()
    spans, new, work = 0, [], []
    for slot, length in enumerate(lengths):
        needed = length // SPAN + 1
        prompt = [(7 * i + 13 * slot + 3) % VOCAB for i in range(length)]
        new.append(NewSlot(slot, prompt, SAMPLINGS[slot].encode()))
        work.append(WorkItem(slot, length, SAMPLE, spans=list(range(spans, spans + needed)), adapter=adapter))
        spans += needed
    plan = StepPlan(new=new, work=work)
    for _ in range(2):
        result = executor.step(plan.encode(), True)
        for array in (result.logits, result.tokens, result.logprobs, result.top_ids, result.top_logprobs):
            digest.update(np.ascontiguousarray(array).tobytes())
        plan = StepPlan(work=[WorkItem(slot, 1, SAMPLE, adapter=adapter) for slot in range(len(lengths))])
    return digest.hexdigest()[:16]


def _sample() -> str:
    """Digest of tokens sampled from a vocabulary of realistic size, in large chunks."""
    digest = hashlib.sha256()
    logits = fixed_values((20_000,), 1) * np.float32(6)
    history = np.arange(0, 3000, 7, dtype=np.int32)
    for params in SAMPLINGS:
        block = np.frombuffer(params.encode(), np.int32)
        sampled = native_library().sample_once([logits[:10_240], logits[10_240:]], block, history)
        digest.update(repr((sampled["token"], np.float32(sampled["logprob"]).tobytes(), sampled["top_ids"])).encode())
        digest.update(np.float32(sampled["top_logprobs"]).tobytes())
    return digest.hexdigest()[:16]


def _foreign(dtype: str, group: int, layout: dict[str, Any]) -> str:
    """Digest of GEMMs of a matrix whose scales have this layout."""
    n, k, e = 70, 576, native_library().Executor(num_threads=1)
    bits, nested = 4 if dtype in ("int4", "nf4") else 8, layout.get("super_group", 0)
    identity, groups = e.add_matrix(n, k, dtype, group, **layout), k // (group or k)

    def integers(columns: int, seed: int, most: int) -> np.ndarray:
        return (np.abs(fixed_values((n, columns), seed)) * np.float32(most)).astype(np.uint8)

    scales = fixed_values((n, groups), 2).astype(layout["scales"])
    zeros = integers(groups, 3, 15) if layout["zeros"] == "points" else None
    above = None
    if nested:
        scales, above = integers(groups, 2, 63).view(np.int8), fixed_values((n, -(-k // nested)), 4).astype(np.float16)
        zeros, above = scales if layout["zeros"] == "offsets" else None, above.view(np.uint16)
    e.fill_quantized(identity, integers(k * bits // 8, 1, 63 if layout.get("center") else 120), scales, zeros, bits, k,
                     group, super_group=nested, super_scales=above,
                     super_offsets=above if nested and zeros is not None else None)
    digest = hashlib.sha256()
    for rows in (1, 3, 40):
        digest.update(e.multiply(identity, fixed_values((rows, k), 5), n).tobytes())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def result_digests() -> dict[str, str]:
    """Digests by case: each weight format, the sampler, then each cache type with a long prompt."""
    found = {f"weights {weights}": _run(_executor(weights, group, "float32"), (3, 37, 1, 290))
             for weights, group in WEIGHTS}
    found["vocabulary"] = _sample()
    found |= {f"cache {cache}": _run(_executor("bfloat16", 0, cache), (LONG,)) for cache in CACHES}
    return found


@functools.lru_cache(maxsize=1)
def expert_digests() -> dict[str, str]:
    """Digests of models with experts, by weight format."""
    return {f"experts {weights}": _run(_executor(weights, group, "float32", experts=True), (3, 37, 1))
            for weights, group in WEIGHTS}


@functools.lru_cache(maxsize=1)
def adapter_digests() -> dict[str, str]:
    """Digests of rows with an adapter, by its type."""
    return {f"adapters {dtype}": _run(_executor(dtype, 0, "float32", adapted=True), (3, 37, 1), adapter=0)
            for dtype in ("float32", "bfloat16")}


@functools.lru_cache(maxsize=8)
def gpu_digests(index: int) -> dict[str, str]:
    """Digests of a GPU, by weight format and cache type."""
    def empty() -> Any:
        return cuda_library().Executor(index, native_library().HostSampler(1))

    found = {f"weights {weights}": _run(_executor(weights, 0, "float32", empty=empty), (3, 37, 1, 290))
             for weights in UNQUANTIZED}
    found |= {f"cache {cache}": _run(_executor("bfloat16", 0, cache, empty=empty), (LONG,)) for cache in UNQUANTIZED}
    parts, norm = fixed_values((3, 5, 200), 1), fixed_values((200,), 3)
    for dtype in UNQUANTIZED:
        sums = empty().sum_ranks(parts, fixed_values((5, 200), 2), norm, dtype, True)
        found[f"sums over ranks {dtype}"] = hashlib.sha256(
            b"".join(np.ascontiguousarray(each).tobytes() for each in sums)).hexdigest()[:16]
    return {**found, "vocabulary": _sample(), "device": "CUDA"}


def results_digest(gpu: int | None = None) -> str:
    """One digest of all cases, of the CPU or (gpu: its index) of a GPU."""
    if gpu is None:
        foreign = {f"foreign {i}": _foreign(*form) for i, form in enumerate(FOREIGN)}
        found = {**result_digests(), **expert_digests(), **adapter_digests(), **foreign}
    else:
        found = gpu_digests(gpu)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:32]

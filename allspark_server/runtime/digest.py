"""A digest of the results that this build computes on this machine, from small models run on fixed inputs.

Two machines with the same digest compute the same bits: the digest covers every kernel, every op of the op table with
every attribute, and every field of the sampler's parameters (tests/runtime/test_digest.py checks that). Inputs are
derived from integers, so they are equal on every machine.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from allspark_client.config import UNQUANTIZED
from allspark_server.runtime.native import cuda_library, native_library
from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, StepPlan, WorkItem
from allspark_server.runtime.sampler_digest import SAMPLINGS, fixed_values, more_samplings, sample, sampled

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
def _on_cpu() -> Any:
    return native_library().Executor(num_threads=1)


def _weights_of(e: Any, weights: str, group: int,
                seeds: Iterator[int]) -> tuple[Callable[..., int], Callable[..., int]]:
    """Functions that add a matrix and a vector to an executor and fill them."""
    def matrix(rows: int, columns: int, stack: int = 1, dtype: str = weights) -> int:
        identity = e.add_matrix(rows, columns, dtype, group if dtype == weights else 0, stack)
        values = fixed_values((rows, columns), next(seeds))
        e.fill_matrix(identity, values * np.float32(2.5 / math.sqrt(columns)), "F32")
        return identity

    def vector(size: int, middle: float = 0.0) -> int:
        return e.add_vector(np.float32(middle) + fixed_values((size,), next(seeds)) * np.float32(0.25))

    return matrix, vector


def _executor(weights: str, group: int, cache: str, experts: bool = False, empty: Callable = _on_cpu,
              adapted: bool = False) -> Any:
    """An executor with a model of one layer.

    experts: replace the MLP by experts of a quarter of its size. empty: makes an empty executor of a device. adapted:
    add an adapter of the weights' type.
    """
    native, e = native_library(), empty()
    seeds = iter(range(1, 100))
    matrix, vector = _weights_of(e, weights, group, seeds)
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
        if adapted:
            e.add_op("expert_lora", [both, y], [], [], {"target": 1, "experts": EXPERTS, "offset": 0,
                                                        "columns": 2 * inner})
        e.add_op("silu_mul", [both], [hidden], [], {})
        e.add_op("expert_linear", [hidden], [out], [matrix(EXPERTS * HIDDEN, inner, EXPERTS)], {"experts": EXPERTS})
        if adapted:
            e.add_op("expert_lora", [out, hidden], [], [], {"target": 1 + EXPERTS, "experts": EXPERTS, "offset": 0,
                                                            "columns": HIDDEN})
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
        mlp = [(HIDDEN, INNER // 2)] * EXPERTS + [(INNER // 4, HIDDEN)] * EXPERTS if experts else [(INNER, HIDDEN)]
        for target, (columns, rows) in enumerate([(HIDDEN, qkv_width), *mlp]):
            adapter.set(target, fixed_values((RANK, columns), next(seeds)), "F32",
                        fixed_values((rows, RANK), next(seeds)), "F32", 0.0625)
        e.set_adapter(0, adapter)
    return e


def _variant(weights: str, group: int, empty: Callable = _on_cpu, long: bool = False) -> Any:
    """An executor with a model of two layers, of the ops, attributes and forms that `_executor` does not use.

    long: rotary tables that change for long prompts by a second table, instead of by a larger base; and other forms of
    attention and of the router.
    """
    native, e = native_library(), empty()
    matrix, vector = _weights_of(e, weights, group, iter(range(101, 200)))

    def frequencies(count: int, power: int = 0) -> int:
        return e.add_vector(np.ldexp(np.float32(1), power - np.arange(count, dtype=np.int32)))

    q, kv, inner, part = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, INNER // 4, 24
    x, y, qkv, context, both, hidden, last, logits, gate, squares = (e.add_tensor(width, rows) for width, rows in (
        (HIDDEN, False), (HIDDEN, False), (q + 2 * kv, False), (q, False), (2 * INNER, False), (INNER, False),
        (HIDDEN, True), (VOCAB, True), (1, False), (2, False)))
    e.add_cache_group("full", 0)
    e.add_cache_group("sliding", 48)
    head = {"head_dim": HEAD_DIM, "offset": 0}
    attention = {"head_dim": HEAD_DIM, "group": HEADS // KV_HEADS, "scale": 0.15625, "q_heads": HEADS,
                 "kv_heads": KV_HEADS, "q_head_begin": 0, "kv_begin": 0}
    embedding = matrix(VOCAB, HIDDEN)
    if long:
        e.add_op("rotary_table", [], [], [frequencies(HEAD_DIM // 2), frequencies(HEAD_DIM // 2, -2)], {
            "rotary_dim": HEAD_DIM, "long_table": 1, "original_max": 100, "attention_factor": 1.25})
    else:
        e.add_op("rotary_table", [], [], [frequencies(HEAD_DIM // 2)], {
            "rotary_dim": HEAD_DIM, "dynamic": 1, "base": 1e4, "factor": 2, "original_max": 100, "growth": "powers"})
    e.add_op("rotary_table", [], [], [frequencies(part // 2)], {"rotary_dim": part, "table": 1})
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0, "scale": 1.75})
    e.add_op("rms_norm", [x], [y], [vector(HIDDEN)], {"eps": 1e-4, "unit_offset": 1})
    e.add_op("linear", [y], [qkv], [matrix(q + 2 * kv, HIDDEN)], {})
    e.add_op("head_norm", [qkv], [], [vector(HEAD_DIM)], {**head, "heads": HEADS, "eps": 1e-4, "unit_offset": 1})
    e.add_op("rope", [qkv], [], [], {**head, "heads": HEADS + KV_HEADS, "rotary_dim": part, "table": 1,
                                     "pairs": "interleaved"})
    e.add_op("span_attention", [qkv], [context], [vector(HEADS)], {
        **attention, "layer": 0, "cache_group": 1, "window": 40, "soft_cap": 2.5, "sinks": 1})
    e.add_op("linear", [context], [y], [matrix(HIDDEN, q), vector(HIDDEN)], {})
    e.add_op("all_reduce", [y], [], [], {})
    e.add_op("scale", [y], [], [], {"factor": 0.75})
    e.add_op("add", [x, y], [x], [], {})
    e.add_op("linear", [x], [both], [matrix(2 * INNER, HIDDEN)], {})
    e.add_op("gelu_tanh_mul", [both], [hidden], [], {})
    e.add_op("linear", [hidden], [y], [matrix(HIDDEN, INNER)], {})
    e.add_op("linear", [x], [gate], [matrix(1, HIDDEN, dtype="float32")], {})
    e.add_op("sigmoid_mul", [y, gate], [], [], {})
    e.add_op("add", [x, y], [x], [], {})
    e.add_op("rms_norm", [x], [y], [vector(HIDDEN, 1)], {"eps": 1e-6})
    e.add_op("linear", [y], [qkv], [matrix(q + 2 * kv, HIDDEN), vector(q + 2 * kv)], {})
    e.add_op("qk_square_sums", [qkv], [squares], [], {"q_columns": q, "k_offset": q, "k_columns": kv})
    e.add_op("all_reduce", [squares], [], [], {})
    e.add_op("qk_norm", [qkv, squares], [], [vector(q, 1), vector(kv, 1)], {
        "eps": 1e-4, "q_width": q, "k_width": kv, "q_columns": q, "k_columns": kv})
    if long:
        e.add_op("rope", [qkv], [], [], {**head, "heads": HEADS + KV_HEADS})
        e.add_op("span_attention", [qkv], [context], [], {**attention, "layer": 0, "logn": 64})
    else:
        e.add_op("rope", [qkv], [], [], {**head, "heads": HEADS})
        slopes = e.add_vector(np.ldexp(np.float32(1), -1 - np.arange(HEADS, dtype=np.int32)))
        e.add_op("span_attention", [qkv], [context], [slopes], {**attention, "layer": 0, "alibi": 1})
    e.add_op("linear", [context], [y], [matrix(HIDDEN, q)], {})
    e.add_op("add", [x, y], [x], [], {})
    routed = e.add_row_set(native.ALL_ROWS, TOP)
    scores, pair, narrow, out = (e.add_tensor(width, routed) for width in (1, 2 * inner, inner, HIDDEN))
    experts = 2 * EXPERTS
    router = e.add_tensor(experts)
    e.add_op("linear", [x], [router], [matrix(experts, HIDDEN, dtype="float32")], {})
    if long:
        e.add_op("router", [router], [scores], [], {"top_k": TOP, "normalized": 1, "scale": 1.5})
    else:
        e.add_op("router", [router], [scores], [vector(experts)], {
            "top_k": TOP, "scores": "sigmoid", "normalized": 1, "scale": 2.5, "groups": EXPERTS, "top_groups": 4})
    e.add_op("expert_linear", [x], [pair], [matrix(experts * 2 * inner, HIDDEN, experts), vector(experts * 2 * inner)],
             {"experts": experts, "expert_begin": 0})
    e.add_op("clamped_silu_mul", [pair], [narrow], [], {"alpha": 1.702, "limit": 0.5})
    e.add_op("expert_linear", [narrow], [out], [matrix(experts * HIDDEN, inner, experts), vector(experts * HIDDEN)],
             {"experts": experts, "expert_begin": 0})
    e.add_op("combine_experts", [out, scores], [y], [], {})
    e.add_op("add", [x, y], [x], [], {})
    e.add_op("select_rows", [x], [last], [], {})
    e.add_op("hidden_states", [last], [], [], {})
    e.add_op("linear", [last], [logits], [embedding], {})
    e.add_op("soft_cap", [logits], [], [], {"cap": 1.5})
    e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": VOCAB})
    e.allocate(512, len(SAMPLINGS), 512, SPAN, 64, "float32", max_outputs=64)
    return e


def _finished(e: Any, x: int, last: int, logits: int, embedding: int, cache: str = "float32") -> Any:
    """The executor, with the end of its model: logits of the rows with outputs, and their samples."""
    e.add_op("select_rows", [x], [last], [], {})
    e.add_op("linear", [last], [logits], [embedding], {})
    e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": VOCAB})
    e.allocate(512, len(SAMPLINGS), 512, SPAN, 64, cache)
    return e


def _latent(weights: str, group: int, cache: str, empty: Callable = _on_cpu,
            row: tuple[int, int] = (HEAD_DIM // 2, 3 * HEAD_DIM), selected: int = 0) -> Any:
    """An executor with a layer of latent attention, and experts in groups that count as much as their best one. row:
    features of rotated keys and of latents. selected: how many positions an indexer selects; 0: there is none.
    """
    native, e = native_library(), empty()
    matrix, vector = _weights_of(e, weights, group, iter(range(301, 400)))
    rope, latent = row
    x, y, queries, kept, absorbed, recalled, context, last, logits = (e.add_tensor(size, rows) for size, rows in (
        (HIDDEN, False), (HIDDEN, False), (HEADS * (rope + HEAD_DIM), False), (latent + rope, False),
        (HEADS * latent, False), (HEADS * latent, False), (HEADS * HEAD_DIM, False), (HIDDEN, True), (VOCAB, True)))
    e.add_cache_group("latent", 0)
    e.add_cache_group("latent", 0)
    embedding = matrix(VOCAB, HIDDEN)
    frequencies = e.add_vector(np.ldexp(np.float32(1), -np.arange(rope // 2, dtype=np.int32)))
    e.add_op("rotary_table", [], [], [frequencies], {"rotary_dim": rope})
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})
    e.add_op("linear", [x], [queries], [matrix(HEADS * (rope + HEAD_DIM), HIDDEN)], {})
    e.add_op("linear", [x], [kept], [matrix(latent + rope, HIDDEN)], {})
    e.add_op("head_norm", [kept], [], [vector(latent, 1)], {"head_dim": latent, "offset": 0, "heads": 1, "eps": 1e-6})
    for rows, offset, heads in ((queries, 0, HEADS), (kept, latent, 1)):
        e.add_op("rope", [rows], [], [], {"head_dim": rope, "offset": offset, "heads": heads, "pairs": "interleaved"})
    e.add_op("head_linear", [queries], [absorbed], [matrix(HEADS * latent, HEAD_DIM, HEADS)],
             {"heads": HEADS, "offset": HEADS * rope})
    seen: list[list[int]] = [[], []]
    if selected:
        wide = (HEADS * HEAD_DIM, HEADS, HEAD_DIM)
        index = [e.add_tensor(width, False) for width in wide]
        for tensor, width in zip(index, wide):
            e.add_op("linear", [x], [tensor], [matrix(width, HIDDEN)], {})
        normed = e.add_tensor(HEAD_DIM, False)
        e.add_op("layer_norm", [index[2]], [normed], [vector(HEAD_DIM, 1), vector(HEAD_DIM)], {"eps": 1e-6})
        index[2] = normed
        seen = [[e.add_tensor(selected, False)] for _ in seen]
        for number, output in enumerate(seen):
            e.add_op("indexer", index, output, [], {"layer": 1, "cache_group": number})
    for number in (0, 1):
        e.add_op("latent_attention", [absorbed, queries, kept, *seen[number]], [recalled], [],
                 {"layer": 0, "cache_group": number, "latent_dim": latent, "rope_dim": rope, "scale": 0.125})
        if not number:
            e.add_op("add", [absorbed, recalled], [absorbed], [], {})
    e.add_op("head_linear", [recalled], [context], [matrix(HEADS * HEAD_DIM, latent, HEADS)],
             {"heads": HEADS, "offset": 0})
    e.add_op("linear", [context], [y], [matrix(HIDDEN, HEADS * HEAD_DIM)], {})
    e.add_op("add", [x, y], [x], [], {})
    routed, experts = e.add_row_set(native.ALL_ROWS, TOP), 2 * EXPERTS
    router = e.add_tensor(experts)
    scores, out = e.add_tensor(1, routed), e.add_tensor(HIDDEN, routed)
    e.add_op("linear", [x], [router], [matrix(experts, HIDDEN, dtype="float32")], {})
    e.add_op("router", [router], [scores], [],
             {"top_k": TOP, "groups": EXPERTS, "top_groups": 4, "group_scores": "largest"})
    e.add_op("expert_linear", [x], [out], [matrix(experts * HIDDEN, HIDDEN, experts)], {"experts": experts})
    e.add_op("combine_experts", [out, scores], [y], [], {})
    e.add_op("add", [x, y], [x], [], {})
    return _finished(e, x, last, logits, embedding, cache)


def _recurrent(weights: str, group: int, empty: Callable = _on_cpu, kinds: tuple[int, ...] = (0, 1)) -> Any:
    """An executor with a model of two layers with a state: with a decay for each head, and for each channel, and with
    each kind of gates. kinds: whether each layer's decays are for each channel.
    """
    e = empty()
    matrix, vector = _weights_of(e, weights, group, iter(range(201, 300)))
    width = HEADS * HEAD_DIM
    columns = 2 * KV_HEADS * HEAD_DIM + width
    x, y, mixed, convolved, out, gate, last, logits = (e.add_tensor(size, rows) for size, rows in (
        (HIDDEN, False), (HIDDEN, False), (columns, False), (columns, False), (width, False), (width, False),
        (HIDDEN, True), (VOCAB, True)))
    embedding = matrix(VOCAB, HIDDEN)
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})
    for channels in kinds:
        decays = HEADS * HEAD_DIM if channels else HEADS
        gates = e.add_tensor(decays + HEADS)
        e.add_op("linear", [x], [mixed], [matrix(columns, HIDDEN)], {})
        e.add_op("linear", [x], [gates], [matrix(decays + HEADS, HIDDEN, dtype="float32")], {})
        bias = [vector(columns)] if channels else []
        e.add_op("causal_conv", [mixed], [convolved], [vector(4 * columns), *bias],
                 {"taps": 4, "activated": 1 - channels})
        e.add_op("gated_delta", [convolved, gates], [out], [vector(HEADS, -3), vector(decays)],
                 {"key_dim": HEAD_DIM, "value_dim": HEAD_DIM, "channels": channels})
        e.add_op("linear", [x], [gate], [matrix(width, HIDDEN)], {})
        e.add_op("gated_rms_norm", [out, gate], [], [vector(HEAD_DIM, 1)],
                 {"eps": 1e-4, "head_dim": HEAD_DIM, "gate": "sigmoid" if channels else "silu"})
        e.add_op("sigmoid_gate", [out, gate], [], [], {})
        e.add_op("multiply", [out, gate], [], [], {})
        e.add_op("linear", [out], [y], [matrix(HIDDEN, width)], {})
        e.add_op("add", [x, y], [x], [], {})
    return _finished(e, x, last, logits, embedding)


def _state_space(weights: str, group: int, empty: Callable = _on_cpu) -> Any:
    """An executor with a model of two layers with a selective state space, of which one limits its steps, and an MLP
    without a gate.
    """
    e = empty()
    matrix, vector = _weights_of(e, weights, group, iter(range(301, 400)))
    heads, width, columns = 2 * HEADS, 2 * HEADS * HEAD_DIM, 2 * HEADS * HEAD_DIM + 4 * RANK
    x, y, mixed, steps, out, gate, inner, squares, last, logits = (e.add_tensor(size, rows) for size, rows in (
        (HIDDEN, False), (HIDDEN, False), (columns, False), (heads, False), (width, False), (width, False),
        (INNER, False), (2, False), (HIDDEN, True), (VOCAB, True)))
    embedding = matrix(VOCAB, HIDDEN)
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})
    limits: dict[str, float]
    for limits in ({}, {"least_step": 0.2, "most_step": 1.5}):
        e.add_op("linear", [x], [mixed], [matrix(columns, HIDDEN)], {})
        e.add_op("linear", [x], [steps], [matrix(heads, HIDDEN, dtype="float32")], {})
        e.add_op("ssd", [mixed, steps], [out], [vector(heads, -3), vector(heads), vector(heads, 1)],
                 {"state_dim": RANK, "head_dim": HEAD_DIM, **limits})
        e.add_op("linear", [x], [gate], [matrix(width, HIDDEN)], {})
        e.add_op("gated_rms_norm", [out, gate], [], [vector(width, 1)],
                 {"eps": 1e-4, "head_dim": HEADS * HEAD_DIM, "gate": "silu", "gate_first": 1})
        e.add_op("linear", [out], [y], [matrix(HIDDEN, width)], {})
        e.add_op("add", [x, y], [x], [], {})
    e.add_op("linear", [x], [inner], [matrix(INNER, HIDDEN)], {})
    e.add_op("relu_square", [inner], [], [], {})
    e.add_op("qk_square_sums", [inner], [squares], [], {"q_columns": INNER})
    e.add_op("all_reduce", [squares], [], [], {})
    e.add_op("qk_norm", [inner, squares], [], [vector(INNER, 1)],
             {"eps": 1e-4, "q_width": INNER, "q_columns": INNER})
    e.add_op("linear", [inner], [y], [matrix(HIDDEN, INNER)], {})
    e.add_op("add", [x, y], [x], [], {})
    return _finished(e, x, last, logits, embedding)


def _several_heads(weights: str, group: int, cache: str, empty: Callable = _on_cpu) -> Any:
    """An executor with heads of two sizes in two cache groups, normed values that are keys, and a layer that reads
    another one's keys; factors from weights, products with some columns of a tensor, and experts with scales.
    """
    native, e = native_library(), empty()
    matrix, vector = _weights_of(e, weights, group, iter(range(501, 600)))
    small, large = HEAD_DIM // 2, HEAD_DIM
    x, y, qkv, context, queries, keys, joined, wide, columns, router, last, logits = (
        e.add_tensor(size, rows) for size, rows in (
            (HIDDEN, False), (HIDDEN, False), ((HEADS + 2 * KV_HEADS) * small, False), (HEADS * small, False),
            (HEADS * large, False), (KV_HEADS * large, False), ((HEADS + 2 * KV_HEADS) * large, False),
            (HEADS * large, False), (2 * HIDDEN, False), (EXPERTS, False), (HIDDEN, True), (VOCAB, True)))
    e.add_cache_group("full", 0)
    e.add_cache_group("sliding", 48)
    embedding = matrix(VOCAB, HIDDEN)
    e.add_op("rotary_table", [], [], [e.add_vector(np.ldexp(np.float32(1), -np.arange(small // 2, dtype=np.int32)))],
             {"rotary_dim": small})
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})

    def attend(rows: int, out: int, dim: int, kv_heads: int, place: dict[str, int]) -> None:
        attributes = {"kv_heads": kv_heads} if kv_heads else {}
        e.add_op("head_norm", [rows], [], [vector(dim, 1)], {"head_dim": dim, "offset": 0, "heads": HEADS, "eps": 1e-6})
        if kv_heads:
            e.add_op("head_norm", [rows], [], [vector(dim, 1)],
                     {"head_dim": dim, "offset": (HEADS + kv_heads) * dim, "heads": kv_heads, "eps": 1e-6})
        e.add_op("span_attention", [rows], [out], [], {
            "q_heads": HEADS, "head_dim": dim, "group": HEADS // KV_HEADS, "scale": 1, **attributes, **place})
        e.add_op("linear", [out], [y], [matrix(HIDDEN, HEADS * dim)], {})
        e.add_op("add", [x, y], [x], [], {})

    e.add_op("linear", [x], [qkv], [matrix((HEADS + 2 * KV_HEADS) * small, HIDDEN)], {})
    e.add_op("rope", [qkv], [], [], {"head_dim": small, "offset": 0, "heads": HEADS + KV_HEADS})
    attend(qkv, context, small, KV_HEADS, {"layer": 0, "cache_group": 1, "window": 40})
    e.add_op("linear", [x], [queries], [matrix(HEADS * large, HIDDEN)], {})
    e.add_op("linear", [x], [keys], [matrix(KV_HEADS * large, HIDDEN)], {})
    e.add_op("concat", [queries, keys, keys], [joined], [], {})
    attend(joined, wide, large, KV_HEADS, {"layer": 0})
    e.add_op("linear", [x], [queries], [matrix(HEADS * large, HIDDEN)], {})
    attend(queries, wide, large, 0, {"layer": 0})
    e.add_op("linear", [x], [columns], [matrix(2 * HIDDEN, HIDDEN)], {})
    e.add_op("multiply", [y, columns], [], [], {"offset": 37})
    e.add_op("concat", [y, x], [columns], [], {})
    e.add_op("linear", [columns], [y], [matrix(HIDDEN, 2 * HIDDEN)], {})
    e.add_op("add", [x, y], [x], [], {})
    routed = e.add_row_set(native.ALL_ROWS, TOP)
    scores, out = e.add_tensor(1, routed), e.add_tensor(HIDDEN, routed)
    e.add_op("linear", [x], [router], [matrix(EXPERTS, HIDDEN, dtype="float32")], {})
    e.add_op("router", [router], [scores], [vector(EXPERTS), vector(EXPERTS, 1)], {"top_k": TOP, "expert_scales": 1})
    e.add_op("expert_linear", [x], [out], [matrix(EXPERTS * HIDDEN, HIDDEN, EXPERTS)], {"experts": EXPERTS})
    e.add_op("combine_experts", [out, scores], [y], [], {})
    e.add_op("add", [x, y], [x], [], {})
    e.add_op("scale", [x], [], [vector(1, 0.75)], {})
    return _finished(e, x, last, logits, embedding, cache)


def _encoder(weights: str, group: int, empty: Callable = _on_cpu) -> Any:
    """An executor with an encoder: a layer for each activation, of which every second one has a window, and each kind
    of pooling.
    """
    e = empty()
    matrix, vector = _weights_of(e, weights, group, iter(range(401, 500)))
    columns, positions = (HEADS + 2 * KV_HEADS) * HEAD_DIM, 300
    x, y, normed, qkv, attended, inner, halves, head, logits = (e.add_tensor(size, rows) for size, rows in (
        (HIDDEN, False), (HIDDEN, False), (HIDDEN, False), (columns, False), (HEADS * HEAD_DIM, False), (INNER, False),
        (INNER // 2, False), (HIDDEN, True), (HIDDEN, True)))
    e.add_op("embedding", [], [x], [matrix(VOCAB, HIDDEN)], {"vocab_begin": 0})
    e.add_op("position_embedding", [x], [], [vector(positions * HIDDEN)], {"positions": positions, "offset": 2})
    e.add_op("position_embedding", [x], [], [vector(positions * HIDDEN), vector(2 * HIDDEN)],
             {"positions": positions, "separator": 10})
    for number, function in enumerate(("gelu", "gelu_tanh", "silu", "tanh", "relu")):
        e.add_op("layer_norm", [x], [normed], [vector(HIDDEN, 1), vector(HIDDEN)], {"eps": 1e-5})
        e.add_op("linear", [normed], [qkv], [matrix(columns, HIDDEN)], {})
        e.add_op("span_attention", [qkv], [attended], [],
                 {"layer": 0, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "group": HEADS // KV_HEADS,
                  "scale": 0.2, "bidirectional": 1, "window": 33 if number % 2 else 0})
        e.add_op("linear", [attended], [y], [matrix(HIDDEN, HEADS * HEAD_DIM)], {})
        e.add_op("add", [x, y], [x], [], {})
        e.add_op("linear", [x], [inner], [matrix(INNER, HIDDEN)], {})
        e.add_op("activate", [inner], [], [], {"function": function})
        e.add_op("gelu_mul", [inner], [halves], [], {})
        e.add_op("linear", [halves], [y], [matrix(HIDDEN, INNER // 2)], {})
        e.add_op("add", [x, y], [x], [], {})
    e.add_op("pool_rows", [x], [logits], [], {"pooling": "cls"})
    for pooling in ("mean", "last"):
        e.add_op("pool_rows", [x], [head], [], {"pooling": pooling})
        e.add_op("add", [logits, head], [logits], [], {})
    e.add_op("hidden_states", [logits], [], [], {})
    e.allocate(512, len(SAMPLINGS), 512, SPAN, 64, "float32")
    return e


def _run_encoder(executor: Any, lengths: tuple[int, ...] = (3, 63, 290)) -> str:
    """Digest of an embedding of each of the texts of a step."""
    new, work, spans = [], [], 0
    for slot, length in enumerate(lengths):
        text = [(7 * i + 13 * slot + 3) % VOCAB for i in range(length)]
        new.append(NewSlot(slot, text, SAMPLINGS[0].encode()))
        work.append(WorkItem(slot, length, int(Flag.HIDDEN), outputs=1,
                             spans=list(range(spans, spans + length // SPAN + 1))))
        spans += length // SPAN + 1
    hidden = executor.step(StepPlan(new=new, work=work).encode(), False).hidden
    return hashlib.sha256(np.ascontiguousarray(hidden).tobytes()).hexdigest()[:16]


def _run(executor: Any, lengths: tuple[int, ...], adapter: int = -1, groups: int = 1, probes: int = 0) -> str:
    """Digest of logits and sampled tokens: a step with prompts of these lengths, then a step of single tokens.

    groups: of the cache. probes: rows of each prompt with log probabilities and hidden states.
    """
    digest = hashlib.sha256()
    flags, arrays = SAMPLE, ["logits", "tokens", "logprobs", "top_ids", "top_logprobs"]
    if probes:
        flags, arrays = flags | Flag.HIDDEN | Flag.PROMPT, [*arrays, "hidden", "prompt_logprobs"]
    spans, new, work = 0, [], []
    for slot, length in enumerate(lengths):
        needed = length // SPAN + 1
        prompt = [(7 * i + 13 * slot + 3) % VOCAB for i in range(length)]
        sampling = dataclasses.replace(SAMPLINGS[slot], prompt_len=length) if probes else SAMPLINGS[slot]
        new.append(NewSlot(slot, prompt, sampling.encode()))
        tables = [list(range(spans + i * needed, spans + (i + 1) * needed)) for i in range(groups)]
        work.append(WorkItem(slot, length, flags, spans=tables[0], other_spans=tables[1:], adapter=adapter,
                             outputs=min(length, probes) or -1))
        spans += groups * needed
    plan = StepPlan(new=new, work=work, groups=groups)
    for _ in range(2):
        result = executor.step(plan.encode(), True)
        for name in arrays:
            if (array := getattr(result, name)) is not None:
                digest.update(np.ascontiguousarray(array).tobytes())
        work = [WorkItem(slot, 1, flags, other_spans=[[]] * (groups - 1), adapter=adapter)
                for slot in range(len(lengths))]
        plan = StepPlan(work=work, groups=groups)
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
    found["vocabulary"] = sample()
    found |= {f"cache {cache}": _run(_executor("bfloat16", 0, cache), (LONG,)) for cache in CACHES}
    return found


@functools.lru_cache(maxsize=1)
def expert_digests() -> dict[str, str]:
    """Digests of models with experts, by weight format."""
    return {f"experts {weights}": _run(_executor(weights, group, "float32", experts=True), (3, 37, 1))
            for weights, group in WEIGHTS}


@functools.lru_cache(maxsize=1)
def variant_digests() -> dict[str, str]:
    """Digests of what the other models and samplings do not use, by weight format."""
    found = {f"variant {weights}": _run_variant(_variant(weights, group)) for weights, group in WEIGHTS}
    found["variant long"] = _run_variant(_variant("float32", 0, long=True))
    return {**found, "samplings": sampled(more_samplings())}


@functools.lru_cache(maxsize=1)
def latent_digests() -> dict[str, str]:
    """Digests of latent attention, by weight format and type of the cache."""
    cases = [(*WEIGHTS[0], "float32"), (*WEIGHTS[1], "bfloat16"), (*WEIGHTS[0], "int8")]
    found = {f"latent {weights} {cache}": _run(_latent(weights, group, cache), (3, 63, 130), groups=2)
             for weights, group, cache in cases}
    indexed = {f"indexer {cache}": _run(_latent("float32", 0, cache, selected=40), (3, 63, 130), groups=2)
               for cache in ("float32", "bfloat16")}
    return found | indexed


@functools.lru_cache(maxsize=1)
def recurrent_digests() -> dict[str, str]:
    """Digests of layers with a state, by weight format."""
    models = {"recurrent": _recurrent, "state space": _state_space}
    return {f"{name} {weights}": _run(build(weights, group), (3, 63, 130))
            for name, build in models.items() for weights, group in WEIGHTS[:2]}


@functools.lru_cache(maxsize=1)
def heads_digests() -> dict[str, str]:
    """Digests of heads of several sizes, by weight format and type of the cache."""
    return {f"heads {weights} {cache}": _run(_several_heads(weights, group, cache), (3, 63, 130), groups=2)
            for (weights, group), cache in zip((*WEIGHTS[:2], *WEIGHTS[:2]), CACHES)}


@functools.lru_cache(maxsize=1)
def encoder_digests() -> dict[str, str]:
    """Digests of encoders, by weight format."""
    return {f"encoder {weights}": _run_encoder(_encoder(weights, group)) for weights, group in WEIGHTS[:2]}


def _run_variant(executor: Any) -> str:
    return _run(executor, (3, 130, 290), groups=2, probes=8)


@functools.lru_cache(maxsize=1)
def adapter_digests() -> dict[str, str]:
    """Digests of rows with an adapter, by its type, without experts and with experts."""
    return {f"adapters {dtype} {experts}":
            _run(_executor(dtype, 0, "float32", experts=experts, adapted=True), (3, 37, 1), adapter=0)
            for dtype in ("float32", "bfloat16") for experts in (False, True)}


@functools.lru_cache(maxsize=8)
def gpu_digests(index: int) -> dict[str, str]:
    """Digests of a GPU, by weight format and cache type."""
    def empty() -> Any:
        return cuda_library().Executor(index, native_library().HostSampler(1))

    found = {f"weights {weights}": _run(_executor(weights, 0, "float32", empty=empty), (3, 37, 1, 290))
             for weights in UNQUANTIZED}
    found["recurrent"] = _run(_recurrent("float32", 0, empty, (0,)), (3, 63, 130))
    found["state space"] = _run(_state_space("float32", 0, empty), (3, 63, 130))
    found["latent"] = _run(_latent("float32", 0, "float32", empty), (3, 63, 130), groups=2)
    found["latent mma"] = _run(_latent("bfloat16", 0, "bfloat16", empty, (64, 512)), (3, 63, 290), groups=2)
    found |= {f"cache {cache}": _run(_executor("bfloat16", 0, cache, empty=empty), (LONG,)) for cache in UNQUANTIZED}
    parts, norm = fixed_values((3, 5, 200), 1), fixed_values((200,), 3)
    for dtype in UNQUANTIZED:
        sums = empty().sum_ranks(parts, fixed_values((5, 200), 2), norm, dtype, True)
        found[f"sums over ranks {dtype}"] = hashlib.sha256(
            b"".join(np.ascontiguousarray(each).tobytes() for each in sums)).hexdigest()[:16]
    for weights, long in (*((weights, False) for weights in UNQUANTIZED), ("float32", True)):
        try:
            result = _run_variant(_variant(weights, 0, empty, long))
        except ValueError as error:     # experts of 16 bits on a GPU with little shared memory
            result = str(error)
        found[f"variant {long} {weights}"] = result
    return {**found, "vocabulary": sample(), "samplings": sampled(more_samplings()), "device": "CUDA"}


def results_digest(gpu: int | None = None) -> str:
    """One digest of all cases, of the CPU or (gpu: its index) of a GPU."""
    if gpu is None:
        foreign = {f"foreign {i}": _foreign(*form) for i, form in enumerate(FOREIGN)}
        found = {**result_digests(), **expert_digests(), **adapter_digests(), **variant_digests(), **foreign,
                 **recurrent_digests(), **latent_digests(), **heads_digests(), **encoder_digests()}
    else:
        found = gpu_digests(gpu)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:32]

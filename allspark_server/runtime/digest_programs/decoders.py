"""Models of the digest that generate, of layers with attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from allspark_server.runtime.native import native_library
from allspark_server.runtime.sampler_digest import SAMPLINGS, fixed_values

from .parts import EXPERTS, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LONG, RANK, SPAN, TOP, VOCAB, on_cpu, weights_of


def decoder(weights: str, group: int, cache: str, experts: bool = False, empty: Callable = on_cpu,
            adapted: bool = False) -> Any:
    """An executor with a model of one layer.

    experts: replace the MLP by experts of a quarter of its size. empty: makes an empty executor of a device. adapted:
    add an adapter of the weights' type.
    """
    native, e = native_library(), empty()
    seeds = iter(range(1, 100))
    matrix, vector = weights_of(e, weights, group, seeds)
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


def variant(weights: str, group: int, empty: Callable = on_cpu, long: bool = False) -> Any:
    """An executor with a model of two layers, of the ops, attributes and forms that `_executor` does not use.

    long: rotary tables that change for long prompts by a second table, instead of by a larger base; and other forms of
    attention and of the router.
    """
    native, e = native_library(), empty()
    matrix, vector = weights_of(e, weights, group, iter(range(101, 200)))

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

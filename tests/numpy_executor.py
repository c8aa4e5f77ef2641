"""An interpreter of the op list in NumPy, in double precision: graph, lowering and shards without native code.

It has the native executor's building methods; `forward` runs the ranks' op lists in lockstep over one whole prompt.
"""

from __future__ import annotations

import numpy as np

from allspark_server.weights.asgraph import to_float32
from allspark_server.weights.formats import WeightFormat


def unquantized(graph) -> dict[str, WeightFormat]:
    """The formats of a model all of whose matrices are float32."""
    return {weight.name: WeightFormat("float32") for weight in graph.weights.values() if weight.is_matrix}


class NumpyExecutor:
    """Records what a rank's native executor would be given."""

    def __init__(self):
        self.weights: list[np.ndarray] = []
        self.widths: list[int] = []
        self.ops: list[tuple[str, list[int], list[int], list[int], dict]] = []

    def add_matrix(self, out_features: int, in_features: int, dtype: str, group_size: int = 0) -> int:
        self.weights.append(np.full((out_features, in_features), np.nan))
        return len(self.weights) - 1

    def fill_matrix(self, identity: int, array: np.ndarray, source: str, row_offset: int = 0, column: int = 0,
                    group_size: int = 0) -> int:
        assert array.ndim == 2 and array.strides[1] == array.itemsize
        rows, width = slice(row_offset, row_offset + len(array)), self.weights[identity].shape[1]
        assert column + width <= array.shape[1]
        array = array[:, column:column + width]
        self.weights[identity][rows] = np.stack([to_float32(row, source) for row in array])
        return array.size - int(np.isfinite(self.weights[identity][rows]).sum())

    def source_hash(self, identity: int) -> int:
        return 0

    def add_vector(self, values: np.ndarray) -> int:
        assert values.dtype == np.float32 and values.ndim == 1
        self.weights.append(values.astype(np.float64))
        return len(self.weights) - 1

    def add_tensor(self, width: int, logit_rows: bool = False) -> int:
        self.widths.append(width)
        return len(self.widths) - 1

    def add_op(self, kind: str, inputs: list[int], outputs: list[int], weights: list[int], attrs: dict) -> None:
        self.ops.append((kind, inputs, outputs, weights, attrs))


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _angles(ids: np.ndarray, inv_freq: np.ndarray, attrs: dict) -> np.ndarray:
    length = len(ids)
    if attrs["dynamic"] and length > attrs["original_max"]:
        dim = attrs["rotary_dim"]
        grown = attrs["factor"] * length / attrs["original_max"] - (attrs["factor"] - 1)
        inv_freq = 1.0 / (attrs["base"] * grown ** (dim / (dim - 2))) ** (np.arange(0, dim, 2) / dim)
    return np.arange(length, dtype=np.float32)[:, None] * inv_freq.astype(np.float32)


def _rotate(x: np.ndarray, heads: int, head_dim: int, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = head_dim // 2
    a, b = np.split(x.reshape(len(x), heads, head_dim), [half], axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1).reshape(len(x), -1)


def _attention(qkv: np.ndarray, attrs: dict) -> np.ndarray:
    q_heads, kv_heads, head_dim = attrs["q_heads"], attrs["kv_heads"], attrs["head_dim"]
    rows = len(qkv)
    q, k, v = (part.reshape(rows, -1, head_dim) for part in
               np.split(qkv, [q_heads * head_dim, (q_heads + kv_heads) * head_dim], axis=1))
    mask = np.triu(np.full((rows, rows), -np.inf), 1)
    out = np.empty_like(q)
    for head in range(q_heads):
        kv = (attrs["q_head_begin"] + head) // attrs["group"] - attrs["kv_begin"]
        assert 0 <= kv < kv_heads
        scores = q[:, head] @ k[:, kv].T * attrs["scale"] + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, kv]
    return out.reshape(rows, -1)


def forward(ranks: list[NumpyExecutor], prompt: list[int]) -> np.ndarray:
    """Logits after the prompt's last token, the ranks' parts of the vocabulary joined: [vocab]."""
    ids = np.asarray(prompt)
    values: list[dict[int, np.ndarray]] = [{} for _ in ranks]
    tables: list[tuple] = [()] * len(ranks)
    logits: list[np.ndarray] = []
    for ops in zip(*(rank.ops for rank in ranks)):
        kinds = {op[0] for op in ops}
        assert len(kinds) == 1, f"ranks run different ops: {kinds}"
        if kinds == {"all_reduce"}:
            total = sum(v[op[1][0]] for v, op in zip(values, ops))
            for v, op in zip(values, ops):
                v[op[2][0]] = total.copy()
            continue
        for i, (kind, inputs, outputs, weights, attrs) in enumerate(ops):
            x = [values[i][n] for n in inputs]
            w = [ranks[i].weights[n] for n in weights]
            if kind == "rotary_table":
                angles = _angles(ids, w[0], attrs)
                tables[i] = (np.cos(angles) * attrs["attention_factor"], np.sin(angles) * attrs["attention_factor"])
                continue
            if kind == "sample":
                logits.append(x[0][-1])
                continue
            values[i][outputs[0]] = _apply(kind, x, w, attrs, ids, tables[i])
            assert values[i][outputs[0]].shape[1] == ranks[i].widths[outputs[0]], kind
    return np.concatenate(logits)


def _apply(kind: str, x: list, w: list, attrs: dict, ids: np.ndarray, table: tuple) -> np.ndarray:
    if kind == "embedding":
        local = ids - attrs["vocab_begin"]
        inside = (local >= 0) & (local < len(w[0]))
        return np.where(inside[:, None], w[0][np.where(inside, local, 0)], 0.0)
    if kind == "rms_norm":
        return _rms(x[0], w[0], attrs["eps"])
    if kind == "linear":
        return x[0] @ w[0].T + (w[1] if len(w) > 1 else 0.0)
    if kind == "head_norm":
        out, width = x[0].copy(), attrs["heads"] * attrs["head_dim"]
        columns = slice(attrs["offset"], attrs["offset"] + width)
        heads = out[:, columns].reshape(len(out), attrs["heads"], attrs["head_dim"])
        out[:, columns] = _rms(heads, w[0], attrs["eps"]).reshape(len(out), width)
        return out
    if kind == "rope":
        out, width = x[0].copy(), attrs["heads"] * attrs["head_dim"]
        columns = slice(attrs["offset"], attrs["offset"] + width)
        out[:, columns] = _rotate(out[:, columns], attrs["heads"], attrs["head_dim"], *table)
        return out
    if kind == "span_attention":
        return _attention(x[0], attrs)
    if kind == "silu_mul":
        gate, up = np.split(x[0], 2, axis=1)
        return gate / (1.0 + np.exp(-gate)) * up
    if kind == "add":
        return x[0] + x[1]
    assert kind == "select_rows", f"unknown op {kind}"
    return x[0][-1:]

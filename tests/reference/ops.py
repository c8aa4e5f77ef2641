"""Every op that works on one rank's values alone, in float64."""

from __future__ import annotations

import itertools
from math import erf

import numpy as np

from allspark_server import _native
from reference import recurrent
from reference.recurrent import sigmoid

OPS = {}  # name -> function(Rank, the op's dict, input arrays, weight arrays) -> output array, or None


def op(function):
    OPS[function.__name__] = function
    return function


def rms(x, weight, eps, unit_offset=False):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (weight + unit_offset)


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def gelu_tanh(x):
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1.0 + np.vectorize(erf)(x / np.sqrt(2.0)))


# -- layers with a state -----------------------------------------------------------------------------------------------
def _histories(rank, op, *inputs):
    """For each item, its rows of the step, and all rows of its sequence up to them of each input: nothing but a list of
    the inputs is kept.
    """
    kept = rank.states.setdefault(id(op), {})
    for slot in dict.fromkeys(row.slot for row in rank.batch.rows):
        rows = [i for i, row in enumerate(rank.batch.rows) if row.slot == slot]
        begin = rank.batch.rows[rows[0]].position
        before = kept.get(slot, [x[:0] for x in inputs]) if begin else [x[:0] for x in inputs]
        kept[slot] = [np.concatenate([old[:begin], x[rows]]) for old, x in zip(before, inputs)]
        assert len(kept[slot][0]) == begin + len(rows)
        yield rows, kept[slot]


@op
def causal_conv(rank, op, x, w):
    out, channels = np.empty_like(x[0]), x[0].shape[1]
    for rows, (history,) in _histories(rank, op, x[0]):
        bias = w[1] if len(w) > 1 else None
        y, _ = recurrent.causal_convolution(history, w[0].reshape(channels, -1), bias,
                                            activated=op["attributes"]["activated"])
        out[rows] = y[len(y) - len(rows) :]
    return out


@op
def gated_delta(rank, op, x, w):
    attrs, heads = op["attributes"], len(w[0])
    key, value = attrs["key_dim"], attrs["value_dim"]
    out = np.empty((len(x[0]), heads * value))
    for rows, (mixed, gates) in _histories(rank, op, *x):
        count = len(mixed)
        keys = (mixed.shape[1] - heads * value) // 2
        q, k, v = np.split(mixed, [keys, 2 * keys], 1)
        q, k = (recurrent.l2_normalized(part.reshape(count, -1, key)) for part in (q, k))
        a, rate, bias = gates[:, :-heads].reshape(count, heads, -1), w[0][:, None], w[1].reshape(heads, -1)
        bound = attrs["lower_bound"]
        decay = (recurrent.bounded_decay(a, rate, bias, bound) if bound else recurrent.softplus_decay(a, rate, bias))
        y, _ = recurrent.delta_recurrent(q, k, v.reshape(count, heads, value),
                                         decay if attrs["channels"] else decay[..., 0], sigmoid(gates[:, -heads:]))
        out[rows] = y[count - len(rows) :].reshape(len(rows), -1)
    return out


@op
def ssd(rank, op, x, w):
    attrs, heads = op["attributes"], len(w[0])
    values = heads * attrs["head_dim"]
    out = np.empty((len(x[0]), values))
    for rows, (mixed, steps) in _histories(rank, op, *x):
        groups = (mixed.shape[1] - values) // 2
        v, b, c = np.split(mixed, [values, values + groups], 1)
        b, c = (part.reshape(len(mixed), -1, attrs["state_dim"]) for part in (b, c))
        dt = np.clip(np.logaddexp(0.0, steps + w[1]), attrs["least_step"], attrs["most_step"])
        y, _ = recurrent.ssd_recurrent(v.reshape(len(mixed), heads, -1), b, c, dt, -np.exp(w[0]), w[2])
        out[rows] = y[len(mixed) - len(rows) :].reshape(len(rows), -1)
    return out


@op
def relu_square(rank, op, x, w):
    return np.maximum(x[0], 0.0) ** 2


@op
def gated_rms_norm(rank, op, x, w):
    attrs = op["attributes"]
    heads = [part.reshape(len(part), -1, attrs["head_dim"]) for part in x]
    activation = {"silu": recurrent.silu, "sigmoid": sigmoid}[attrs["gate"]]
    if attrs["gate_first"]:
        weight = w[0].reshape(-1, attrs["head_dim"])
        return rms(heads[0] * activation(heads[1]), weight, attrs["eps"]).reshape(x[0].shape)
    return recurrent.gated_rms_norm(*heads, w[0], attrs["eps"], activation).reshape(x[0].shape)


@op
def sigmoid_gate(rank, op, x, w):
    return recurrent.output_gate(*x)


@op
def multiply(rank, op, x, w):
    offset = op["attributes"]["offset"]
    return x[0] * x[1][:, offset:offset + x[0].shape[1]]


# -- positions ---------------------------------------------------------------------------------------------------------
def _grown(attrs, length):
    """Frequencies of a dynamic table for a length beyond original_max, in single precision as in transformers."""
    dim, ratio = attrs["rotary_dim"], length / attrs["original_max"]
    if attrs["growth"] == "powers":
        factor = max(2.0 ** np.ceil(np.log2(ratio) + 1) - 1, 1.0)
    else:
        factor = attrs["factor"] * ratio - (attrs["factor"] - 1)
    base = attrs["base"] * factor ** (dim / (dim - 2))
    exponents = (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(float)
    return np.float32(1) / (base**exponents).astype(np.float32)


def _part_of_pairs(attrs):
    """For each pair, the part of a position that rotates it."""
    sections = [attrs[name] for name in ("temporal", "height", "width")]
    pairs = attrs["rotary_dim"] // 2
    if not any(sections):
        return np.zeros(pairs, int)
    if not attrs["interleaved_sections"]:
        return np.repeat(np.arange(3), sections)
    parts = np.zeros(pairs, int)
    for part in (1, 2):
        parts[part : 3 * sections[part] : 3] = part
    return parts


@op
def rotary_table(rank, op, x, w):
    attrs, angles = op["attributes"], []
    parts = _part_of_pairs(attrs)
    for row in rank.batch.rows:
        slot = rank.slots[row.slot]
        own = 0 if attrs["growth"] == "powers" else row.position + 1
        if attrs["long_table"]:
            own = max(own, slot.begun)
        length, frequencies = max(slot.sampling.prompt_len, own), w[0].astype(np.float32)
        if length > attrs["original_max"]:
            frequencies = _grown(attrs, length) if attrs["dynamic"] else w[-1].astype(np.float32)
        position = slot.parts(row.position)[parts].astype(np.float32)
        angles.append((position * frequencies).astype(float))  # rounded to single precision, as transformers has it
    rank.frequencies[attrs["table"]] = w[0].astype(np.float32)
    angles, factor = np.array(angles), attrs["attention_factor"]
    rank.tables[attrs["table"]] = np.cos(angles) * factor, np.sin(angles) * factor


@op
def rope(rank, op, x, w):
    attrs, out = op["attributes"], x[0].copy()
    cos, sin = (each[:, None, :] for each in rank.tables[attrs["table"]])
    sin = -sin if attrs["inverse"] else sin
    heads, half = _heads(attrs, out)[..., attrs["skip"]:], attrs["rotary_dim"] // 2
    if attrs["pairs"] == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first], heads[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def _heads(attrs, x):
    """A view [rows, heads, head_dim] of an op's heads."""
    columns = x[:, attrs["offset"] : attrs["offset"] + attrs["heads"] * attrs["head_dim"]]
    return columns.reshape(len(x), attrs["heads"], attrs["head_dim"])


@op
def head_norm(rank, op, x, w):
    attrs, out = op["attributes"], x[0].copy()
    heads = _heads(attrs, out)
    heads[:] = rms(heads, w[0], attrs["eps"], attrs["unit_offset"])
    return out


@op
def qk_square_sums(rank, op, x, w):
    attrs, squares = op["attributes"], x[0] ** 2
    keys = squares[:, attrs["k_offset"] : attrs["k_offset"] + attrs["k_columns"]]
    return np.stack([squares[:, : attrs["q_columns"]].sum(1), keys.sum(1)], 1)


@op
def qk_norm(rank, op, x, w):
    attrs, out = op["attributes"], x[0].copy()
    queries, keys = attrs["q_columns"], attrs["q_columns"] + attrs["k_columns"]
    parts = ((slice(queries), "q_width"), (slice(queries, keys), "k_width"))
    for i, (columns, width) in enumerate(parts[: len(w)]):
        out[:, columns] *= w[i] / np.sqrt(x[1][:, i : i + 1] / attrs[width] + attrs["eps"])
    return out


# -- rows --------------------------------------------------------------------------------------------------------------
@op
def embedding(rank, op, x, w):
    attrs, out = op["attributes"], np.zeros((len(rank.batch.rows), w[0].shape[1]))
    for y, row in zip(out, rank.batch.rows):
        given, local = rank.slots[row.slot].embeddings.get(row.position), row.token - attrs["vocab_begin"]
        if given is not None and attrs["given_id"] < 0:
            y[:] = given[:len(y)] if rank.number == 0 else 0
            continue
        if given is not None:
            local = attrs["given_id"] - attrs["vocab_begin"]
        if 0 <= local < len(w[0]):
            y[:] = w[0][local] * attrs["scale"]
    return out


def _given(rank, width):
    """The row that the plan gives for each row, zeros where it gives none, and which rows have one."""
    rows = [rank.slots[row.slot].embeddings.get(row.position) for row in rank.batch.rows]
    return np.array([np.zeros(width) if row is None else row for row in rows]), [row is not None for row in rows]


@op
def given_rows(rank, op, x, w):
    return _given(rank, rank.tensors[op["outputs"][0]][0])[0]


@op
def add_given(rank, op, x, w):
    offset, width = op["attributes"]["offset"], x[0].shape[1]
    widths = [len(row) for slot in rank.slots.values() for row in slot.embeddings.values()]
    return x[0] + _given(rank, max(widths, default=offset + width))[0][:, offset:offset + width]


@op
def grid_embedding(rank, op, x, w):
    side, width, out = op["attributes"]["side"], x[0].shape[1], x[0].copy()
    table = w[0].reshape(-1, side, width)
    for item in rank.batch.items:
        rows = [i for i, row in enumerate(rank.batch.rows) if row.slot == item.slot]
        parts = np.array([rank.slots[item.slot].parts(rank.batch.rows[i].position) for i in rows])
        for i, place in zip(rows, parts):
            if op["attributes"]["axes"]:
                out[i] += table[0, min(place[2], side - 1)] + table[1, min(place[1], side - 1)]
                continue
            lows, shares = [], []
            for axis in (1, 2):
                at = np.linspace(0, side - 1, parts[:, axis].max() + 1, dtype=np.float32)[place[axis]]
                lows.append(int(at)), shares.append(float(at) - int(at))
            for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
                share = abs(1 - dy - shares[0]) * abs(1 - dx - shares[1])
                out[i] += share * table[min(lows[0] + dy, side - 1), min(lows[1] + dx, side - 1)]
    return out


@op
def clamp(rank, op, x, w):
    return np.clip(x[0], w[0], w[1])


@op
def standardize(rank, op, x, w):
    return (x[0] - w[0]) * w[1]


@op
def merge_rows(rank, op, x, w):
    count, how, out = op["attributes"]["count"], op["attributes"]["how"], []
    for item in rank.batch.items:
        first = rank.batch.outputs[item.output] - item.rows + item.outputs if item.outputs else 0
        for i in range(item.outputs):
            rows = x[0][first + i * count:first + (i + 1) * count]
            out.append({"concat": rows.ravel(), "interleave": rows.T.ravel(), "mean": rows.mean(0)}[how])
    return np.array(out).reshape(len(rank.batch.outputs), -1)


@op
def concat(rank, op, x, w):
    return np.concatenate(x, axis=1)


@op
def spread_columns(rank, op, x, w):
    columns = w[0].astype(int)
    return np.where(columns >= 0, x[0][:, columns], -np.inf)


@op
def position_embedding(rank, op, x, w):
    attrs, width = op["attributes"], x[0].shape[1]
    out = x[0] + w[0].reshape(-1, width)[[row.position + attrs["offset"] for row in rank.batch.rows]]
    if len(w) > 1:
        before = [rank.slots[row.slot].history[:row.position] for row in rank.batch.rows]
        out = out + w[1].reshape(2, width)[[int(attrs["separator"] in ids) for ids in before]]
    return out


@op
def pool_rows(rank, op, x, w):
    pooling, out = op["attributes"]["pooling"], []
    for item in rank.batch.items:
        if item.outputs:
            first = rank.batch.outputs[item.output] - item.rows + 1
            rows = x[0][first:first + item.rows]
            out.append({"cls": rows[0], "mean": rows.mean(0), "last": rows[-1]}[pooling])
    return np.array(out).reshape(-1, x[0].shape[1])


@op
def select_rows(rank, op, x, w):
    return x[0][rank.batch.outputs]


@op
def rms_norm(rank, op, x, w):
    return rms(x[0], w[0], op["attributes"]["eps"], op["attributes"]["unit_offset"])


@op
def linear(rank, op, x, w):
    return x[0] @ w[0].T + (w[1] if len(w) > 1 else 0.0)


@op
def lora(rank, op, x, w):
    attrs, out = op["attributes"], x[0].copy()
    columns = slice(attrs["offset"], attrs["offset"] + attrs["columns"])
    for y, inputs, row in zip(out, x[1], rank.batch.rows):
        if row.adapter >= 0 and attrs["target"] in rank.adapters[row.adapter]:
            a, b = rank.adapters[row.adapter][attrs["target"]]
            y[columns] += b @ (a @ inputs)
    return out


# -- value by value ----------------------------------------------------------------------------------------------------
@op
def add(rank, op, x, w):
    return x[0] + x[1]


@op
def scale(rank, op, x, w):
    return x[0] * op["attributes"]["factor"] * (w[0] if w else 1)


@op
def soft_cap(rank, op, x, w):
    cap = op["attributes"]["cap"]
    return cap * np.tanh(x[0] / cap)


@op
def sigmoid_mul(rank, op, x, w):
    return x[0] * sigmoid(x[1])


@op
def silu_mul(rank, op, x, w):
    gate, up = np.split(x[0], 2, axis=1)
    return gate * sigmoid(gate) * up


@op
def gelu_tanh_mul(rank, op, x, w):
    gate, up = np.split(x[0], 2, axis=1)
    return gelu_tanh(gate) * up


@op
def gelu_mul(rank, op, x, w):
    gate, up = np.split(x[0], 2, axis=1)
    return gelu(gate) * up


@op
def activate(rank, op, x, w):
    functions = {"gelu": gelu, "gelu_tanh": gelu_tanh, "silu": lambda v: v * sigmoid(v), "tanh": np.tanh,
                 "relu": lambda v: np.maximum(v, 0.0), "quick_gelu": lambda v: v * sigmoid(1.702 * v)}
    return functions[op["attributes"]["function"]](x[0])


@op
def clamped_silu_mul(rank, op, x, w):
    gate, up = np.split(x[0], 2, axis=1)
    alpha, limit = op["attributes"]["alpha"], op["attributes"]["limit"]
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + 1.0)


@op
def limited_silu_mul(rank, op, x, w):
    gate, up = np.split(x[0], 2, axis=1)
    limit = op["attributes"]["limit"]
    return recurrent.silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)


# -- residual streams --------------------------------------------------------------------------------------------------
@op
def stream_weights(rank, op, x, w):
    n, eps = op["attributes"]["streams"], op["attributes"]["eps"]
    parts = np.minimum(np.arange(x[0].shape[1]) // n, 2)
    y = x[0] * w[0][parts] + w[1]
    y[:, :n] = sigmoid(y[:, :n]) + eps
    if y.shape[1] == n:
        return y
    y[:, n:2 * n] = 2 * sigmoid(y[:, n:2 * n])
    mix = softmax(y[:, 2 * n:].reshape(-1, n, n)) + eps
    mix /= mix.sum(1, keepdims=True) + eps
    for _ in range(op["attributes"]["iterations"] - 1):
        mix /= mix.sum(2, keepdims=True) + eps
        mix /= mix.sum(1, keepdims=True) + eps
    y[:, 2 * n:] = mix.reshape(-1, n * n)
    return y


def _by_stream(x, width):
    return x.reshape(len(x), -1, width)


@op
def merge_streams(rank, op, x, w):
    streams = _by_stream(x[0], rank.program.tensors[op["outputs"][0]][0])
    if len(x) < 2:
        return streams.mean(1)
    return np.einsum("rn,rnd->rd", x[1][:, :streams.shape[1]], streams)


@op
def mix_streams(rank, op, x, w):
    streams = _by_stream(x[0], x[1].shape[1])
    n = streams.shape[1]
    post, mix = x[2][:, n:2 * n], x[2][:, 2 * n:].reshape(-1, n, n)
    return (post[:, :, None] * x[1][:, None] + np.einsum("rjk,rjd->rkd", mix, streams)).reshape(len(x[0]), -1)


# -- attention ---------------------------------------------------------------------------------------------------------
@op
def span_attention(rank, op, x, w):
    attrs = op["attributes"]
    q_heads, kv_heads, dim = attrs["q_heads"], attrs["kv_heads"], attrs["head_dim"]
    q, k, v = (part.reshape(len(x[0]), -1, dim) for part in
               np.split(x[0], [q_heads * dim, (q_heads + kv_heads) * dim], axis=1))
    own, kv_begin = kv_heads, attrs["kv_begin"]
    if not own:  # of the op that keeps what this one reads
        kv_begin = attrs["q_head_begin"] // attrs["group"]
        kv_heads = -(-(attrs["q_head_begin"] + q_heads) // attrs["group"]) - kv_begin
    cache = rank.cache(attrs["cache_group"], attrs["layer"], kv_heads, dim)
    size = rank.limits.span_size
    for i, row in enumerate(rank.batch.rows if own else ()):
        span = rank.slots[row.slot].spans[attrs["cache_group"]][row.position // size]
        cache[span, row.position % size] = k[i], v[i]
    sinks = w[0] if attrs["sinks"] else None
    slopes = w[-1] if attrs["alibi"] else np.zeros(q_heads)
    out = np.empty_like(q)
    for i, row in enumerate(rank.batch.rows):
        first = max(0, row.position + 1 - attrs["window"]) if attrs["window"] else 0
        end = row.position + 1
        if attrs["bidirectional"]:
            end = len(rank.slots[row.slot].history)
            end = min(end, row.position + attrs["window"]) if attrs["window"] else end
            if attrs["segments"]:
                ends = [0, *rank.slots[row.slot].segments]
                first, end = next((a, b) for a, b in itertools.pairwise(ends) if a <= row.position < b)
        if attrs["images"]:
            images = rank.slots[row.slot].images
            end = max([end, *(b for a, b in zip(images[::2], images[1::2]) if a <= row.position < b)])
        seen, table = np.arange(first, end), rank.slots[row.slot].spans[attrs["cache_group"]]
        keys, values = cache[[table[p // size] for p in seen], seen % size].transpose(1, 0, 2, 3)
        query = q[i]
        if attrs["logn"] and row.position + 1 > attrs["logn"]:
            query = query * np.log(row.position + 1) / np.log(attrs["logn"])
        for head in range(q_heads):
            kv = (attrs["q_head_begin"] + head) // attrs["group"] - kv_begin
            assert 0 <= kv < kv_heads
            scores = keys[:, kv] @ query[head] * attrs["scale"]
            if attrs["soft_cap"]:
                scores = attrs["soft_cap"] * np.tanh(scores / attrs["soft_cap"])
            scores = scores + slopes[head] * (seen - row.position)
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            out[i, head] = softmax(scores)[: len(seen)] @ values[:, kv]
    return out.reshape(len(x[0]), -1)


@op
def latent_attention(rank, op, x, w):
    attrs = op["attributes"]
    latent, rope = attrs["latent_dim"], attrs["rope_dim"]
    absorbed = x[0].reshape(len(x[0]), -1, latent)
    heads = absorbed.shape[1]
    queries = np.concatenate([absorbed, x[1][:, :heads * rope].reshape(len(x[0]), heads, rope)], axis=2)
    cache = rank.cache(attrs["cache_group"], attrs["layer"], 1, latent + rope)[:, :, 0, 0]
    size = rank.limits.span_size
    tables = [rank.slots[row.slot].spans[attrs["cache_group"]] for row in rank.batch.rows]
    for row, table, kept in zip(rank.batch.rows, tables, x[2]):
        cache[table[row.position // size], row.position % size] = kept
    out = np.empty_like(absorbed)
    for i, (row, table) in enumerate(zip(rank.batch.rows, tables)):
        seen = np.arange(row.position + 1)
        if len(x) > 3:
            seen = x[3][i][x[3][i] >= 0].astype(int)
        rows = cache[[table[p // size] for p in seen], seen % size]
        out[i] = softmax(queries[i] @ rows.T * attrs["scale"]) @ rows[:, :latent]
    return out.reshape(len(x[0]), -1)


@op
def layer_norm(rank, op, x, w):
    centered = x[0] - x[0].mean(axis=1, keepdims=True)
    return centered / np.sqrt((centered ** 2).mean(axis=1, keepdims=True) + op["attributes"]["eps"]) * w[0] + w[1]


def _entry(rank, slot, group, entry, rate):
    """Where an entry lies: in the span with its last position, behind the entries that end there before it."""
    size = rank.limits.span_size
    index = ((entry + 1) * rate - 1) // size
    return slot.spans[group][index], entry - index * size // rate


@op
def compress(rank, op, x, w):
    attrs, parts = op["attributes"], 1 + op["attributes"]["overlapping"]
    rate, rotated = attrs["rate"], attrs["rotary_dim"]
    dim = x[0].shape[1] // (2 * parts)
    bias = w[0].reshape(rate, parts * dim)
    entries = rank.cache(attrs["cache_group"], attrs["layer"], 1, dim)[:, :, 0, 0]
    for rows, (history,) in _histories(rank, op, x[0]):
        slot = rank.slots[rank.batch.rows[rows[0]].slot]
        values, gates = np.split(history, 2, axis=1)
        for entry in range((len(history) - len(rows)) // rate, len(history) // rate):
            first = entry * rate
            own = np.arange(first, first + rate)
            gate, value = (gates[own] + bias)[:, -dim:], values[own][:, -dim:]
            if parts > 1 and entry:
                gate = np.concatenate([(gates[own - rate] + bias)[:, :dim], gate])
                value = np.concatenate([values[own - rate][:, :dim], value])
            y = (softmax(gate.T).T * value).sum(0)
            if len(w) > 1:
                y = rms(y, w[1], attrs["eps"])
            if rotated:
                angle = (np.float32(first) * rank.frequencies[attrs["table"]]).astype(float)
                pairs = y[-rotated:].copy()
                a, b, cos, sin = pairs[::2], pairs[1::2], np.cos(angle), np.sin(angle)
                y[-rotated:] = np.stack([a * cos - b * sin, b * cos + a * sin], 1).ravel()
            entries[_entry(rank, slot, attrs["cache_group"], entry, rate)] = y


@op
def compressed_attention(rank, op, x, w):
    attrs, dim, size = op["attributes"], x[1].shape[1], rank.limits.span_size
    queries, rate = x[0].reshape(len(x[0]), -1, dim), op["attributes"]["rate"]
    cache = rank.cache(attrs["cache_group"], attrs["layer"], 1, dim)[:, :, 0, 0]
    slots = [rank.slots[row.slot] for row in rank.batch.rows]
    for row, slot, kept in zip(rank.batch.rows, slots, x[1]):
        cache[slot.spans[attrs["cache_group"]][row.position // size], row.position % size] = kept
    out = np.empty_like(queries)
    for i, (row, slot) in enumerate(zip(rank.batch.rows, slots)):
        seen, table = np.arange(max(0, row.position + 1 - attrs["window"]), row.position + 1), slot.spans[
            attrs["cache_group"]]
        rows = [cache[table[p // size], p % size] for p in seen]
        if rate:
            entries = rank.cache(attrs["entry_group"], attrs["entry_layer"], 1, dim)[:, :, 0, 0]
            chosen = range((row.position + 1) // rate) if len(x) < 3 else x[2][i][x[2][i] >= 0].astype(int)
            rows += [entries[_entry(rank, slot, attrs["entry_group"], entry, rate)] for entry in chosen]
        rows = np.array(rows)
        scores = np.concatenate([queries[i] @ rows.T * attrs["scale"], w[0][:, None]], axis=1)
        out[i] = softmax(scores)[:, :-1] @ rows
    return out.reshape(len(x[0]), -1)


@op
def indexer(rank, op, x, w):
    attrs, (queries, weights, *keys) = op["attributes"], x
    heads, rate = weights.shape[1], attrs["rate"]
    dim = queries.shape[1] // heads
    count, size = rank.program.tensors[op["outputs"][0]][0], rank.limits.span_size
    cache = rank.cache(attrs["cache_group"], attrs["layer"], 1, dim)[:, :, 0, 0]
    tables = [rank.slots[row.slot].spans[attrs["cache_group"]] for row in rank.batch.rows]
    for row, table, key in zip(rank.batch.rows, tables, keys[0] if keys else ()):
        cache[table[row.position // size], row.position % size] = key
    out = np.full((len(queries), count), -1.0)
    for i, (row, table) in enumerate(zip(rank.batch.rows, tables)):
        seen = np.arange(row.position + 1)
        rows = cache[[table[p // size] for p in seen], seen % size]
        if rate:
            slot, entries = rank.slots[row.slot], range((row.position + 1) // rate)
            rows = np.array([cache[_entry(rank, slot, attrs["cache_group"], entry, rate)] for entry in entries])
            rows = rows.reshape(-1, dim)
        scores = weights[i] @ np.maximum(queries[i].reshape(heads, dim) @ rows.T, 0)
        # Equal keys have equal scores only after rounding: a product's sums depend on the place of its row.
        most = count // rate if attrs["positions"] else count
        best = np.sort(np.argsort(-scores.astype(np.float32), kind="stable")[:most])
        if attrs["positions"]:
            best = np.concatenate([(best[:, None] * rate + np.arange(rate)).ravel(),
                                   np.arange((row.position + 1) // rate * rate, row.position + 1)])
        out[i, :len(best)] = best
    return out


@op
def head_linear(rank, op, x, w):
    attrs = op["attributes"]
    stack = w[0].reshape(attrs["heads"], -1, w[0].shape[1])
    heads = x[0][:, attrs["offset"]:attrs["offset"] + attrs["heads"] * stack.shape[2]]
    y = np.einsum("rhk,hnk->rhn", heads.reshape(len(x[0]), attrs["heads"], -1), stack)
    return y.reshape(len(x[0]), -1)


# -- experts -----------------------------------------------------------------------------------------------------------
@op
def router(rank, op, x, w):
    attrs, logits = op["attributes"], x[0]
    experts, groups = logits.shape[1], attrs["groups"]
    w, scales = (w[:-1], w[-1]) if attrs["expert_scales"] else (w, np.ones(experts))
    scores = {"softmax": softmax, "sigmoid": sigmoid,
              "sqrt_softplus": lambda x: np.sqrt(np.logaddexp(0.0, x))}[attrs["scores"]](logits)
    table, entries = None, []
    if attrs["by_token"]:
        (table,), w = w, ()
        rows = rank.batch.rows
        if rank.rows_of(op["inputs"][0]) == _native.OUTPUT_ROWS:
            rows = [rows[row] for row in rank.batch.outputs]
        table = table.reshape(-1, attrs["top_k"])[[row.token for row in rows]].astype(int)
    for row, (own, choice) in enumerate(zip(scores, scores + w[0] if w else scores)):
        if attrs["top_groups"] < groups:
            best = 1 if attrs["group_scores"] == "largest" else 2
            by_group = np.sort(choice.reshape(groups, -1), axis=1)[:, -best:].sum(1)
            kept = np.argsort(-by_group, kind="stable")[: attrs["top_groups"]]
            choice = np.where(np.isin(np.arange(experts) // (experts // groups), kept), choice, -np.inf)
        chosen = np.argsort(-choice, kind="stable")[: attrs["top_k"]] if table is None else table[row]
        total = own[chosen].sum() if attrs["normalized"] else 1.0
        entries += [(expert, row, own[expert] / total * attrs["scale"] * scales[expert]) for expert in chosen]
    entries.sort()
    rank.entries[rank.rows_of(op["outputs"][0])] = [(int(expert), row) for expert, row, _ in entries]
    return np.array([[weight] for *_, weight in entries])


@op
def expert_linear(rank, op, x, w):
    attrs, rows = op["attributes"], rank.rows_of(op["outputs"][0])
    experts = w[0].reshape(attrs["experts"], -1, w[0].shape[1])
    biases = w[1].reshape(attrs["experts"], -1) if len(w) > 1 else np.zeros(experts.shape[:2])
    routed = rank.rows_of(op["inputs"][0]) == rows
    out = np.zeros((len(rank.entries[rows]), experts.shape[1]))
    for entry, (expert, row) in enumerate(rank.entries[rows]):
        local = expert - attrs["expert_begin"]
        if 0 <= local < len(experts):
            out[entry] = experts[local] @ x[0][entry if routed else row] + biases[local]
    return out


@op
def expert_lora(rank, op, x, w):
    attrs, out, rows = op["attributes"], x[0].copy(), rank.rows_of(op["inputs"][0])
    columns = slice(attrs["offset"], attrs["offset"] + attrs["columns"])
    routed = rank.rows_of(op["inputs"][1]) == rows
    for entry, (expert, row) in enumerate(rank.entries[rows]):
        adapter, target = rank.batch.rows[row].adapter, attrs["target"] + expert
        if adapter >= 0 and target in rank.adapters[adapter]:
            a, b = rank.adapters[adapter][target]
            out[entry, columns] += b @ (a @ x[1][entry if routed else row])
    return out


@op
def combine_experts(rank, op, x, w):
    entries = rank.entries[rank.rows_of(op["inputs"][0])]
    out = np.zeros((rank.count(rank.rows_of(op["outputs"][0])), x[0].shape[1]))
    for (_, row), y, weight in zip(entries, x[0], x[1]):  # in ascending order of experts
        out[row] += y * weight
    return out

"""Models of the digest that have to do with images: vision towers, and models that take their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allspark_server.runtime.plan import IMAGES, SEGMENTS, positions_section, rows_section
from allspark_server.runtime.sampler_digest import SAMPLINGS, fixed_values

from .parts import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, SPAN, VOCAB, finished, on_cpu, weights_of

PATCH, MERGE = 53, 4        # values of a patch, patches of an output
SIDE = 2        # patches of an output by height and by width
_COLUMNS = (HEADS + 2 * KV_HEADS) * HEAD_DIM
_PAIRS = HEAD_DIM // 2


def _attention(bidirectional: int = 0) -> dict[str, float]:
    return {"layer": 0, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "group": HEADS // KV_HEADS,
            "scale": 0.2, "bidirectional": bidirectional}


def _frequencies(e: Any) -> int:
    return e.add_vector(np.ldexp(np.float32(1), -np.arange(_PAIRS, dtype=np.int32)))


def tower(weights: str, group: int, cache: str, empty: Callable = on_cpu, function: str = "quick_gelu",
          positions: int = 0) -> Any:
    """An executor with a vision tower: a layer with attention within segments and one within images, and each way to
    merge rows. function: its activation. positions: of tables of positions and segments, which encoders have on CPUs;
    0: none.
    """
    e = empty()
    matrix, vector = weights_of(e, weights, group, iter(range(601, 700)))
    x, y, normed, qkv, attended, inner = (e.add_tensor(width) for width in (
        HIDDEN, HIDDEN, HIDDEN, _COLUMNS, HEADS * HEAD_DIM, INNER))
    patches = e.add_tensor(PATCH)
    e.add_op("rotary_table", [], [], [_frequencies(e)], {
        "rotary_dim": HEAD_DIM, "height": _PAIRS // 2, "width": _PAIRS - _PAIRS // 2})
    e.add_op("given_rows", [], [patches], [], {})
    e.add_op("linear", [patches], [x], [matrix(HIDDEN, PATCH), vector(HIDDEN)], {})
    e.add_op("grid_embedding", [x], [], [vector(25 * HIDDEN)], {"side": 5})
    e.add_op("grid_embedding", [x], [], [vector(6 * HIDDEN)], {"side": 3, "axes": 1})
    if positions:
        e.add_op("position_embedding", [x], [], [vector(positions * HIDDEN), vector(2 * HIDDEN)],
                 {"positions": positions, "offset": 1, "separator": 0})
    e.add_op("clamp", [x], [], [e.add_vector(np.array([limit], np.float32)) for limit in (-1.5, 1.25)], {})
    for segments in (1, 0):
        e.add_op("layer_norm", [x], [normed], [vector(HIDDEN, 1), vector(HIDDEN)], {"eps": 1e-6})
        e.add_op("linear", [normed], [qkv], [matrix(_COLUMNS, HIDDEN), vector(_COLUMNS)], {})
        e.add_op("rope", [qkv], [], [], {"offset": 0, "heads": HEADS + KV_HEADS, "head_dim": HEAD_DIM})
        e.add_op("span_attention", [qkv], [attended], [], {**_attention(1), "segments": segments})
        e.add_op("linear", [attended], [y], [matrix(HIDDEN, HEADS * HEAD_DIM)], {})
        e.add_op("add", [x, y], [x], [], {})
        e.add_op("linear", [x], [inner], [matrix(INNER, HIDDEN)], {})
        e.add_op("activate", [inner], [], [], {"function": function})
        e.add_op("linear", [inner], [y], [matrix(HIDDEN, INNER)], {})
        e.add_op("add", [x, y], [x], [], {})
    total = e.add_tensor(HIDDEN, True)
    e.add_op("merge_rows", [x], [total], [], {"count": MERGE, "how": "mean"})
    for how in ("concat", "interleave"):
        wide, narrow = e.add_tensor(MERGE * HIDDEN, True), e.add_tensor(HIDDEN, True)
        e.add_op("merge_rows", [x], [wide], [], {"count": MERGE, "how": how})
        e.add_op("linear", [wide], [narrow], [matrix(HIDDEN, MERGE * HIDDEN)], {})
        e.add_op("add", [total, narrow], [total], [], {})
    e.add_op("standardize", [total], [], [vector(HIDDEN), vector(HIDDEN, 1)], {})
    e.add_op("hidden_states", [total], [], [], {})
    e.allocate(512, len(SAMPLINGS), 512, SPAN, 64, cache, max_outputs=128)
    return e


def seeing(weights: str, group: int, cache: str, interleaved: bool, empty: Callable = on_cpu) -> Any:
    """An executor with a model whose prompts have images. interleaved: sections of rotary positions alternate; else
    they follow one another, and the rows of an image see each other.
    """
    e = empty()
    matrix, vector = weights_of(e, weights, group, iter(range(701, 800)))
    x, y, qkv, attended, last, logits = (e.add_tensor(width, rows) for width, rows in (
        (HIDDEN, False), (HIDDEN, False), (_COLUMNS, False), (HEADS * HEAD_DIM, False), (HIDDEN, True), (VOCAB, True)))
    embedding = matrix(VOCAB, HIDDEN)
    e.add_op("rotary_table", [], [], [_frequencies(e)], {
        "rotary_dim": HEAD_DIM, "temporal": 8, "height": 7, "width": 5, "interleaved_sections": int(interleaved)})
    e.add_op("embedding", [], [x], [embedding], {"vocab_begin": 0})
    e.add_op("embedding", [], [y], [embedding], {"vocab_begin": 0, "given_id": 3})
    e.add_op("add", [x, y], [x], [], {})
    for offset in (0, HIDDEN):
        e.add_op("linear", [x], [qkv], [matrix(_COLUMNS, HIDDEN), vector(_COLUMNS)], {})
        e.add_op("rope", [qkv], [], [], {"offset": 0, "heads": HEADS + KV_HEADS, "head_dim": HEAD_DIM})
        e.add_op("span_attention", [qkv], [attended], [], {
            **_attention(), "layer": int(offset > 0), "images": int(not interleaved)})
        e.add_op("linear", [attended], [y], [matrix(HIDDEN, HEADS * HEAD_DIM)], {})
        e.add_op("add", [x, y], [x], [], {})
        e.add_op("add_given", [x], [], [], {"offset": offset})
    return finished(e, x, last, logits, embedding, cache)


def _places(height: int, width: int) -> np.ndarray:
    """The rotary positions of an image's patches, int32 [patches, 3]: those of an output follow one another."""
    y, x = np.mgrid[:height, :width]
    places = np.stack([np.zeros_like(y), y, x], -1).reshape(height // SIDE, SIDE, width // SIDE, SIDE, 3)
    return places.transpose(0, 2, 1, 3, 4).reshape(-1, 3).astype(np.int32)


def patches_of(grids: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, Any]]]:
    """How many patches images of these heights and widths have, and what a plan says of them: slot i has image i."""
    counts, sections = [], []
    for slot, grid in enumerate(grids):
        places = _places(*grid)
        counts.append(len(places))
        ends = [*range(24, len(places), 24), len(places)]
        sections += [positions_section(slot, places, 0), (SEGMENTS, [slot, *ends]),
                     rows_section(slot, 0, fixed_values((len(places), PATCH), 801 + slot))]
    return counts, sections


def image_of(slot: int, begin: int, grid: tuple[int, int], together: bool) -> list[tuple[int, Any]]:
    """What a plan says of an image of a prompt that begins at this position. together: its rows see each other."""
    height, width = grid
    text = np.repeat(np.arange(begin, dtype=np.int32)[:, None], 3, 1)
    places = np.indices((1, height, width)).reshape(3, -1).T.astype(np.int32) + np.int32(begin)
    rows = fixed_values((len(places), 2 * HIDDEN), 821 + slot)
    found: list[tuple[int, Any]] = [
        positions_section(slot, np.concatenate([text, places]), max(grid) - len(places)),
        rows_section(slot, begin, rows)]
    return [*found, (IMAGES, [slot, begin, begin + len(places)])] if together else found

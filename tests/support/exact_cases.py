"""Files of layers of experts with what the exact recipe makes of them, for programs that run the GPU's kernels without
Python (exact_cases.h).
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from support.exact_matrices import Matrix, gated

FORMATS = {"int8": 2, "int4": 3, "w8a8": 4, "w4a8": 5, "e2m1a16": 6}    # as in cpu/kernels/format.h
SCALES = {"float32": 1, "bfloat16": 2, "float16": 3}                    # program/scale_layout.h
ZEROS = {"none": 0, "offsets": 1, "points": 2}
GATES = {"none": 0, "silu_mul": 1, "gelu_tanh_mul": 2, "gelu_mul": 3, "clamped_silu_mul": 4}    # cuda/.../exact.h


def panels_of(own: Matrix, panel: int, expert: int = 0) -> np.ndarray:
    """An expert's matrix in panels of so many rows, as an instruction set with such panels packs it: uint8 [bytes]."""
    panels = own.executor.panels(own.handle)
    found, data = panels.rows, panels.bytes(expert)
    native = own.form.native()
    bits, size, layout = own.form.bits, native["group_size"] or own.k, own.form.layout
    width = 1 if layout.super_group else {"float32": 4}.get(layout.scales, 2)
    zero = {"none": 0, "points": 1}.get(layout.zeros, width)

    def pieces(rows: int):
        """Of a panel of so many rows: (bytes of a row, units, first byte) of each array, and the panel's bytes."""
        at, arrays = 0, []
        if layout.super_group:
            for _ in range(-(-own.k // native["super_group"])):
                arrays += [(2, 1, at), (2, 1, at + 2 * rows)]
                at += 4 * rows
        for first in range(0, own.k, size):
            line = 32 if rows % 32 else 64
            arrays.append((width, 1, at))
            if zero:
                arrays.append((zero, 1, at + width * rows))
            at += -(-rows * (width + zero) // line) * line
            units = -(-min(size, own.k - first) * bits // 32)
            arrays.append((4, units, at))
            at += 4 * units * rows
        return arrays, -(-at // 64) * 64

    (before, old), (after, new) = pieces(found), pieces(panel)
    count, made = -(-own.n // panel), []
    taken = data.reshape(-1, old)
    for (each, units, at), (_, _, to) in zip(before, after):
        rows = taken[:, at:at + each * units * found].reshape(-1, units, found, each).transpose(0, 2, 1, 3)
        rows = rows.reshape(-1, units, each)[:own.n]
        whole = np.zeros((count * panel, units, each), np.uint8)
        whole[:own.n] = rows
        made.append((to, whole.reshape(count, panel, units, each).transpose(0, 2, 1, 3).reshape(count, -1)))
    out = np.zeros((count, new), np.uint8)
    for to, values in made:
        out[:, to:to + values.shape[1]] = values
    if panel == found:
        np.testing.assert_array_equal(out.ravel(), data)
    return out.ravel()


def write(file: BinaryIO, name: str, own: Matrix, x: np.ndarray, chosen: np.ndarray, panel: int, *,
          bias: np.ndarray | None = None, gate: str = "none", alpha: float = 0, limit: float = 0,
          gathers: bool = True) -> None:
    """Appends a case. x: float32 [rows, k]; gathers: the kernel takes it, otherwise a row for each entry; chosen: int32
    [rows, top]; panel: rows of a panel; bias: [experts, n].
    """
    (rows, top), native, layout = chosen.shape, own.form.native(), own.form.layout
    more = (alpha, limit) if gate == "clamped_silu_mul" else ()
    wanted = gated(gate, own.products(x, chosen, bias), *more)
    center = -1 if layout.center is None else layout.center
    head = [FORMATS[native["dtype"]], own.n, own.k, panel, native["group_size"], SCALES[layout.scales],
            ZEROS[layout.zeros], native.get("super_group", 0), layout.scale_bits, center, own.k,
            own.experts, rows, top, int(gathers), GATES[gate], int(bias is not None), 0]
    file.write(name.encode().ljust(64, b"\0"))
    file.write(np.array(head, np.int32).tobytes() + np.array([alpha, limit], np.float32).tobytes())
    for expert in range(own.experts):
        file.write(panels_of(own, panel, expert).tobytes())
    if not gathers:
        x = x[np.argsort(chosen.ravel(), kind="stable") // top]
    for part in (x.astype(np.float32), chosen.astype(np.int32), bias, wanted):
        if part is not None:
            file.write(np.ascontiguousarray(part).tobytes())

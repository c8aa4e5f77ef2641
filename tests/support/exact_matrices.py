"""Random matrices in the formats of exact experts, with the products of tests/reference/exact.py, and rows that are
hard to round.
"""

from __future__ import annotations

import numpy as np

from allspark_server import _native
from allspark_server.weights.formats import ScaleLayout, WeightFormat, exact
from reference import exact as reference
from reference.encodings import E2M1

MXFP4, NVFP4 = ("e2m1", 32, ScaleLayout("bfloat16", "none")), ("e2m1", 16, ScaleLayout("float32", "none"))
CASES = {"MXFP4": MXFP4, "NVFP4": NVFP4, "e2m1 in a row": ("e2m1", 0, ScaleLayout("float16", "none")),
         "e2m1 in 8": ("e2m1", 8, ScaleLayout("bfloat16", "none")),
         "int8": ("int8", 0, ScaleLayout()), "int8 in 64": ("int8", 64, ScaleLayout()),
         "int4 in 32": ("int4", 32, ScaleLayout()), "w8a8": ("w8a8", 0, ScaleLayout()),
         "w4a8 in 64": ("w4a8", 64, ScaleLayout()), "symmetric int4": ("int4", 128, ScaleLayout("float16", "none")),
         "symmetric int8": ("int8", 32, ScaleLayout("float32", "none")),
         "int4 with points": ("int4", 64, ScaleLayout("float16", "points")),
         "int4 around 7": ("int4", 32, ScaleLayout("float16", "none", center=7)),
         "nested int4": ("int4", 32, ScaleLayout("float16", "offsets", super_group=256, scale_bits=8))}


def as_bfloat16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def scales_of(kind: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As they are stored, and as float32."""
    if kind == "bfloat16":
        return as_bfloat16(values)
    stored = values.astype(kind)
    return stored, stored.astype(np.float32)


class Matrix:
    """Random weights [n, k] of one or more experts in a format; product() is the reference's."""

    def __init__(self, form: WeightFormat, n: int, k: int, powers: tuple[int, int] | None = None, experts: int = 1):
        rng = np.random.default_rng((n, k, form.group_size))
        self.form, self.n, self.k, self.experts = form, n, k, experts
        n *= experts
        size, groups = form.group_size or k, form.groups(k)
        nested: dict[str, np.ndarray | int] = {}
        quants = rng.integers(0, 1 << form.bits, (n, k)).astype(np.uint8)
        numbers = rng.normal(size=(n, groups)) if powers is None else 2.0 ** rng.integers(*powers, (n, groups))
        stored, self.scales = scales_of(form.layout.scales, numbers)
        zeros = self.offsets = None
        middle = 1 << (form.bits - 1)
        if form.layout.super_group:
            stored, self.scales, zeros, self.offsets, nested = self._nested(rng, groups)
        elif form.layout.zeros == "offsets":
            zeros, self.offsets = as_bfloat16(rng.normal(size=(n, groups)))
        elif form.layout.zeros == "points":
            zeros = rng.integers(0, 1 << form.bits, (n, groups)).astype(np.uint8)
            self.offsets = self.scales * (np.float32(middle) - zeros.astype(np.float32))
        if form.layout.center is not None and form.bits == 4 and zeros is None:
            self.offsets = np.float32(middle - form.layout.center) * self.scales
        coded = form.dtype == "e2m1"
        self.unit = 2 if coded else 1
        self.integers = (2 * E2M1)[quants].astype(np.int64) if coded else quants.astype(np.int64) - middle
        values = E2M1.astype(np.float32)[quants] if coded else self.integers.astype(np.float32)
        with np.errstate(over="ignore"):
            self.whole = self.scales[:, np.arange(k) // size] * values
        packed = quants
        if form.bits == 4:
            even = np.pad(quants, ((0, 0), (0, k % 2)))
            packed = np.ascontiguousarray(even[:, 0::2] | even[:, 1::2] << 4)
        self.executor = _native.Executor(num_threads=2)
        self.handle = self.executor.add_matrix(n, k, experts=experts, **form.native())
        self.executor.fill_quantized(self.handle, packed, stored, zeros, form.bits, k, form.group_size, **nested)

    def _nested(self, rng, groups: int) -> tuple:
        """Scales and offsets of 8 bits with float16 factors of super-groups."""
        each = self.form.layout.super_group // self.form.group_size
        n = self.n * self.experts
        above = rng.normal(size=(2, n, -(-groups // each))).astype(np.float16)
        stored = rng.integers(-128, 128, (2, n, groups)).astype(np.int8)
        values = np.repeat(above.astype(np.float32), each, axis=2)[:, :, :groups] * stored.astype(np.float32)
        more = {"super_group": self.form.layout.super_group, "super_scales": above[0], "super_offsets": above[1]}
        return stored[0], values[0], stored[1], values[1], more

    def product(self, x: np.ndarray, bias: np.ndarray | None = None, expert: int = 0) -> np.ndarray:
        rows = slice(expert * self.n, (expert + 1) * self.n)
        return reference.product(x, self.integers[rows], self.scales[rows],
                                 None if self.offsets is None else self.offsets[rows], self.form.group_size,
                                 8 if self.form.dtype.startswith("w") else 16, self.unit, bias)

    def products(self, x: np.ndarray, chosen: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """Each row x [rows, k] times the matrices of its experts, chosen [rows, top]: [rows, top, n]. bias: [experts,
        n].
        """
        found = np.empty((*chosen.shape, self.n), np.float32)
        for expert in range(self.experts):
            rows, places = np.nonzero(chosen == expert)
            found[rows, places] = self.product(x[rows], None if bias is None else bias[expert], expert)
        return found

    def check(self, x: np.ndarray, bias: np.ndarray | None = None) -> None:
        found, wanted = self.executor.multiply(self.handle, x, self.n, bias), self.product(x, bias)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        numbers = ~np.isnan(wanted)
        np.testing.assert_array_equal(found[numbers].view(np.uint32), wanted[numbers].view(np.uint32))


def matrix(case: str, n: int, k: int, **more) -> Matrix:
    dtype, group, layout = CASES[case]
    return Matrix(exact(WeightFormat(dtype, group, layout)), n, k, **more)


def adversarial(k: int) -> np.ndarray:
    """Rows float32 [m, k]."""
    rng = np.random.default_rng(k)
    plain = rng.normal(size=k).astype(np.float32)
    rows = [np.zeros(k), -np.zeros(k), plain * np.float32(5e37), plain * np.float32(1e-30), plain * np.float32(3e-34),
            plain * np.float32(1e-40), np.full(k, 3.4028235e38), np.full(k, -1e-34), np.full(k, 1e-34),
            np.full(k, 1.0000001e-34), np.where(np.arange(k) % 2, 1.0, -1.0), np.full(k, 1.0)]
    for value in (np.nan, np.inf, -np.inf, 1e6, -3e38):     # one outlier
        for at in (0, k // 2, k - 1):
            row = plain.copy()
            row[at] = value
            rows.append(row)
    halves = (rng.integers(-32639, 32639, k) + 0.5) / 32639   # ties of rounding
    halves[0] = 1
    return np.stack([*rows, halves]).astype(np.float32)


def gated(gate: str, rows: np.ndarray, *more: float) -> np.ndarray:
    """The activation that an op of this name makes of rows [..., gate | up]; "none": the rows."""
    if gate == "none":
        return rows
    first, second = np.split(np.ascontiguousarray(rows), 2, axis=-1)
    return getattr(reference, gate)(first, second, *more)


def chosen_experts(rng, rows: int, experts: int, top: int) -> np.ndarray:
    """Different experts for each row, ascending: int32 [rows, top]."""
    return np.sort(np.stack([rng.permutation(experts)[:top] for _ in range(rows)]), axis=1).astype(np.int32)

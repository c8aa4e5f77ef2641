"""Kernels of every instruction set of this machine, at awkward sizes: against float64, and bit by bit for
invariance.
"""
import os
import platform
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest

from allspark_server import _native
from support.levels import LOWER, run_again

SIZES = [1, 3, 17, 63, 64, 65, 896]


def to_bf16(x):
    """float32 -> uint16 bfloat16 bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def matrix(executor, weights, dtype, source="F32"):
    n, k = weights.shape
    handle = executor.add_matrix(n, k, dtype)
    assert executor.fill_matrix(handle, weights, source) == 0
    return handle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 17, 65, 151])
@pytest.mark.parametrize("k", SIZES)
def test_matmul_against_float64(dtype, n, k):
    rng = np.random.default_rng(n * 1000 + k)
    executor = _native.Executor(num_threads=2)
    weights, bias = rng.normal(size=(n, k)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    handle = matrix(executor, weights, dtype)
    used = weights if dtype == "float32" else from_bf16(to_bf16(weights))
    rounds = dtype == "bfloat16" and _native.isa() in ("amx", "avx512_bf16")  # these take activations in bfloat16 too
    for m in [1, 2, 5, 12, 13, 31, 300]:
        x = rng.normal(size=(m, k)).astype(np.float32)
        exact = from_bf16(to_bf16(x)) if rounds else x
        expected = exact.astype(np.float64) @ used.astype(np.float64).T + bias
        bound = np.abs(x).astype(np.float64) @ np.abs(used).astype(np.float64).T + np.abs(bias)
        got = executor.multiply(handle, x, n, bias)
        assert np.all(np.abs(got - expected) <= (k + 2) * 2.0**-24 * bound + 1e-30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_read_back(dtype):
    rng = np.random.default_rng(6)
    executor = _native.Executor(num_threads=2)
    weights = rng.normal(size=(70, 129)).astype(np.float32)
    handle = matrix(executor, weights, dtype)
    used = weights if dtype == "float32" else from_bf16(to_bf16(weights))
    for row in range(70):
        assert np.array_equal(executor.read_row(handle, row), used[row])


def test_many_rows_long_rows_and_many_panels_in_bfloat16():
    rng = np.random.default_rng(5)
    executor = _native.Executor(num_threads=2)
    for n, k, m in ((70, 4864, 600), (1000, 70, 300), (33, 2081, 257)):
        weights, x = rng.normal(size=(n, k)).astype(np.float32), rng.normal(size=(m, k)).astype(np.float32)
        weights, x = from_bf16(to_bf16(weights)), from_bf16(to_bf16(x))
        got = executor.multiply(matrix(executor, weights, "bfloat16"), x, n)
        bound = np.abs(x).astype(np.float64) @ np.abs(weights).astype(np.float64).T
        assert np.all(np.abs(got - x.astype(np.float64) @ weights.astype(np.float64).T) <= 64 * 2.0**-24 * bound)


@pytest.mark.parametrize("dtype, threads, k", [("bfloat16", 1, 2112), ("bfloat16", 2, 2049), ("int8", 1, 4224),
                                               ("int8", 2, 4097)])
def test_the_shortest_parts_of_k_and_as_many_panels_as_they_allow(dtype, threads, k):
    """Tiles keep the sums of a group of panels while they pass over K in parts: the shorter the parts, the more panels
    are in a group.
    """
    rng = np.random.default_rng(k)
    n, m = 448 * threads, 256
    executor = _native.Executor(num_threads=threads)
    weights, x = rng.normal(size=(n, k)).astype(np.float32), rng.normal(size=(m, k)).astype(np.float32)
    handle = matrix(executor, weights, dtype)
    used = np.stack([executor.read_row(handle, row) for row in range(n)]).astype(np.float64)
    exact = from_bf16(to_bf16(x)) if dtype == "bfloat16" and _native.isa() in ("amx", "avx512_bf16") else x
    allowed = {"bfloat16": 64 * 2.0**-24, "int8": 2.0**-14}[dtype]  # int8: activations of 16 bits
    bound = np.abs(x).astype(np.float64) @ np.abs(used).T
    assert np.all(np.abs(executor.multiply(handle, x, n) - exact.astype(np.float64) @ used.T) <= allowed * bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_bits_do_not_depend_on_rows_threads_or_place(dtype):
    rng = np.random.default_rng(0)
    n, k = 173, 1031
    weights, x = rng.normal(size=(n, k)).astype(np.float32), rng.normal(size=(301, k)).astype(np.float32)
    one, two = (_native.Executor(num_threads=t) for t in (1, 2))
    a, b = matrix(one, weights, dtype), matrix(two, weights, dtype)
    whole = one.multiply(a, x, n)
    assert np.array_equal(whole.view(np.uint32), two.multiply(b, x, n).view(np.uint32))
    for rows in [1, 2, 3, 7, 12, 13, 24, 25, 64]:
        for start in rng.integers(0, 301 - rows, 3):
            part = two.multiply(b, x[start:start + rows], n)
            assert np.array_equal(part.view(np.uint32), whole[start:start + rows].view(np.uint32))


def test_packing_from_every_source_type_and_strided_views():
    rng = np.random.default_rng(1)
    executor = _native.Executor(num_threads=2)
    wide = rng.normal(size=(70, 200)).astype(np.float32)
    view = wide[3:68, 11:140]
    x = rng.normal(size=(4, view.shape[1])).astype(np.float32)
    half = wide.astype(np.float16)
    for source, array, values in [("F32", view, view),
                                  ("F16", half[3:68, 11:140], half[3:68, 11:140].astype(np.float32)),
                                  ("BF16", to_bf16(wide)[3:68, 11:140], from_bf16(to_bf16(wide))[3:68, 11:140])]:
        handle = executor.add_matrix(65, 129, "float32")
        # In two pieces whose seam is inside a panel.
        executor.fill_matrix(handle, array[:29], source)
        executor.fill_matrix(handle, array[29:], source, 29)
        assert np.allclose(executor.multiply(handle, x, 65), x @ values.T, atol=1e-4)


def test_half_precision_special_values_are_read_exactly():
    executor = _native.Executor()
    halves = np.array([[0.0, -0.0, 6e-8, 6.1e-5, 65504, -1.5]], np.float16)
    handle = executor.add_matrix(1, 6, "float32")
    executor.fill_matrix(handle, halves, "F16")
    for i in range(6):
        assert executor.multiply(handle, np.eye(6, dtype=np.float32)[i:i + 1], 1)[0, 0] == np.float32(halves[0, i])


def test_non_finite_weights_are_counted():
    executor = _native.Executor()
    weights = np.zeros((5, 40), np.float32)
    weights[2, 3], weights[4, 39] = np.nan, np.inf
    assert executor.fill_matrix(executor.add_matrix(5, 40, "bfloat16"), weights, "F32") == 2
    assert executor.fill_matrix(executor.add_matrix(5, 40, "float32"), to_bf16(weights), "BF16") == 2


@pytest.mark.parametrize("n", SIZES)
def test_rms_norm(n):
    rng = np.random.default_rng(n)
    for scale in (1e-20, 1.0, 1e15):
        x, w = (rng.normal(size=n) * scale).astype(np.float32), rng.normal(size=n).astype(np.float32)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt(np.mean(wide**2) + 1e-6) * w
        assert np.allclose(_native.kernels.rms_norm(x, w, 1e-6), expected, rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("n", SIZES)
def test_silu_mul(n):
    rng = np.random.default_rng(n)
    gate, up = (rng.normal(size=n) * 30).astype(np.float32), rng.normal(size=n).astype(np.float32)
    gate[:1] = -200.0
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(np.minimum(-wide, 700))) * up
    got = _native.kernels.silu_mul(gate, up)
    allowed = 1e-6 + 2.0**-24 * np.abs(wide)  # the exponent is rounded once before e^x is taken
    assert np.all(np.isfinite(got)) and np.all(np.abs(got - expected) <= allowed * np.abs(expected) + 1e-30)


@pytest.mark.parametrize("n", SIZES)
def test_clamped_silu_mul(n):
    rng = np.random.default_rng(n)
    gate, up = ((rng.normal(size=n) * 9).astype(np.float32) for _ in range(2))
    gate[:1], up[:1] = -100.0, 8.0
    g, u = np.minimum(gate.astype(np.float64), 7), np.clip(up.astype(np.float64), -7, 7)
    expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    got = _native.kernels.clamped_silu_mul(gate, up, 1.702, 7.0)
    # The exponent is rounded, and so is alpha; up + 1 is rounded as a sum.
    allowed = (1e-6 + 2.0**-23 * 1.702 * np.abs(g)) * np.abs(expected) + 2.0**-23 * np.abs(expected / (u + 1))
    assert np.all(np.abs(got - expected) <= allowed + 1e-30)
    for bad in (np.nan, np.inf):
        wrong = np.full(n, bad, np.float32)
        assert np.isnan(_native.kernels.clamped_silu_mul(wrong, up, 1.702, 7.0)).all() == np.isnan(bad)
        assert np.isnan(_native.kernels.clamped_silu_mul(gate, wrong, 1.702, 7.0)).all() == np.isnan(bad)


@pytest.mark.parametrize("half", [1, 3, 16, 17, 64])
def test_rope(half):
    rng = np.random.default_rng(half)
    x, angle = rng.normal(size=2 * half).astype(np.float32), rng.uniform(0, 6, half)
    c, s = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    expected = np.concatenate([x[:half] * c - x[half:] * s, x[half:] * c + x[:half] * s])
    assert np.allclose(_native.kernels.rope(x, c, s), expected, atol=1e-6)


# attention to a bfloat16 cache rounds queries and weights to bfloat16 too
ROUNDS = _native.isa() in ("amx", "avx512_bf16")
BLOCKS = [(1, 16), (17, 16), (63, 32), (128, 128), (127, 64), (96, 16), (33, 32)]  # tokens, span size


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dim", [1, 18, 63, 64, 80, 128, 512])
@pytest.mark.parametrize("tokens,span_size", BLOCKS)
def test_attention_block(bf16, dim, tokens, span_size):
    """Against float64 with the recipe's roundings. Memory past the tokens holds NaN."""
    rng = np.random.default_rng(dim + tokens)
    q = rng.normal(size=(13, dim)).astype(np.float32)
    keys = rng.normal(size=(tokens, dim)).astype(np.float32)
    values = rng.normal(size=(tokens, dim)).astype(np.float32) + 2
    limits = [int(x) for x in rng.integers(1, tokens + 1, 13)]
    limits[0], limits[1] = tokens, 1
    scale = dim**-0.5
    dtype = "bfloat16" if bf16 else "float32"
    rounds = bf16 and ROUNDS
    maximum, total, out = _native.kernels.attend(q, keys, values, limits, scale, span_size, dtype)
    if bf16:
        keys, values = from_bf16(to_bf16(keys)), from_bf16(to_bf16(values))
    exact = from_bf16(to_bf16(q)) if rounds else q
    for r, limit in enumerate(limits):
        scores = keys[:limit].astype(np.float64) @ exact[r] * scale
        p = np.exp(scores - scores.max())
        near = np.zeros(limit)  # what rounding to the other side may change, near the middle of two bfloat16
        if rounds:
            low, p, high = (from_bf16(to_bf16(p * factor)).astype(np.float64) for factor in (1 - 3e-5, 1, 1 + 3e-5))
            near = high - low
        assert np.isclose(maximum[r], scores.max(), atol=1e-5)
        assert abs(total[r] - p.sum()) <= 1e-5 * p.sum() + near.sum()
        size = np.abs(values[:limit])
        assert np.all(np.abs(out[r, :dim] - p @ values[:limit]) <= 1e-4 * p @ size + near @ size + 1e-5)
        # Alone the row gives the same bits as among the others.
        alone = _native.kernels.attend(q[r:r + 1], keys[:limit], values[:limit], [limit], scale, span_size, dtype)
        assert np.array_equal(np.asarray(alone[2]).view(np.uint32)[0], np.asarray(out).view(np.uint32)[r])
        assert alone[0][0] == maximum[r] and alone[1][0] == total[r]


@pytest.mark.parametrize("dim", [18, 64, 128])
def test_attention_weights_add_up_to_one(dim):
    """The sum is taken over rounded weights, so errors are proportional to the spread of the values, not to their
    size.
    """
    rng = np.random.default_rng(dim)
    tokens = 127
    q, keys = (rng.normal(size=(n, dim)).astype(np.float32) * 2 for n in (16, tokens))
    values = (rng.normal(size=(tokens, dim)) + 100).astype(np.float32)
    limits = [tokens - r for r in range(16)]
    results = _native.kernels.attend(q, keys, values, limits, dim**-0.5, 32, "bfloat16")
    keys, values = (from_bf16(to_bf16(x)).astype(np.float64) for x in (keys, values))
    exact = from_bf16(to_bf16(q)) if ROUNDS else q
    for r, limit in enumerate(limits):
        scores = keys[:limit] @ exact[r] * dim**-0.5
        p = np.exp(scores - scores.max())
        mean = p @ values[:limit] / p.sum()
        spread = p @ np.abs(values[:limit] - mean) / p.sum()
        assert np.all(np.abs(results[2][r, :dim] / results[1][r] - mean) <= 2.0**-8 * spread + 5e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_does_not_depend_on_spans_or_hide_what_is_not_finite(dtype):
    rng = np.random.default_rng(8)
    q, keys, values = (rng.normal(size=(n, 80)).astype(np.float32) for n in (16, 111, 111))
    limits = [111 - 7 * r for r in range(16)]
    first, *others = (_native.kernels.attend(q, keys, values, limits, 0.1, size, dtype) for size in (16, 32, 64, 128))
    for other in others:
        assert all(np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))
                   for a, b in zip(first, other))
    for bad in (np.nan, np.inf):
        for array in (q, keys, values):
            poisoned = [x.copy() if x is array else x for x in (q, keys, values)]
            # -inf as a score would be a weight of 0
            next(x for x, y in zip(poisoned, (q, keys, values)) if y is array)[3, 5] = np.copysign(bad, q[3, 5])
            _, total, out = _native.kernels.attend(*poisoned, limits, 0.1, 32, dtype)
            assert not np.all(np.isfinite(out[3, :80] / total[3]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_attention_takes_nothing_from_tokens_that_a_row_does_not_see(dtype, bad):
    rng = np.random.default_rng(9)
    tokens, dim = 93, 80
    q, keys, values = (rng.normal(size=(n, dim)).astype(np.float32) for n in (16, tokens, tokens))
    limits = [tokens - r // 2 for r in range(16)]
    clean = _native.kernels.attend(q, keys, values, limits, 0.1, 32, dtype)
    for where, array in (("key", keys), ("value", values)):
        array = array.copy()
        array[tokens - 3, 7] = bad  # rows from 6 on do not attend to it
        got = _native.kernels.attend(q, array if where == "key" else keys, array if where == "value" else values,
                                     limits, 0.1, 32, dtype)
        for now, before in zip(got, clean):
            assert np.array_equal(np.asarray(now).view(np.uint32)[6:], np.asarray(before).view(np.uint32)[6:])
        if where == "value":
            assert not np.any(np.isfinite(got[2][:6, 7]))


def run_with_isa(isa, code):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "ALLSPARK_ISA": isa}, capture_output=True,
                          text=True)


def test_isa_switch_is_honoured_and_unknown_names_are_refused():
    show = "from allspark_server import _native; print(_native.isa())"
    for isa in _native.isas():
        assert run_with_isa(isa, show).stdout.strip() == isa
    failed = run_with_isa("sse9", show)
    assert failed.returncode != 0 and "sse9" in failed.stderr and _native.isas()[-1] in failed.stderr


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("objdump"), reason="needs objdump, on x86-64")
def test_avx_vnni_is_encoded_as_its_processors_know_it():
    """Assemblers may choose AVX-512's encoding of the same instructions."""
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", _native.__file__], capture_output=True, text=True,
                             check=True).stdout
    found, function = {"vpdpbusd": 0, "vpdpwssd": 0}, ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line
        elif "vpdp" in line and "9avx2_vnni" in function:
            assert "{vex}" in line, f"{function} {line}"
            found[line.split("{vex} ")[1].split()[0]] += 1
    if not any("9avx2_vnni" in line for line in listing.splitlines()):
        pytest.skip("the level is not built: an old assembler, or $ALLSPARK_ISAS")
    if not any(found.values()):
        pytest.skip("the level is built with its instructions emulated")
    assert all(found.values())


@pytest.mark.skipif("ALLSPARK_ISA" in os.environ, reason="an instruction set is forced from outside")
@pytest.mark.parametrize("isa", LOWER)
def test_lower_instruction_sets_pass_the_same_tests(isa):
    run_again(__file__, isa)


@pytest.mark.parametrize("message, op, attributes", [
    (r"outside of \[0, 10\)", "sample", {"vocab_begin": 0, "vocab_size": 10}),
    ("reaches past", "head_norm", {"eps": 1e-6, "offset": 0, "heads": 5, "head_dim": 16}),
    ("reaches past", "head_norm", {"eps": 1e-6, "offset": -16, "heads": 1, "head_dim": 16}),
    ("invalid layer", "span_attention", {"layer": -1, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "group": 2,
                                         "scale": 1}),
    ("differ in rows", "rms_norm", {"eps": 1e-6}),
])
def test_ops_that_would_leave_their_memory_are_refused(message, op, attributes):
    executor = _native.Executor()
    row, out, logits = executor.add_tensor(64), executor.add_tensor(32), executor.add_tensor(64, True)
    norm = executor.add_vector(np.ones(64 if op == "rms_norm" else 16, np.float32))
    inputs, outputs, weights = {
        "sample": ([logits], [], []), "head_norm": ([row], [], [norm]), "span_attention": ([row], [out], []),
        "rms_norm": ([row], [logits], [norm])}[op]
    with pytest.raises(ValueError, match=message):
        executor.add_op(op, inputs, outputs, weights, attributes)


@pytest.mark.skipif("ALLSPARK_SANITIZE" in os.environ, reason="sanitizers take terabytes of addresses")
def test_threads_that_cannot_be_had_are_an_error():
    program = ("import resource; from allspark_server import _native\n"
               "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
               "try: _native.Executor(num_threads=1000)\n"
               "except RuntimeError as error: print(error)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("cannot allocate 1000 threads"), done.stderr


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 127, 128, 129, 1000, 4099, 1_000_003])
def test_crc32_is_that_of_zlib(size):
    data = np.random.default_rng(size).integers(0, 256, size + 3, dtype=np.uint8)[3:]  # not aligned
    assert _native.crc32(data) == zlib.crc32(data)
    assert _native.crc32(data, 0x12345678) == zlib.crc32(data, 0x12345678)
    assert _native.crc32(memoryview(data.tobytes())) == zlib.crc32(data)

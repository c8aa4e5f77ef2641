"""The quantized KV cache: kernels against float64 over the recovered cache, error bounds, bits, answers."""
import os
import pathlib

import numpy as np
import pytest

from allspark_server import _native
from support.levels import LOWER, run_again

LEVELS = {"int8": 255, "uint4": 15}
MODES = {"AsCacheQuantI8": "int8", "AsCacheQuantU4": "uint4"}


def bits_of(x):
    return np.asarray(x, np.float32).view(np.uint32)


def read_back(x, dtype):
    """Rows [tokens, dim] recovered from the cache, in float64 from the float32 scale and minimum."""
    x = x.astype(np.float32)
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    step = ((high.astype(np.float64) - low) / LEVELS[dtype]).astype(np.float32)
    flat = step < 1e-37
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(2) / np.where(flat, np.float32(1), step)
    q = np.minimum(np.rint((np.float32(0.5) * x - np.float32(0.5) * low) * inverse), LEVELS[dtype])
    return np.where(flat, 0, q * step.astype(np.float64)) + low, step


def expected_block(q, keys, values, limit, scale):
    """(maximum, sum, weighted values) of a row that sees `limit` tokens, in float64."""
    scores = keys[:limit] @ q.astype(np.float64) * scale
    p = np.exp(scores - scores.max())
    return scores.max(), p.sum(), p @ values[:limit]


@pytest.mark.parametrize("dtype", LEVELS)
@pytest.mark.parametrize("dim", [1, 18, 63, 64, 80, 128, 256])
@pytest.mark.parametrize("tokens,span_size", [(1, 16), (17, 16), (63, 32), (128, 128), (127, 64)])
def test_block_against_float64(dtype, dim, tokens, span_size):
    rng = np.random.default_rng(dim + tokens)
    q = rng.normal(size=(13, dim)).astype(np.float32)
    keys, values = (rng.normal(size=(tokens, dim)).astype(np.float32) + shift for shift in (0.7, -3))
    limits = [int(x) for x in rng.integers(1, tokens + 1, 13)]
    limits[0], limits[1] = tokens, 1
    scale = dim**-0.5
    maximum, total, out = _native.kernels.attend(q, keys, values, limits, scale, span_size, dtype)
    cached_keys, cached_values = read_back(keys, dtype)[0], read_back(values, dtype)[0]
    for r, limit in enumerate(limits):
        top, weight, vector = expected_block(q[r], cached_keys, cached_values, limit, scale)
        # What rounding the query to 16 bits may change in a score.
        error = scale * np.abs(cached_keys[:limit]).sum(axis=1).max() * np.abs(q[r]).max() / 65534 + 1e-5 * (
            1 + abs(top)
        )
        assert abs(maximum[r] - top) <= error
        assert np.allclose(
            out[r, :dim] / total[r], vector / weight, rtol=0, atol=4 * error * np.abs(values).max() + 1e-5
        )
        # Alone the row gives the same bits as among the others.
        alone = _native.kernels.attend(q[r:r + 1], keys[:limit], values[:limit], [limit], scale, span_size, dtype)
        assert np.array_equal(bits_of(alone[2])[0, :dim], bits_of(out)[r, :dim])
        assert alone[0][0] == maximum[r] and alone[1][0] == total[r]


@pytest.mark.parametrize("dtype", LEVELS)
@pytest.mark.parametrize("tokens", [1, 2, 15, 33, 127, 128])
def test_weights_are_rounded_to_16_bits(dtype, tokens):
    """With equal scores and different scales, a weight may be off by 2^-16 of the largest, and no more."""
    rng = np.random.default_rng(tokens)
    values = (rng.normal(size=(tokens, 64)) * rng.uniform(0.1, 3, (tokens, 1))).astype(np.float32)
    q, keys = np.zeros((9, 64), np.float32), rng.normal(size=(tokens, 64)).astype(np.float32)
    limits = [max(1, tokens - r) for r in range(9)]
    _, total, out = _native.kernels.attend(q, keys, values, limits, 0.125, 32, dtype)
    cached, step = read_back(values, dtype)
    for r, limit in enumerate(limits):
        assert total[r] == limit
        bound = 0.501 / 32767 * step[:limit].max() * LEVELS[dtype] + 1e-6 * np.abs(cached).max()
        assert np.abs(out[r, :64] / limit - cached[:limit].mean(axis=0)).max() <= bound


def one_token(dtype, key, value, query):
    """(score of the query, recovered value) of a cache of one token."""
    maximum, total, out = _native.kernels.attend(query[None], key[None], value[None], [1], 1.0, 16, dtype)
    assert total[0] == 1
    return maximum[0], out[0, :len(key)]


@pytest.mark.parametrize("dtype", LEVELS)
@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-20, 1.0, 1e20, 3e38])
def test_round_trip_error_is_half_a_step(dtype, scale):
    rng = np.random.default_rng(3)
    for dim in (2, 17, 64):
        key, value = (np.clip(rng.normal(size=dim) / 3, -1, 1) * scale for _ in range(2))
        key, value = key.astype(np.float32), value.astype(np.float32)
        bound = (
            0.501 * (value.max().astype(np.float64) - value.min()) / LEVELS[dtype] + 4e-7 * np.abs(value).max() + 3e-35
        )
        for d in (0, dim - 1):
            score, got = one_token(dtype, key, value, np.eye(dim, dtype=np.float32)[d])
            key_bound = (
                0.501 * (key.max().astype(np.float64) - key.min()) / LEVELS[dtype] + 4e-7 * np.abs(key).max() + 3e-35
            )
            assert abs(float(score) - key[d]) <= key_bound
            assert np.all(np.abs(got.astype(np.float64) - value) <= bound)


@pytest.mark.parametrize("dtype", LEVELS)
def test_equal_values_are_exact(dtype):
    query = np.zeros(33, np.float32)
    query[5] = 2
    for x in (0.0, -0.0, 7.25, -1e-42, 3e38, -1e30):
        row = np.full(33, x, np.float32)
        score, value = one_token(dtype, row, row, query / 2)
        assert np.array_equal(value, row) and abs(float(score) - float(np.float32(x))) <= 2e-7 * abs(x)


@pytest.mark.parametrize("dtype", LEVELS)
def test_values_that_are_not_finite_do_not_pass_for_numbers(dtype):
    rng = np.random.default_rng(4)
    q, keys, values = (rng.normal(size=(3, 40)).astype(np.float32) for _ in range(3))
    for bad in (np.nan, np.inf, -np.inf):
        for i in range(3):
            arrays = [q.copy(), keys.copy(), values.copy()]
            arrays[i][2, 7] = bad
            out = _native.kernels.attend(*arrays, [2, 2, 3], 0.2, 16, dtype)[2]
            assert not np.any(np.isfinite(out[2, :40]))
            if i == 0:
                assert np.all(np.isfinite(out[:2]))


@pytest.mark.parametrize("dtype", LEVELS)
def test_largest_integer_sums_do_not_overflow(dtype):
    """Queries and keys with the largest magnitudes everywhere, at the largest head size."""
    for dim in (256, 257, 512):
        query, key = np.full(dim, 3, np.float32), np.ones(dim, np.float32)
        key[0] = 0
        score, _ = one_token(dtype, key, key, query)
        assert score == pytest.approx(3 * (dim - 1), rel=1e-4)
        score, _ = one_token(dtype, key, key, -query)
        assert score == pytest.approx(-3 * (dim - 1), rel=1e-4)
    with pytest.raises(ValueError, match="512.*513"):
        _native.span_bytes(16, 513, dtype)


def test_bytes_of_a_span():
    assert [_native.span_bytes(32, 64, t) for t in ("float32", "bfloat16", "int8", "uint4")] == [
        32 * bytes_of_token for bytes_of_token in (512, 256, 144, 80)]


# -- whole models ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["qwen2-gqa-tied", "llama-dynamic"])
def test_ranks_agree_and_the_cache_is_what_differs(mode, model):
    """Each KV head is quantized alone, so two ranks have the same cache up to fp32 error. The difference to an fp32
    cache is that of quantization.
    """
    from support.checkpoints import checkpoint, prompt_of
    from support.driver import Driver

    prompt, logits = prompt_of(150), {}
    for world, fields in ((1, {}), (1, {"cache_mode": mode}), (2, {"cache_mode": mode})):
        with Driver(checkpoint(model), world, cache_dtype="float32", **fields) as driver:
            assert driver.info.cache_dtype == (MODES[mode] if fields else "float32")
            logits[world, bool(fields)] = driver.generate(prompt, 1)[1][0]
            if world == 1 and fields:  # in chunks, and so with other tiles
                chunked = driver.generate(prompt, 1, chunk=7)[1][0]
                assert np.array_equal(bits_of(chunked), bits_of(logits[world, True]))
    deviation = logits[1, False].std()
    noise = np.abs(logits[1, True] - logits[1, False]).max() / deviation
    assert 0 < noise < (0.15 if mode == "AsCacheQuantI8" else 2)
    # A value at a rounding boundary may fall to either side: at most a few of them.
    assert np.abs(logits[2, True] - logits[1, True]).max() / deviation < max(0.5 * noise, 1e-3)


@pytest.fixture(scope="module")
def engine(engine_of):
    return engine_of("engine")


@pytest.mark.parametrize("mode", MODES)
def test_same_request_same_bytes(engine, mode):
    """Alone, in a batch, in chunks, on two threads, after the prefix cache, preempted."""
    from support import invariance
    from support.checkpoints import prompt_of

    model = "qwen2-gqa-tied"

    def installed(**fields):
        return invariance.installed(engine, model, cache_mode=mode, **fields)

    with installed() as name:
        first = invariance.run_alone(engine, name)
        info = engine.get_model_info(name)
        assert invariance.run_together(engine, name, invariance.OTHERS) == first
    assert info.cache_dtype == MODES[mode]
    for fields in (
        {"engine_max_prefill_length": 1, "num_threads": 2},
        {"engine_max_prefill_length": 7, "cache_span_size": 16},
        {"engine_max_prefill_length": 64, "cache_span_size": 128, "num_threads": 2},
    ):
        with installed(**fields) as name:
            assert invariance.run_alone(engine, name) == first, fields
    with installed(enable_prefix_cache=True) as name:
        for _ in range(2):
            assert invariance.run_together(engine, name) == first
        assert engine.get_as_engine_stat(name).prefix_cache_hit_token > 500
    with installed(cache_memory=26 * (info.cache_bytes // info.num_spans), engine_max_length=768) as name:
        growing = {**invariance.ALWAYS, "max_new_tokens": 400, "priority": 1}
        started = [
            engine.start_request(name, {"input_ids": prompt_of(20, seed=i)}, growing)[2] for i in range(3)
        ]
        assert invariance.run_together(engine, name) == first
        engine.sync_request(name)
        assert engine.get_as_engine_stat(name).preempted_request > 0
        assert all(results.GeneratedLength() == 400 for results in started)


@pytest.mark.parametrize("mode, least", [("AsCacheQuantI8", 95), ("AsCacheQuantU4", 60)])
def test_shipped_model_still_adds(engine, mode, least):
    from tokenizers import Tokenizer

    import allspark_server
    from allspark_client import AsModelConfig

    fable = pathlib.Path(allspark_server.__file__).parent / "assets" / "fable"
    rng = np.random.default_rng(7)
    sums = [(int(a), int(b)) for a, b in rng.integers(1, 50, (100, 2))]
    engine.install_model(AsModelConfig("sums", str(fable), cache_mode=mode, engine_max_length=128, num_threads=2))
    try:
        engine.start_model("sums")
        queues = [engine.start_request("sums", {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}]},
                                       {"do_sample": False, "max_new_tokens": 30})[2] for a, b in sums]
        tokenizer = Tokenizer.from_file(str(fable / "tokenizer.json"))
        answers = [tokenizer.decode([i for part in queue for i in part.ids_from_generate]) for queue in queues]
    finally:
        engine.release_model("sums")
    right = sum(str(a + b) in answer for (a, b), answer in zip(sums, answers))
    print(f"{mode}: {right} of {len(sums)} sums")
    assert right >= least, answers


def test_fingerprint_covers_the_cache():
    from allspark_client.types import ModelInfo
    from allspark_server.engine.fingerprint import fingerprint

    kinds = ("float32", "bfloat16", *LEVELS)
    assert len({fingerprint(ModelInfo(cache_dtype=kind)) for kind in kinds}) == len(kinds)


@pytest.mark.slow   # test_quantization.py's in the ordinary suite runs most of the same code
@pytest.mark.skipif("ALLSPARK_ISA" in os.environ, reason="an instruction set is forced from outside")
@pytest.mark.parametrize("isa", LOWER)
def test_lower_instruction_sets_pass_the_same_tests(isa):
    chosen = "block or round_trip or equal or finite or overflow or ranks"
    run_again(__file__, isa, "-k", chosen)

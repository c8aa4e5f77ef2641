"""DeepSeek-V4's ops on the GPU against float64: residual streams, rotations of a head's last features, routers with a
table of experts, attention over compressed positions.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.plan import GIVEN, PROMPT, SAMPLE
from reference.toy import Toy, item, plan, start
from support.compressed_toys import (
    GROUPS,
    compressed,
    limited,
    normed_streams,
    rotated,
    routers,
    several_streams,
    spans_of,
    with_experts_of_a_token,
)
from support.gpu_toys import EXACT, LENGTHS, VOCAB, compare, compiled, embedded, tokens_of

pytestmark = pytest.mark.cuda


# -- residual streams --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [1, 7, 96, 531, 4096])
@pytest.mark.parametrize("streams, iterations", [(1, 1), (2, 1), (3, 20), (4, 2), (4, 20), (33, 3)])
def test_streams(streams, iterations, width):
    compare(several_streams(streams, iterations, min(width, 16384 // streams)), 2 * EXACT)


@pytest.mark.parametrize("width", [1, 7, 96, 531, 2048])
@pytest.mark.parametrize("streams, iterations", [(1, 1), (3, 20), (4, 20), (17, 2)])
def test_normed_streams(streams, iterations, width):
    compare(normed_streams(streams, iterations, width), 4 * EXACT)


@pytest.mark.parametrize("make", [several_streams, normed_streams])
@pytest.mark.parametrize("width", [700, 1536, 513])
def test_bits_of_streams_do_not_depend_on_other_rows(width, make):
    def logits(executor, given):
        work = [item(slot, 1, SAMPLE, spans=[slot]) for slot in range(len(given))]
        return executor.step(plan(work, [start(slot, [token]) for slot, token in enumerate(given)]), True).logits

    own = make(4, 20, width)
    given = np.random.default_rng(1).integers(0, 53, 40).tolist()
    several = logits(compiled(own, slots=40), given)
    for count in (1, 2, 16, 17):
        np.testing.assert_array_equal(logits(compiled(own, slots=40), given[:count]), several[:count])


def test_kernel_of_their_products():
    for own, name in ((several_streams(4, 2, 4096), "long_k"), (normed_streams(4, 2, 512), "long_k, norms")):
        found = {row["kernel"] for row in compiled(own).kernels() if row["shape"].startswith("float32 24 x")}
        assert found == {name}


# -- what ops that stood before have besides ---------------------------------------------------------------------------
@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@pytest.mark.parametrize("dim, rotary_dim", [(10, 10), (33, 6), (64, 16), (512, 64)])
def test_rotations_of_the_last_features_and_back(dim, rotary_dim, pairs):
    compare(rotated(dim, rotary_dim, pairs))


@pytest.mark.parametrize("width", [1, 31, 257, 2048])
def test_limited_silu_mul(width):
    compare(limited(width))


@pytest.mark.parametrize("experts, top", [(7, 3), (300, 6), (600, 32)])
@pytest.mark.parametrize("selected_first", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_routers(by_token, normalized, selected_first, experts, top):
    compare(routers(by_token, normalized, selected_first, experts, top))


@pytest.mark.parametrize("by_token", [False, True])
def test_experts_of_tokens_that_the_gpu_sampled(by_token):
    """Steps that are queued before the token of the one before is known choose by that token."""
    own, experts, top = Toy(11), 40, 4
    x = embedded(own, 32)
    routed = own.program.add_row_set(0, top)
    logits = own.op("linear", (x,), experts, (own.matrix(experts, 32, 2 * own.rng.normal(size=(experts, 32))),))
    table = own.rng.permuted(np.tile(np.arange(experts), (53, 1)), axis=1)[:, :top].ravel()
    scores = own.op("router", (logits,), 1, (own.vector(table) if by_token else own.vector(experts),), rows=routed,
                    top_k=top, scores="sqrt_softplus", normalized=True, by_token=by_token)
    y = own.op("expert_linear", (x,), 64, (own.matrix(experts * 64, 32),), rows=routed, experts=experts)
    y = own.op("limited_silu_mul", (y,), 32, limit=2.0)
    y = own.op("expert_linear", (y,), 53, (own.matrix(experts * 53, 32),), rows=routed, experts=experts)
    own.finish(own.op("combine_experts", (y, scores), 53, rows=0))
    prompts = [np.random.default_rng(n).integers(0, 53, n).tolist() for n in (1, 9)]
    found = [tokens_of(compiled(own, graphs=graphs), prompts, do_sample=False) for graphs in (True, False)]
    alone = [tokens_of(compiled(own), [prompt], do_sample=False)[0] for prompt in prompts]
    assert found[0] == found[1] == alone


@pytest.mark.parametrize("experts", [[0, 1, 5], [0, -1, 2], [0, 2, 2], [0, 1, 1.5], [0, 1, float("nan")]])
def test_experts_of_a_token_that_are_none(experts):
    with pytest.raises(ValueError, match="experts of token 2 must be 3 different numbers from 0 to 4"):
        compiled(with_experts_of_a_token(experts))


# -- attention over compressed positions -------------------------------------------------------------------------------
TOLERANCES = {"float32": EXACT, "bfloat16": 8e-2, "float16": 1e-2}
#: heads, features, rate, overlapping, selected entries; rows of 512 features have kernels for tensor cores
SHAPES = [(1, 4, 0, False, 0), (3, 20, 4, False, 0), (17, 33, 3, True, 0), (5, 131, 37, False, 0),
          (6, 64, 5, True, 300), (2, 16, 2, True, 1)]
WIDE = [(1, 512, 0, False, 0), (5, 512, 4, False, 0), (16, 512, 3, True, 0), (64, 512, 4, True, 11),
        (33, 512, 37, False, 0), (20, 512, 2, True, 300)]


def toy_of(heads, dim, rate, overlapping, selected):
    own = Toy(7, groups=GROUPS)
    own.finish(compressed(own, heads, dim, rate, selected, overlapping))
    return own


@pytest.mark.parametrize("cache", TOLERANCES)
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE])
def test_compressed_attention(shape, cache):
    """An indexer that selects few of many entries takes others where the cache rounds its keys. Scores of heads of 512
    reach 30, of which 16 bits round queries and keys.
    """
    if 0 < shape[4] < 20 and cache != "float32":
        pytest.skip("other entries have nearly the same score")
    own, rng = toy_of(*shape), np.random.default_rng(8)
    given = [rng.integers(0, VOCAB, n).tolist() for n in LENGTHS]
    work = [item(slot, len(p), SAMPLE, **spans_of(slot, 0, len(p), 8)) for slot, p in enumerate(given)]
    data = plan(work, [start(slot, p) for slot, p in enumerate(given)])
    found = compiled(own, cache, num_spans=128).step(data, True).logits
    expected = own.runner(num_spans=(128,) * 3).step(data).logits
    error = np.abs(found - expected).max() / np.sqrt(np.mean(expected**2))
    tolerance = TOLERANCES[cache] * (2 if shape[1] == 512 and cache != "float32" else 1)
    print(f"error {error:.2e} of {tolerance}")
    assert error <= tolerance


def rows_of(gpu, prompts, chunks, room=100) -> list[bytes]:
    """Logits of every row of prompts, as bytes. Every step computes a chunk of each that is not finished."""
    done, found = [0] * len(prompts), [b""] * len(prompts)
    new = [start(slot, p) for slot, p in enumerate(prompts)]
    while any(at < len(p) for at, p in zip(done, prompts)):
        work = []
        for slot, prompt in enumerate(prompts):
            count = min(chunks, len(prompt) - done[slot])
            if not count:
                continue
            end = done[slot] + count
            flags = PROMPT | (SAMPLE if end == len(prompt) else 0)
            work.append(item(slot, count, flags, outputs=count, **spans_of(slot, done[slot], end, room)))
        logits, at, new = gpu.step(plan(work, new), True).logits, 0, []
        for each in work:
            found[each.slot] += logits[at:at + each.rows].tobytes()
            at, done[each.slot] = at + each.rows, done[each.slot] + each.rows
    return found


@pytest.mark.parametrize("cache", TOLERANCES)
@pytest.mark.parametrize("shape", [
    (20, 12, 4, True, 150), (20, 12, 37, False, 0), (20, 512, 0, False, 0), (33, 512, 4, True, 150),
    (64, 512, 7, False, 20), (5, 512, 3, False, 0), (17, 512, 4, True, 300)])
def test_bits_of_compressed_positions_do_not_depend_on_chunks_and_batches(shape, cache):
    """Also where chunks end within the positions of an entry, and where partial results have little room. Near the
    reference with a cache of floats.
    """
    own = toy_of(*shape)
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1290, 333, 1)]

    def found(chunks, which=prompts, **more):
        return rows_of(compiled(own, cache, long=True, outputs=2048, num_spans=1024, **more), which, chunks)

    expected = found(1000)
    assert expected == found(333, partial_bytes=1) == found(47) == found(5) == found(64, graphs=False)
    assert [found(500, [prompt])[0] for prompt in prompts] == expected
    if cache == "float32":
        exact = own.runner(num_spans=(400,) * 3, max_length=2048, max_rows=2048).step(
            plan([item(0, 1290, SAMPLE, **spans_of(0, 0, 1290, 100))], [start(0, prompts[0])])).logits[0]
        last = np.frombuffer(expected[0], np.float32)[-len(exact):]
        assert np.abs(last - exact).max() <= 2 * EXACT * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("shape, name", [((5, 512, 4, True, 20), "mma"), ((3, 20, 0, False, 0), "simt")])
def test_kernels(shape, name):
    found = {row["op"]: row["kernel"] for row in compiled(toy_of(*shape), "bfloat16").kernels()}
    assert found["compressed_attention"] == name


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dim", [12, 512])
def test_rejected_drafts_leave_no_entries(dim, graphs):
    """Drafts complete entries; other tokens than these come, and have the bits that they have without drafts."""
    prompt = np.random.default_rng(4).integers(0, VOCAB, 41).tolist()
    found = []
    for drafts in ([], [1, 2, 3, 4, 5, 6]):
        own = Toy(9, groups=GROUPS)
        x = compressed(own, 4, dim, 4, 5, True)
        own.finish(own.op("linear", (x,), VOCAB, (own.matrix(VOCAB, 4 * dim),)))
        gpu, tokens, rows, new, have = (compiled(own, "bfloat16", num_spans=128, graphs=graphs), [], [],
                                        [start(0, prompt)], 0)
        for step in range(12):
            count = len(prompt) if step == 0 else 1
            begin = 0 if step == 0 else len(prompt) + len(tokens) - 1
            given = [] if step == 0 else [(draft + tokens[-1]) % VOCAB for draft in drafts]
            end = begin + count + len(given)
            fresh, have = spans_of(0, 16 * have, max(end, 16 * have), 12), max(have, -(-end // 16))
            flags, new_slots, new = SAMPLE | (GIVEN if given else 0), new, []
            result = gpu.step(plan([item(0, count, flags, known=given, drafts=len(given), **fresh)], new_slots), True)
            tokens += result.tokens[:result.counts[0]].tolist()
            rows += list(result.logits[:result.counts[0]])
        found.append((tokens[:12], [row.tobytes() for row in rows[:12]]))
    assert found[0] == found[1]


def test_refused():
    with pytest.raises(ValueError, match="attention over compressed positions with a cache of 8 or 4 bits"):
        compiled(toy_of(2, 12, 4, False, 0), "int8")
    with pytest.raises(ValueError, match="compressed positions of 577 features, at most 576"):
        compiled(toy_of(1, 577, 4, False, 0), "bfloat16")


# -- whole models ------------------------------------------------------------------------------------------------------
MODELS = ("deepseek-v4", "deepseek-v4-wide", "rows-of-512")


def checkpoint_of(name, directory):
    """A tiny checkpoint; "rows-of-512" has heads, indexer and rotated features as large as published ones have."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers.models.deepseek_v4")
    from support.checkpoints import checkpoint, write_checkpoint
    from support.tiny_configs import COMPRESSED, Spec

    if name in COMPRESSED:
        return checkpoint(name)
    tiny = COMPRESSED["deepseek-v4"]
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "hidden_size": 96}
    return write_checkpoint(directory / "wide", Spec(tiny.family, {**tiny.fields, **sizes}), 3)


@pytest.mark.parametrize("name", MODELS)
def test_model_in_float32(name, tmp_path):
    source = checkpoint_of(name, tmp_path)
    from support.checkpoints import check_logits, prompt_of, reference_logits
    from support.driver import Driver
    from support.greedy import check_greedy_output

    with Driver(source, compute_unit="CUDA:0", weight_dtype="float32") as gpu:
        for length in (1, 33, 129, 300, 700):
            prompt = prompt_of(length)
            check_logits(gpu.generate(prompt, 1)[1][0], reference_logits(source, prompt))
        prompt = prompt_of(64)
        check_greedy_output(gpu.generate(prompt, 64, chunk=48)[0], source, prompt)


@pytest.mark.parametrize("name, form, group", [
    ("deepseek-v4", "bfloat16", 0), ("deepseek-v4", "int8", 0), ("deepseek-v4", "w8a8", 0),
    ("deepseek-v4-wide", "float16", 0), ("deepseek-v4-wide", "bfloat16", 0), ("rows-of-512", "bfloat16", 0),
    ("rows-of-512", "float16", 0), ("rows-of-512", "int4", 32)])
def test_models_in_every_format(name, form, group, tmp_path):
    """The same bits alone and in a batch, and near float32."""
    source = checkpoint_of(name, tmp_path)
    from support.checkpoints import prompt_of, reference_logits
    from support.driver import Driver, together

    prompts = [prompt_of(n, seed=9) for n in (1, 3, 40, 270)]
    with Driver(source, compute_unit="CUDA:0", weight_dtype=form, weight_group_size=group, engine_max_batch=4) as gpu:
        expected = [together(gpu, [p], 1 << 10)[0] for p in prompts]
        for row, wanted in zip(together(gpu, prompts, 37), expected):
            np.testing.assert_array_equal(row, wanted)
        prompt = prompt_of(64)
        logits, exact = gpu.generate(prompt, 1)[1][0], reference_logits(source, prompt)
    # An indexer's keys are rounded, too, so it selects some other entries.
    error = np.sqrt(np.mean((logits - exact) ** 2)) / exact.std()
    print(f"error {error:.2f}")
    assert error < (1.2 if form == "int4" else 0.4)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_history_is_cut_at_every_offset(name, tmp_path):
    source = checkpoint_of(name, tmp_path)
    from support.checkpoints import prompt_of
    from support.driver import Driver

    with Driver(source, compute_unit="CUDA:0", weight_dtype="bfloat16") as gpu:
        prompt = prompt_of(60, seed=2)
        tokens, logits = gpu.generate(prompt, 72)
        for offset in range(72):
            again = gpu.generate([*prompt, *tokens[:offset]], 1, chunk=50)[1][0]
            np.testing.assert_array_equal(again, logits[offset])


def test_a_model_as_it_is_published(tmp_path):
    """FP8 in blocks and experts in MXFP4; bits do not depend on chunks."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers.models.deepseek_v4")
    from models.test_compressed import published_pair

    from support.checkpoints import prompt_of, reference_logits
    from support.driver import Driver

    quantized, twin = published_pair(tmp_path)
    prompt = prompt_of(140)
    with Driver(quantized, compute_unit="CUDA:0") as gpu:
        logits = gpu.generate(prompt, 1)[1][0]
        np.testing.assert_array_equal(gpu.generate(prompt, 1, chunk=29)[1][0], logits)
    exact = reference_logits(twin, prompt)
    error = np.sqrt(np.mean((logits - exact) ** 2)) / exact.std()
    print(f"error {error:.2f}")
    assert error < 0.4


@pytest.mark.parametrize("ranks, dtype", [(2, "float32"), (3, "bfloat16")])
def test_model_on_ranks_that_share_a_gpu(ranks, dtype, tmp_path, monkeypatch):
    """Ranks have 2 and 1 of 3 groups of heads. The same bytes alone and together; in float32 the greedy ids of
    transformers.
    """
    from allspark_client import AsModelConfig, ClientEngine
    from allspark_launch.group.background import background_group
    from allspark_server.runtime.device import SHARED_GPUS
    from support.checkpoints import prompt_of
    from support.greedy import check_greedy, reference_greedy

    def collect(started):
        found = list(started[2])
        return [[i for e in found for i in e.ids_from_generate], [p for e in found for p in e.token_logprobs_list]]

    def ask(prompt):
        return engine.start_request("m", {"input_ids": prompt}, {
            "do_sample": False, "max_new_tokens": 12, "eos_token_id": -1, "logprobs": True})

    monkeypatch.setenv(SHARED_GPUS, "1")
    source, prompts = checkpoint_of("deepseek-v4", tmp_path), [prompt_of(n) for n in (30, 1, 88)]
    words = ["--gpus", ",".join(["0"] * ranks)]
    with background_group(words, timeout=120) as group, ClientEngine(group.addresses[0]) as engine:
        engine.install_model(AsModelConfig(model_name="m", model_path=str(source), engine_max_length=512,
                                           cache_memory=64 << 20, weight_dtype=dtype,
                                           compute_unit="CUDA:" + words[1]))
        engine.start_model("m")
        assert engine.get_rank_nums() == ranks
        found = [collect(ask(prompt)) for prompt in prompts]
        started = [ask(prompt) for prompt in prompts]
        assert [collect(each) for each in started] == found
    for prompt, (ids, _) in zip(prompts, found):
        if dtype == "float32":
            check_greedy(ids, reference_greedy(source, prompt, 12))

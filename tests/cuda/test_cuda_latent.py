"""Latent attention on the GPU, with an indexer too: its ops against float64, bits over chunks, batches, drafts and
graphs, and whole models against transformers, on one and several ranks.
"""

from __future__ import annotations

import numpy as np
import pytest

from reference.plan import GIVEN, SAMPLE
from reference.toy import Toy, item, plan, spans_for, start
from support.gpu_toys import EXACT, SEED, VOCAB, compare, compiled, embedded, logits_of_rows, tokens_of, toy
from support.latent_toys import indexed, selective

pytestmark = pytest.mark.cuda
#: of caches and matrices, relative to the values' root mean square
TOLERANCES = {"float32": EXACT, "bfloat16": 4e-2, "float16": 5e-3}
#: heads, latent, rotated features; those of 512 + 64 have kernels for tensor cores
SHAPES = [(1, 1, 1), (3, 20, 6), (16, 64, 16), (17, 33, 7), (5, 131, 64), (2, 511, 65)]
WIDE = [(1, 512, 64), (5, 512, 64), (16, 512, 64), (17, 512, 64), (33, 512, 64)]


def matrix(own, n, k, form="float32"):
    handle = own.program.add_matrix(n, k, form, 0)
    own.weights[handle] = own.rng.normal(size=(n, k)) * k**-0.5
    return handle


@pytest.mark.parametrize("form", TOLERANCES)
@pytest.mark.parametrize("heads, inputs, outputs, offset", [
    (1, 1, 1, 0), (3, 7, 33, 5), (5, 64, 20, 0), (4, 48, 131, 1), (3, 128, 512, 192), (2, 512, 128, 0),
    (2, 513, 65, 3), (2, 1100, 300, 1), (3, 4096, 64, 0)])
def test_head_linear(heads, inputs, outputs, offset, form):
    own = toy()
    x = embedded(own, offset + heads * inputs + 2)
    own.finish(own.op("head_linear", (x,), heads * outputs, (matrix(own, heads * outputs, inputs, form),), heads=heads,
                      offset=offset))
    compare(own, TOLERANCES[form])


@pytest.mark.parametrize("inputs, outputs", [(1030, 200), (2048, 64), (512, 130)])
def test_bits_of_head_linear_do_not_depend_on_other_rows(inputs, outputs):
    own = toy()
    x = embedded(own, 2 * inputs)
    own.finish(own.op("head_linear", (x,), 2 * outputs, (matrix(own, 2 * outputs, inputs, "bfloat16"),), heads=2,
                      offset=0))
    gpu = compiled(own, long=True, outputs=2048)
    expected = logits_of_rows(gpu, [list(range(50)) * 6], lambda: 300)
    for count in (1, 16, 17, 100):
        gpu.step(plan([], free=[0]), False)
        assert logits_of_rows(gpu, [list(range(50)) * 6], lambda count=count: count) == expected


def attention_toy(heads, latent, rope):
    own = Toy(SEED, groups=(("latent", 0),))
    x = embedded(own, 31)
    absorbed, rotated, kept = (own.op("linear", (x,), width, (own.matrix(width, 31),))
                               for width in (heads * latent, heads * rope + 3, latent + rope))
    own.finish(own.op("latent_attention", (absorbed, rotated, kept), heads * latent, layer=0, latent_dim=latent,
                      rope_dim=rope, scale=2 / np.sqrt(latent + rope)))
    return own


@pytest.mark.parametrize("cache", TOLERANCES)
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE])
def test_latent_attention(shape, cache):
    compare(attention_toy(*shape), TOLERANCES[cache], cache)


@pytest.mark.parametrize("shape, name", [((5, 512, 64), "mma"), ((3, 20, 6), "simt")])
def test_kernels(shape, name):
    found = {row["op"]: row["kernel"] for row in compiled(attention_toy(*shape), "bfloat16").kernels()}
    assert found["latent_attention"] == name


@pytest.mark.parametrize("heads, dim, selected", [(1, 1, 1), (3, 7, 50), (17, 33, 129), (16, 32, 700), (64, 128, 129),
                                                  (13, 128, 255), (5, 131, 30), (9, 64, 1)])
@pytest.mark.parametrize("cache", TOLERANCES)
def test_indexer(heads, dim, selected, cache):
    """The positions themselves, of scores many of which are equal: of prompts, and of a few rows after them."""
    own = Toy(SEED, groups=(("latent", 0),))
    own.finish(indexed(own, heads, dim, selected, layer=0)[1])
    runner = own.runner(num_spans=(128,), max_length=2048, max_rows=2048)
    given = [own.rng.integers(0, VOCAB, length).tolist() for length in (1, 131, 20, 716, 301)]
    rows = [(1, SAMPLE), (131, SAMPLE), (20, SAMPLE), (700, 0), (301, SAMPLE)]
    work = [item(slot, count, flags, spans=spans_for(count, (0, 1, 10, 12, 60)[slot]))
            for slot, (count, flags) in enumerate(rows)]
    steps = (plan(work, [start(slot, prompt) for slot, prompt in enumerate(given)]),
             plan([item(3, 16, SAMPLE, spans=[80])]))
    expected = [runner.step(data).logits for data in steps]
    for more in ({}, {"partial_bytes": 1}):     # then with scores of 16 rows at a time
        gpu = compiled(own, cache, long=True, **more)
        for data, logits in zip(steps, expected):
            np.testing.assert_array_equal(gpu.step(data, True).logits, logits)


@pytest.mark.parametrize("cache", TOLERANCES)
@pytest.mark.parametrize("heads, latent, rope, selected", [
    (1, 1, 1, 1), (3, 20, 6, 7), (16, 64, 16, 16), (17, 33, 7, 33), (5, 512, 64, 16), (33, 512, 64, 33),
    (16, 512, 64, 1), (70, 512, 64, 20)])
def test_attention_over_selected_positions(heads, latent, rope, selected, cache):
    own = Toy(SEED, groups=(("latent", 0),))
    own.finish(selective(own, heads, latent, rope, selected))
    compare(own, TOLERANCES[cache], cache)


@pytest.mark.parametrize("cache", TOLERANCES)
@pytest.mark.parametrize("heads, latent, rope, selected", [
    (20, 12, 4, 300), (20, 12, 4, 1), (20, 512, 64, 300), (33, 512, 64, 64), (5, 512, 64, 515), (16, 512, 64, 128),
    (70, 512, 64, 257)])
def test_bits_of_selected_positions_do_not_depend_on_chunks(heads, latent, rope, selected, cache):
    """Tokens repeat, so many scores are equal. Also near the reference."""
    own = Toy(7, groups=(("latent", 0),))
    own.finish(selective(own, heads, latent, rope, selected))
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (701, 330, 64)]

    def found(count, **more):
        return logits_of_rows(compiled(own, cache, long=True, outputs=2048, **more), prompts, lambda: count)

    expected = found(700)
    assert expected == found(333, partial_bytes=1) == found(47) == found(7)
    prompt = prompts[1]
    exact = own.runner(num_spans=(128,), max_length=2048, max_rows=2048).step(
        plan([item(0, len(prompt), SAMPLE, spans=spans_for(len(prompt)))], [start(0, prompt)])).logits[0]
    last = np.frombuffer(expected[1], np.float32)[-len(exact):]
    assert np.abs(last - exact).max() <= TOLERANCES[cache] * np.sqrt(np.mean(exact**2))


def latent_model(heads, latent, rope, form="float32", selected=0):
    """Two layers: projections of queries, a normed latent, RoPE, attention in the absorbed form; selected: an indexer
    selects so many positions.
    """
    own, nope, value = Toy(9, groups=(("latent", 0),)), 4, 5
    x = own.embedding(VOCAB, 24, own.rng.normal(size=(VOCAB, 24)))
    own.rotary(rope)
    for layer in range(2):
        queries = own.op("linear", (x,), heads * (rope + nope), (own.matrix(heads * (rope + nope), 24),))
        kept = own.op("linear", (x,), latent + rope, (own.matrix(latent + rope, 24),))
        own.op("head_norm", (kept,), None, (own.vector(latent),), eps=1e-6, head_dim=latent, offset=0, heads=1)
        for rows, offset, count in ((queries, 0, heads), (kept, latent, 1)):
            own.op("rope", (rows,), offset=offset, heads=count, head_dim=rope, pairs="interleaved")
        absorbed = own.op("head_linear", (queries,), heads * latent, (matrix(own, heads * latent, nope, form),),
                          heads=heads, offset=heads * rope)
        seen = ()
        if selected:
            index = (own.op("linear", (x,), width, (own.matrix(width, 24),)) for width in (9 * 40, 9, 40))
            seen = (own.op("indexer", tuple(index), selected, layer=2 + layer),)
        recalled = own.op("latent_attention", (absorbed, queries, kept, *seen), heads * latent, layer=layer,
                          latent_dim=latent, rope_dim=rope, scale=1.5 / np.sqrt(latent + rope))
        attended = own.op("head_linear", (recalled,), heads * value, (matrix(own, heads * value, latent, form),),
                          heads=heads, offset=0)
        own.op("add", (x, own.op("linear", (attended,), 24, (matrix(own, 24, heads * value, form),))))
    own.finish(own.op("linear", (x,), VOCAB, (own.matrix(VOCAB, 24),)))
    return own


MODELS = [(5, 512, 64, "bfloat16", "bfloat16"), (16, 512, 64, "bfloat16", "bfloat16"),
          (20, 512, 64, "float32", "float16"), (5, 20, 6, "float32", "float32"), (19, 33, 8, "bfloat16", "bfloat16"),
          (5, 512, 64, "float16", "float16")]
SELECTIVE = [(20, 512, 64, "bfloat16", 40, "bfloat16"), (5, 20, 6, "float32", 66, "float32")]


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 129])
@pytest.mark.parametrize("model", MODELS)
def test_bits_do_not_depend_on_chunks_and_batches(model, count):
    """Rows of prompts of several KV splits, at once and `count` at a time, alone and together."""
    *shape, form, cache = model
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1, 63, 65, 257, 600)]
    own = latent_model(*shape, form)
    gpu = compiled(own, cache, long=True, outputs=2048)
    expected = []
    for used, prompt in enumerate(prompts):
        if used:
            gpu.step(plan([], free=[0]), False)
        expected += logits_of_rows(gpu, [prompt], lambda: 1000)
    gpu.step(plan([], free=[0]), False)
    assert logits_of_rows(gpu, prompts, lambda: count) == expected
    exact = own.runner(num_spans=(128,), max_length=2048, max_rows=2048).step(
        plan([item(0, 600, SAMPLE, spans=spans_for(600))], [start(0, prompts[-1])])).logits[0]
    found = np.frombuffer(expected[-1], np.float32)[-VOCAB:]
    assert np.abs(found - exact).max() <= max(TOLERANCES[form], TOLERANCES[cache]) * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("model", MODELS[1:4])
def test_few_partial_results(model):
    """Some sequences are then computed by prefill tiles, with the same bits."""
    *shape, form, cache = model
    own, prompts = latent_model(*shape, form), [np.random.default_rng(n).integers(0, VOCAB, n).tolist()
                                                for n in (700, 701, 900)]
    found = [logits_of_rows(compiled(own, cache, long=True, outputs=2048, **more), prompts, lambda: 1)
             for more in ({}, {"partial_bytes": 1})]
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [1, 2, 3, 63, 65])
@pytest.mark.parametrize("model", SELECTIVE)
def test_bits_of_selecting_models(model, count):
    """Scores of random numbers, in two layers."""
    *arguments, cache = model
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1, 65, 257, 600)]
    gpu = compiled(latent_model(*arguments), cache, long=True, outputs=2048)
    expected = []
    for used, prompt in enumerate(prompts):
        if used:
            gpu.step(plan([], free=[0]), False)
        expected += logits_of_rows(gpu, [prompt], lambda: 1000)
    gpu.step(plan([], free=[0]), False)
    assert logits_of_rows(gpu, prompts, lambda: count) == expected


@pytest.mark.parametrize("model", [*MODELS, *SELECTIVE])
def test_bits_with_graphs_and_drafts(model):
    *arguments, cache = model
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (40, 90)]
    found = [tokens_of(compiled(latent_model(*arguments), cache, graphs=graphs), prompts, flags, drafts=drafts,
                       do_sample=False)
             for graphs, flags, drafts in ((True, 0, 0), (False, 0, 0), (True, GIVEN, 2), (False, GIVEN, 5))]
    assert all(each == found[0] for each in found[1:])


def test_refused():
    with pytest.raises(ValueError, match="latents with rotated keys, together of 577 features, at most 576"):
        compiled(attention_toy(1, 512, 65))
    with pytest.raises(ValueError, match="latent attention with a cache of 8 or 4 bits"):
        compiled(attention_toy(1, 512, 64), "int8")
    own = Toy(SEED, groups=(("latent", 0),))
    own.finish(indexed(own, 2, 8, 4, layer=0)[1])
    with pytest.raises(ValueError, match="op indexer with a cache of 8 or 4 bits"):
        compiled(own, "int8")


# -- whole models ------------------------------------------------------------------------------------------------------
def names():
    pytest.importorskip("torch")
    pytest.importorskip("transformers.models.glm4_moe_lite")
    from support.tiny_configs import LATENT
    return LATENT


def wide_rows(directory, heads=5, name="deepseek-v3"):
    """A tiny DeepSeek-V3 with rows of 512 + 64 features, as the published ones have; or a V3.2 whose indexer's heads
    have as many features as published ones.
    """
    from support.checkpoints import write_checkpoint
    from support.tiny_configs import INDEXED, LATENT, Spec

    tiny = LATENT[name]
    sizes = {"index_n_heads": 64, "index_head_dim": 128} if name in INDEXED else {}
    fields = {**tiny.fields, **sizes, "num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": 512,
              "qk_rope_head_dim": 64, "head_dim": 64, "num_hidden_layers": 2}
    return write_checkpoint(directory, Spec(tiny.family, fields), 3)


WIDE_MODELS = {"wide": "deepseek-v3", "wide-indexed": "deepseek-v32"}
LATENT = ("deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "deepseek-v3-heads", "glm4-moe-lite", "deepseek-v32",
          "glm-moe-dsa", *WIDE_MODELS)


def checkpoint_of(name, directory):
    names()
    from support.checkpoints import checkpoint
    return wide_rows(directory / "wide", name=WIDE_MODELS[name]) if name in WIDE_MODELS else checkpoint(name)


@pytest.mark.parametrize("name", LATENT)
def test_model_in_float32(name, tmp_path):
    source = checkpoint_of(name, tmp_path)
    from support.checkpoints import check_logits, prompt_of, reference_logits
    from support.driver import Driver
    from support.greedy import check_greedy, reference_greedy

    with Driver(source, compute_unit="CUDA:0", weight_dtype="float32") as gpu:
        for length in (1, 33, 129, 300, 700):
            prompt = prompt_of(length)
            check_logits(gpu.generate(prompt, 1)[1][0], reference_logits(source, prompt))
        prompt = prompt_of(64)
        check_greedy(gpu.generate(prompt, 24)[0], reference_greedy(source, prompt, 24))


@pytest.mark.parametrize("name, form, group", [("wide", "bfloat16", 0), ("wide", "float16", 0), ("wide", "int8", 0),
                                               ("wide", "int4", 32), ("deepseek-v3", "int8", 0),
                                               ("deepseek-v2-groups", "bfloat16", 0), ("wide-indexed", "bfloat16", 0),
                                               ("wide-indexed", "int8", 0), ("glm-moe-dsa", "bfloat16", 0)])
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
    # An indexer's keys are rounded, too, so it selects some other positions.
    bound = 1.2 if form == "int4" else 0.8 if name in ("wide-indexed", "glm-moe-dsa") else 0.2
    assert np.sqrt(np.mean((logits - exact) ** 2)) / exact.std() < bound


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v32"])
@pytest.mark.parametrize("ranks, dtype", [(2, "float32"), (3, "float32"), (2, "bfloat16"), (3, "bfloat16")])
def test_ranks_that_share_a_gpu(ranks, dtype, name, tmp_path, monkeypatch):
    """Heads do not divide evenly. The same bytes alone and together; in float32 the greedy ids of transformers."""
    names()
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
    source, prompts = wide_rows(tmp_path / "wide", 19 if ranks == 3 else 5, name), [prompt_of(n) for n in (30, 1, 88)]
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

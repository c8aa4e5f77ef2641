"""gpt-oss against transformers: logits and greedy output on 1 to 4 ranks, the same bits in every batch, every weight
format, MXFP4 as published, serialized and reloaded; and o200k_harmony's tokenizer.json.
"""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.models import read_config
from allspark_server.tokenizer.tokenizer import Tokenizer
from allspark_server.weights.checkpoint import open_model
from reference.loading import logits_after, model_runner
from support.checkpoints import PROMPT_LENGTHS, check_logits, checkpoint, prompt_of, reference_logits
from support.driver import Driver, together
from support.greedy import check_greedy_output
from support.mxfp4_checkpoint import mxfp4_pair, mxfp4_tensors, write
from support.quantized_checkpoints import assert_equal, recovered

BOTH = ("gpt-oss", "gpt-oss-plain")
slow = pytest.mark.slow


# -- against transformers ----------------------------------------------------------------------------------------------
def cases(worlds, *default):
    """All (name, ranks), some of them marked slow."""
    return pytest.mark.parametrize("name, world", [
        pytest.param(name, world, marks=[] if (name, world) in default else slow) for name in BOTH for world in worlds])


@cases((1, 3), ("gpt-oss-plain", 1))
def test_graph_describes_the_model(name, world):
    prompt = prompt_of(80)  # beyond the window
    found = logits_after(model_runner(checkpoint(name), world), prompt)
    check_logits(found, reference_logits(checkpoint(name), prompt))


def check_prompts(directory, world, lengths, twin=None):
    """Compares logits. `twin` is the checkpoint that transformers computes with if it cannot read the tested one."""
    with Driver(directory, world) as driver:
        for length in lengths:
            _, logits = driver.generate(prompt_of(length), 1)
            check_logits(logits[0], expected_logits(twin or directory, length))


@functools.cache
def expected_logits(directory, length):
    return reference_logits(directory, prompt_of(length))


@cases((1, 2, 3, 4), ("gpt-oss", 2), ("gpt-oss-plain", 4))
def test_logits(name, world):
    check_prompts(checkpoint(name), world, (1, 33, 129))


@slow
@pytest.mark.parametrize("name", BOTH)
def test_logits_of_all_lengths(name):
    check_prompts(checkpoint(name), 1, PROMPT_LENGTHS)
    check_prompts(checkpoint(name), 3, (300, 700))


@slow
@cases((1, 2, 3, 4))
def test_greedy_output(name, world):
    """Prompts in chunks of 48 rows, then token by token."""
    with Driver(checkpoint(name), world) as driver:
        prompt = prompt_of(90, seed=1)
        check_greedy_output(driver.generate(prompt, 256, chunk=48)[0], checkpoint(name), prompt)


# -- ranks -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, world, features, experts", [
    ("gpt-oss", 2, [104, 96], [(0, 10), (0, 10)]), ("gpt-oss", 4, [200] * 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
    ("gpt-oss-plain", 2, [37, 37], [(0, 4), (4, 7)]), ("gpt-oss-blocks", 2, [96, 64], [(0, 6), (0, 6)]),
])  # fmt: skip
def test_what_ranks_have(name, world, features, experts):
    """Slices of every expert, or whole experts; the bias after down_proj counts once."""
    graph = open_model(str(checkpoint(name))).graph
    down = graph.weights["model.layers.0.mlp.experts.down_proj"]
    bias = graph.weights["model.layers.0.mlp.experts.down_proj.bias"]
    ranks = range(world)
    assert [np.ptp(down.column_range_of(rank, world)) for rank in ranks] == features
    assert [down.experts_of(rank, world) for rank in ranks] == experts
    whole = experts[0] != experts[1]
    assert [bias.is_zero_on(rank, world) for rank in ranks] == [rank > 0 and not whole for rank in ranks]


# -- bits --------------------------------------------------------------------------------------------------------------
FORMATS = [("float32", 0), ("bfloat16", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32)]


def check_bits(directory, **fields):
    prompts = [prompt_of(n, seed=9) for n in (1, 3, 70, 111)]
    fields = {"engine_max_batch": 4, **fields}
    with Driver(directory, 1, **fields) as driver:
        expected = [together(driver, [p], 1 << 20)[0] for p in prompts]
        for chunk in (1 << 20, 37, 1):
            for row, wanted in zip(together(driver, prompts, chunk), expected):
                np.testing.assert_array_equal(row, wanted)
    with Driver(directory, 1, **{**fields, "num_threads": 3}) as driver:
        for row, wanted in zip(together(driver, prompts, 50), expected):
            np.testing.assert_array_equal(row, wanted)


@pytest.mark.parametrize("form, group", [
    pytest.param(*each, marks=[] if each[0] in ("float32", "w8a8") else slow) for each in FORMATS])
def test_the_same_bits_alone_and_in_a_batch(form, group):
    check_bits(checkpoint("gpt-oss"), weight_dtype=form, weight_group_size=group)


# -- formats and files -------------------------------------------------------------------------------------------------
@slow
@pytest.mark.parametrize("form, group, tolerance", [
    ("bfloat16", 0, 0.1), ("int8", 0, 0.15), ("int4", 32, 1.2), ("w8a8", 0, 0.3), ("w4a8", 32, 1.2)])
@pytest.mark.parametrize("name", BOTH)
def test_weight_formats(name, form, group, tolerance):
    """On one rank, and on several with whole rows as groups, because heads are split inside smaller groups. Routers
    stay float32. No rounding changes the prompt's choice of experts.
    """
    prompt = prompt_of(40)
    expected = reference_logits(checkpoint(name), prompt)
    for world in (1, 3):
        size = group if world == 1 else 0
        with Driver(checkpoint(name), world, weight_dtype=form, weight_group_size=size) as driver:
            _, logits = driver.generate(prompt, 1)
        error = np.sqrt(np.mean((logits[0] - expected) ** 2)) / expected.std()
        print(f"{world} ranks: error {error:.3f}")
        assert error < tolerance


@pytest.mark.parametrize("form", ["auto", "w8a8", *(pytest.param(each, marks=slow) for each in (
    "int8", "int4", "w4a8"))])
@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("gpt-oss-bf16", marks=slow),
                                  pytest.param("gpt-oss-plain", marks=slow)])
def test_serialized_and_reloaded(name, form, tmp_path):
    """The same bits from a checkpoint as from its .asgraph and .asparam, on several ranks."""
    options = {} if form == "auto" else {"enable_quant": True, "customized_quant_config": {
        "weight_format": "uint4" if "4" in form else "int8",
        "compute_method": "activate_quant" if form.startswith("w") else "weight_only"}}
    HuggingFaceModel(checkpoint(name), "m").serialize_to_path(None, tmp_path, **options)
    prompt, fields = prompt_of(70), {"weight_dtype": form}
    for world in (1, 2):
        with Driver(checkpoint(name), world, **fields) as a, Driver(tmp_path / "m.asgraph", world) as b:
            np.testing.assert_array_equal(a.generate(prompt, 2)[1], b.generate(prompt, 2)[1])


def test_values_are_those_of_the_checkpoint():
    """Experts that are stored transposed and interleaved; float32 and bfloat16, one thread or two."""
    for name in ("gpt-oss-plain", "gpt-oss-bf16"):
        found, _ = recovered(checkpoint(name), 1)
        stored = open_model(str(checkpoint(name))).source.source
        tensors = {n: stored.get(n) for n in stored.names()}
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            both, down = (np.asarray(tensors[f"{prefix}.{kind}"].data) for kind in ("gate_up_proj", "down_proj"))
            if both.dtype == np.uint16:
                both, down = ((x.astype(np.uint32) << 16).view(np.float32) for x in (both, down))
            gate_up = np.concatenate([both[:, :, 0::2], both[:, :, 1::2]], 2).transpose(0, 2, 1)
            np.testing.assert_array_equal(found[f"{prefix}.gate_proj+up_proj"], gate_up.reshape(-1, gate_up.shape[2]))
            down = down.transpose(0, 2, 1)
            np.testing.assert_array_equal(found[f"{prefix}.down_proj"], down.reshape(-1, down.shape[2]))


# -- MXFP4 -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    return mxfp4_pair(tmp_path_factory.mktemp("mxfp4"))


def test_mxfp4_values_are_those_of_transformers(mxfp4):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, values = mxfp4_tensors()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    theirs = convert_moe_packed_tensors(*(torch.tensor(tensors[f"{name}_{part}"][1]) for part in ("blocks", "scales")))
    np.testing.assert_array_equal(theirs.double().numpy(), values[name])
    expected, _ = recovered(mxfp4[1], 1, weight_dtype="float32")
    for world in (1, 2, 3):  # slices of features; whole experts
        assert_equal(recovered(mxfp4[0], world)[0], expected)
    for dtype in ("mxfp4", "bfloat16"):  # as stored; dequantized
        found = recovered(mxfp4[0], 1, weight_dtype=dtype)[0]
        assert_equal({n: x for n, x in found.items() if "experts" in n},
                     {n: x for n, x in expected.items() if "experts" in n})


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=slow), 3, pytest.param(4, marks=slow)])
def test_mxfp4_logits(mxfp4, world):
    check_prompts(mxfp4[0], world, (1, 129), mxfp4[1])


@slow
def test_mxfp4_logits_of_all_lengths(mxfp4):
    check_prompts(mxfp4[0], 1, PROMPT_LENGTHS, mxfp4[1])


@slow
@pytest.mark.parametrize("world", [1, 3])
def test_mxfp4_greedy_output(mxfp4, world):
    with Driver(mxfp4[0], world) as driver:
        prompt = prompt_of(90, seed=1)
        check_greedy_output(driver.generate(prompt, 256, chunk=48)[0], mxfp4[1], prompt)


def test_mxfp4_has_the_same_bits_alone_and_in_a_batch(mxfp4):
    check_bits(mxfp4[0])


def test_mxfp4_serialized_and_reloaded(mxfp4, tmp_path):
    HuggingFaceModel(mxfp4[0], "m").serialize_to_path(None, tmp_path)
    prompt = prompt_of(70)
    for world in (1, 2, 3):
        with Driver(mxfp4[0], world) as a, Driver(tmp_path / "m.asgraph", world) as b:
            np.testing.assert_array_equal(a.generate(prompt, 2)[1], b.generate(prompt, 2)[1])


def _wrong_scale(tensors):
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1][2, 3, 1] = 255


def _cut_blocks(tensors):
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    tensors[name] = "U8", np.ascontiguousarray(tensors[name][1][:, :-2])


def _no_scales(tensors):
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def _three_dimensions(tensors):
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = "U8", tensors[name][1].reshape(6, 96, -1)


@pytest.mark.parametrize("change, problem", [
    (_wrong_scale, r"down_proj_scales' .*holds scales of expert 2 that are NaN"),
    (_cut_blocks, r"gate_up_proj_blocks' .*has shape \[6, 318, 3, 16\]: expected \[6, 320, 3, 16\]"),
    (_no_scales, r"has no tensor 'model.layers.1.mlp.experts.down_proj_scales'"),
    (_three_dimensions, r"down_proj_blocks' .*expected \[experts, rows, blocks, 16\]"),
])
def test_mxfp4_that_is_refused(mxfp4, change, problem, tmp_path):
    tensors, _ = mxfp4_tensors()
    change(tensors)
    directory = write(tmp_path / "changed", tensors, json.loads((mxfp4[0] / "config.json").read_text()))
    with pytest.raises(AllSparkError, match=problem):
        Driver(directory)


# -- config.json -------------------------------------------------------------------------------------------------------
def changed(tmp_path, change):
    values = json.loads((checkpoint("gpt-oss") / "config.json").read_text())
    change(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_spellings_of_config_json(tmp_path):
    """Names of transformers 4, and values that only the class gives."""
    def older(values):
        rope = values.pop("rope_parameters")
        values.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope, experts_per_token=3,
                      initial_context_length=256)
        del values["layer_types"], values["swiglu_alpha"]

    assert read_config(changed(tmp_path, older)) == read_config(checkpoint("gpt-oss"))

    def bare(values):
        for name in ("rope_parameters", "swiglu_limit", "sliding_window", "head_dim"):
            del values[name]

    found = read_config(changed(tmp_path, bare))
    assert found.swiglu == (1.702, 7.0) and found.windows == (128, 0, 128, 0) and found.head_dim == 64
    rope = found.rope
    assert (rope.type, rope.factor, rope.original_max, rope.theta, rope.truncate) == ("yarn", 32, 4096, 1.5e5, False)


@pytest.mark.parametrize("change, problem", [
    ({"swiglu_limit": 0}, "'swiglu_limit'.* is 0.0: it must be positive"),
    ({"hidden_act": "gelu"}, "'hidden_act'.* is 'gelu': only 'silu' is supported"),
    ({"layer_types": ["chunked_attention"] * 4}, "'layer_types'.*chunked_attention"),
    ({"sliding_window": None}, "'sliding_window'.* is missing"),
    ({"num_experts_per_tok": 11}, "'num_experts_per_tok'.* is 11: it must be positive and at most 10"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'rope_parameters.rope_type'.* is 'longrope'"),
])  # fmt: skip
def test_configs_that_are_refused(change, problem, tmp_path):
    with pytest.raises(AllSparkError, match=problem):
        read_config(changed(tmp_path, lambda values: values.update(change)))


# -- tokenizer.json ----------------------------------------------------------------------------------------------------
# o200k's pattern for splitting a text into words.
_LETTERS = (r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]{}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]{}"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
O200K = "|".join([_LETTERS.format("*", "+"), _LETTERS.format("+", "*"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                  r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
SPECIAL = ["<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|return|>", "<|constrain|>", "<|channel|>",
           "<|start|>", "<|end|>", "<|message|>", "<|call|>"]


def test_the_tokenizer_is_o200k_harmony_s(tmp_path):
    """A small vocabulary in the form of the published tokenizer.json, against tiktoken."""
    tiktoken = pytest.importorskip("tiktoken")
    from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, pre_tokenizers, trainers

    from allspark_server.tokenizer.detokenizer import BYTE_CHARACTERS
    from support.tiny_tokenizer import TRAINING_TEXT

    texts = [*TRAINING_TEXT, "HTTPServer's camelCase, I'LL 1234567 don't\n\n  /path/to\r\n\tx = {}  \n",
             "ひらがな 漢字 한국어 ä é"]
    backend = Backend(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(O200K), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([words, byte_level]), decoders.ByteLevel()
    backend.train_from_iterator(texts * 3, trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    ranks = {bytes(BYTE_CHARACTERS[c] for c in token): i for token, i in backend.get_vocab().items()}
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "eos_token": "<|return|>", "bos_token": "<|startoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    library = tiktoken.Encoding("small", pat_str=O200K, mergeable_ranks=ranks,
                                special_tokens={text: len(ranks) + i for i, text in enumerate(SPECIAL)})
    tokenizer, draw = Tokenizer.from_dir(tmp_path), random.Random(3)
    alphabet = "aB' \n\t/0,{é漢\u0301🙂\r"
    for _ in range(300):
        text = draw.choice(texts)[draw.randrange(30):][:60] + "".join(draw.choices(alphabet, k=draw.randrange(20)))
        text = draw.choice(SPECIAL).join([text, draw.choice(texts)[:20]])
        ids = library.encode(text, allowed_special="all")
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(ids)
    assert tokenizer.mark_id("<|call|>") == len(ranks) + 9 and tokenizer.eos_token_id == len(ranks) + 3

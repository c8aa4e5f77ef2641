"""Embedders, rerankers and other classifiers against transformers, and their properties: the same bits in every batch,
any number of ranks, every weight format. By default only a part runs; -m "slow or not slow" runs all.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_client import AllSparkError, AsModelConfig, AsStatus
from allspark_server import Engine, HuggingFaceModel
from allspark_server.models import read_config
from allspark_server.models.sentence_modules import read_modules
from allspark_server.weights.checkpoint import open_model
from support.checkpoints import checkpoint, prompt_of, reference_logits
from support.driver import Driver
from support.encoders import ALL, CLS, ENCODERS, SEP, add_wordpiece, encoder, expected
from support.tiny_tokenizer import add_tokenizer

LENGTHS = (1, 2, 33, 64, 129, 290)
FIRST = ("bert", "xlm-roberta", "modernbert", "embedding-gemma", "xlm-roberta-reranker")
slow = pytest.mark.slow


def some(names, chosen=FIRST):
    """All names; those that are not chosen are marked slow."""
    return [name if name in chosen else pytest.param(name, marks=slow) for name in names]


def texts(name, lengths=LENGTHS):
    """Random ids; of BERT with its marks, so that some rows are in a second segment."""
    found = [prompt_of(n, seed=7) for n in lengths]
    if name.startswith("bert"):
        for ids in found:
            if len(ids) > 2:
                ids[0], ids[len(ids) // 2], ids[-1] = CLS, SEP, SEP
    return found


def segments(name, ids):
    """The segments of BERT's rows: 1 after the first mark."""
    if not name.startswith("bert"):
        return None
    return [int(SEP in ids[:i]) for i in range(len(ids))]


def driver(name, world=1, **fields):
    return Driver(encoder(name), world, **{"engine_max_batch": 8, "engine_max_length": 300, "max_step_tokens": 1024,
                                           **fields})


def check(name, found, given, tolerance=1e-4):
    wanted = np.array([expected(name, ids, segments(name, ids)) for ids in given])
    assert found.shape == wanted.shape
    worst = np.abs(found - wanted).max() / np.sqrt((wanted ** 2).mean())
    assert worst < tolerance, f"{worst:.1e} of their root mean square"


@pytest.fixture(scope="module", autouse=True)
def tokenizers_of_bert():
    """The mark between segments is the tokenizer's."""
    for name in ALL:
        if name.startswith("bert"):
            add_wordpiece(encoder(name))


@pytest.mark.parametrize("name", ALL)
def test_outputs(name):
    with driver(name) as own:
        given = texts(name)
        check(name, own.outputs(given), given)


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("name", some(ALL))
def test_ranks(name, world):
    with driver(name, min(world, ALL[name].fields["num_attention_heads"])) as own:
        given = texts(name, (2, 65, 290))
        check(name, own.outputs(given), given)


@pytest.mark.parametrize("name", some(ALL))
def test_bits_do_not_depend_on_the_batch(name):
    with driver(name) as own:
        given = texts(name)
        together = own.outputs(given)
        for order in ([5, 3, 1, 0, 2, 4], [5], [4, 0], [2]):
            assert own.outputs([given[i] for i in order]).tobytes() == together[order].tobytes()
    with driver(name, num_threads=1) as own:
        assert own.outputs(given).tobytes() == together.tobytes()


@pytest.mark.parametrize("weights, least", [("bfloat16", 0.999), ("int8", 0.995), ("w8a8", 0.995), ("int4", 0.85),
                                            ("w4a8", 0.85)])
@pytest.mark.parametrize("name", some(ENCODERS, ("xlm-roberta", "modernbert")))
def test_weight_formats(name, weights, least):
    with driver(name, weight_dtype=weights, weight_group_size=32 if "4" in weights else 0) as own:
        given = texts(name, (33, 129, 290))
        for found, ids in zip(own.outputs(given), given):
            wanted = expected(name, ids, segments(name, ids))
            assert found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted) > least


@pytest.mark.parametrize("name", some(ALL, ("xlm-roberta", "bert-classes", "qwen3-reranker")))
def test_serialized_and_reloaded(name, tmp_path):
    """The same bits and the same description from a checkpoint as from its .asgraph and .asparam, on 1 and 2 ranks."""
    directory = shutil.copytree(encoder(name), tmp_path / "source")
    add_wordpiece(directory)
    HuggingFaceModel(directory, "m").serialize_to_path(None, tmp_path)
    given = texts(name, (2, 65, 290))
    for world in (1, 2):
        sizes = {"max_step_tokens": 1024, "engine_max_batch": 3}
        with Driver(directory, world, **sizes) as a, Driver(tmp_path / "m.asgraph", world, **sizes) as b:
            assert a.outputs(given).tobytes() == b.outputs(given).tobytes()
            assert a.info.max_length == b.info.max_length
            for field in ("labels", "score_function", "pooling", "prompts", "embedding_size", "only_pools",
                          "whole_texts"):
                assert getattr(a.info, field) == getattr(b.info, field), field


# -- the description ---------------------------------------------------------------------------------------------------
@pytest.fixture
def copied(tmp_path):
    def copy(name):
        return shutil.copytree(encoder(name), tmp_path / name)
    return copy


def change(path, **fields):
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **fields}))


@pytest.mark.parametrize("name, file, fields, reason", [
    ("bert", "config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type.*'relative_key'"),
    ("bert", "config.json", {"hidden_act": "mish"}, "hidden_act.*'mish': known are gelu"),
    ("xlm-roberta", "config.json", {"pad_token_id": 701}, "pad_token_id.*701: positions begin after it"),
    ("modernbert", "config.json", {"hidden_activation": "relu"}, "hidden_activation.*'relu'"),
    ("gte", "config.json", {"hidden_act": "relu"}, "hidden_act.*'relu': known are gelu, silu"),
    ("gte", "config.json", {"pack_qkv": False}, "pack_qkv.*only True"),
    ("gte", "config.json", {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 0.5}}, "rope_scaling.mixed_b.*set"),
    ("nomic-bert", "config.json", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor.*is 2.0: only None"),
    ("embedding-gemma", "config.json", {"use_bidirectional_attention": False}, "use_bidirectional_attention.*is false"),
    ("bert", "1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode.*'cls\\+max': known are cls"),
    ("bert", "1_Pooling/config.json", {"pooling_mode": "weighted"}, "pooling_mode.*'weighted'"),
    ("bert", "1_Pooling/config.json", {"include_prompt": False}, "include_prompt.*is false"),
    ("xlm-roberta", "2_Dense/config.json", {"activation_function": "my.Code"}, "activation_function.*'Code'"),
    ("bert", "config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name.*query, document"),
])
def test_what_is_not_served_is_refused(copied, name, file, fields, reason):
    directory = copied(name)
    change(directory / file, **fields)
    with pytest.raises(AllSparkError, match=reason):
        open_model(str(directory))
        read_modules(directory)


def test_unknown_modules_are_refused(copied):
    directory = copied("bert")
    (directory / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.CLIPModel"}]))
    with pytest.raises(AllSparkError, match=r"\[0\].type.*CLIPModel"):
        open_model(str(directory))
    (directory / "modules.json").write_text(json.dumps([
        {"type": "sentence_transformers.models.Pooling", "path": "../elsewhere"}]))
    with pytest.raises(AllSparkError, match="path.*expected a folder of the checkpoint"):
        open_model(str(directory))


def test_names_of_other_checkpoints(copied):
    """A base model's tensors may have its name before theirs, and norms TensorFlow's names."""
    from safetensors.numpy import load_file, save_file

    directory = copied("bert")
    tensors = load_file(directory / "model.safetensors")
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        for now, then in ends.items():
            name = name.replace(now, then)
        renamed[f"bert.{name}"] = tensor
    save_file(renamed, directory / "model.safetensors")
    with Driver(directory, 1, engine_max_length=300) as own:
        given = texts("bert", (33,))
        check("bert", own.outputs(given), given)


PUBLISHED = {
    "gte": {"architectures": ["NewModel"], "model_type": "new", "rope_parameters": None, "rope_theta": 20_000,
            "rope_scaling": {"type": "ntk", "factor": 8.0}, "pack_qkv": True, "layer_norm_type": "layer_norm"},
    "nomic-bert": {**dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size",
                                    "max_position_embeddings", "hidden_act", "rope_parameters", "head_dim")),
                   "n_embd": 80, "n_head": 4, "n_layer": 3, "n_inner": 131, "n_positions": 600,
                   "activation_function": "swiglu", "rotary_emb_base": 1000, "layer_norm_epsilon": 1e-12},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_of_published_checkpoints(copied, name):
    """Their config.json is that of their own code, not of transformers; NTK scaling has the rotary embedding that the
    test's checkpoint writes as a linear one (see vLLM's ntk_scaling_rope.py).
    """
    directory = copied(name)
    values = json.loads((directory / "config.json").read_text()) | PUBLISHED[name]
    (directory / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with Driver(directory, 1, engine_max_length=300) as own:
        given = texts(name, (2, 129))
        check(name, own.outputs(given), given)


# -- through an engine -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engine():
    with Engine() as engine:
        yield engine


def installed(engine, name, directory, **fields):
    engine.install_model(AsModelConfig(model_name=name, model_path=str(directory), num_threads=2, **fields))
    engine.start_model(name)
    return name


@pytest.fixture(scope="module")
def bert(engine):
    return installed(engine, "bert", encoder("bert"))


def test_embed(engine, bert):
    given = texts("bert", (300, 1, 33, 64))
    found = engine.embed(bert, given, normalize=False)
    check("bert", found, given)
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(engine.embed(bert, given), found / lengths, rtol=1e-6)
    short = engine.embed(bert, given, dimensions=5)
    np.testing.assert_allclose(short, found[:, :5] / np.linalg.norm(found[:, :5], axis=1, keepdims=True), rtol=1e-5)
    assert engine.embed(bert, []).shape == (0, 72)
    info = engine.get_model_info(bert)
    assert (info.pooling, info.embedding_size, info.only_pools, info.whole_texts) == ("cls", 72, True, True)
    assert info.max_length == 400 and info.prompts == {"query": "query: ", "document": "passage: "}


def test_many_texts_share_steps_and_keep_their_bits(engine, bert):
    rng = np.random.default_rng(1)
    given = [prompt_of(int(n), seed=int(n)) for n in rng.integers(1, 400, 120)]
    found = engine.embed(bert, given)
    for i in (0, 7, 55, 119):
        assert engine.embed(bert, [given[i]])[0].tobytes() == found[i].tobytes()


def test_prompts_by_name(engine, bert):
    plain = engine.embed(bert, "the cat")
    assert plain.tobytes() != engine.embed(bert, "the cat", prompt_name="query").tobytes()
    written = engine.embed(bert, "query: the cat")
    assert written.tobytes() == engine.embed(bert, ["the cat"], prompt_name="query").tobytes()
    assert written.tobytes() == engine.embed(bert, "the cat", prompt="query: ").tobytes()
    with pytest.raises(ValueError, match="prompt_name='other'.*'query', 'document'"):
        engine.embed(bert, "the cat", prompt_name="other")


def test_errors_of_embed(engine, bert):
    with pytest.raises(AllSparkError, match="is an embedder and generates no tokens: set pooling, or call embed"):
        engine.start_request(bert, {"text": "the cat"})
    with pytest.raises(AllSparkError, match="pooling='mean' is not available.*'auto' and 'cls'"):
        engine.embed(bert, "the cat", pooling="mean")
    with pytest.raises(ValueError, match="dimensions=73.*1 to 72"):
        engine.embed(bert, "the cat", dimensions=73)
    with pytest.raises(AllSparkError, match="401 tokens") as error:
        engine.embed(bert, [prompt_of(401)])
    assert error.value.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR
    with pytest.raises(AllSparkError, match="no classifier"):
        engine.classify(bert, "the cat")


def test_truncation_keeps_the_mark_at_the_end(engine, bert):
    long = "the cat sat " * 200
    with pytest.raises(AllSparkError):
        engine.embed(bert, long)
    ids = engine.tokenize(bert, {"text": "the cat sat " * 133})[:399] + [SEP]
    assert engine.embed(bert, long, truncate=True).tobytes() == engine.embed(bert, [ids]).tobytes()
    assert engine.embed(bert, "the cat " * 100_000, truncate=True).tobytes() == engine.embed(
        bert, "the cat " * 300, truncate=True).tobytes()


@pytest.fixture(scope="module")
def reranker(engine, tmp_path_factory):
    directory = shutil.copytree(encoder("xlm-roberta-reranker"), tmp_path_factory.mktemp("reranker") / "m")
    add_wordpiece(directory, 2)
    return installed(engine, "reranker", directory)


def test_rerank(engine, reranker):
    documents = ["the red house", "what is a cat?", "a", "the dog sat", ""]
    found = engine.rerank(reranker, "what is red?", documents)
    for document, score in zip(documents, found):
        ids = engine.tokenize(reranker, {"text": "what is red?", "text_pair": document})
        assert ids[0] == CLS and ids.count(SEP) == 3 and ids[-1] == SEP
        logit = expected("xlm-roberta-reranker", ids)[0]
        assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)
    assert engine.rerank(reranker, "a", []).shape == (0,)
    long = engine.rerank(reranker, "what is red?", ["the dog sat " * 2000, "the"])
    assert 0 < long[0] < 1
    with pytest.raises(AllSparkError, match="1 labels and gives no embeddings: call classify or rerank"):
        engine.embed(reranker, "the cat")


def test_rerank_by_embeddings(engine, bert):
    documents = ["the red house", "what is a cat?"]
    queries = engine.embed(bert, "what is red?", prompt_name="query")
    scores = engine.embed(bert, documents, prompt_name="document") @ queries[0]
    np.testing.assert_allclose(engine.rerank(bert, "what is red?", documents), scores, atol=1e-6)


def test_segments_of_a_pair(engine, tmp_path):
    directory = shutil.copytree(encoder("bert-classes"), tmp_path / "m")
    add_wordpiece(directory)
    name = installed(engine, "pairs", directory)
    ids = engine.tokenize(name, {"text": "the cat", "text_pair": "a dog sat"})
    second = ids.index(SEP) + 1
    logits = expected("bert-classes", ids, [0] * second + [1] * (len(ids) - second))
    found = engine.classify(name, [("the cat", "a dog sat"), "the cat"])
    probabilities = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(found[0], probabilities, atol=1e-5)
    assert engine.get_model_info(name).labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    with pytest.raises(AllSparkError, match="3 labels: a reranker has one"):
        engine.rerank(name, "a", ["b"])
    engine.release_model(name)


@pytest.mark.parametrize("fields, function", [
    ({}, "sigmoid"), ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
    ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity")])
def test_the_scores_are_those_of_sentence_transformers(engine, reranker, copied, fields, function):
    directory = copied("xlm-roberta-reranker")
    add_wordpiece(directory, 2)
    change(directory / "config.json", **fields)
    name = installed(engine, f"scores-{function}", directory)
    assert engine.get_model_info(name).score_function == function
    before = engine.rerank(reranker, "a", ["the cat"])[0]
    wanted = before if function == "sigmoid" else np.log(before / (1 - before))
    assert engine.rerank(name, "a", ["the cat"])[0] == pytest.approx(wanted, rel=1e-4)
    engine.release_model(name)


PAIR_TEMPLATE = """\
{%- set wanted = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
<|im_start|>system
Judge.<|im_end|>
<|im_start|>user
<Instruct>: {{ wanted or "find answers" }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
"""


@pytest.mark.parametrize("name", ["qwen3-tied", "granite"])
def test_a_reranker_by_the_logits_of_two_tokens(engine, tmp_path, name):
    """As Qwen3-Reranker: the probability of yes among yes and no, after a chat template with both texts."""
    directory = shutil.copytree(checkpoint(name), tmp_path / "m")
    add_tokenizer(directory, 400)
    (directory / "modules.json").write_text(json.dumps([
        {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]))
    (directory / "1_LogitScore").mkdir()
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 301, "false_token_id": 17}))
    own = installed(engine, "judge", directory)
    with pytest.raises(AllSparkError, match="chat template with the roles 'query' and 'document'"):
        engine.rerank(own, "what is red?", ["the house"])
    engine.release_model(own)
    (directory / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    (directory / "config_sentence_transformers.json").write_text(json.dumps({
        "prompts": {"web": "find pages"}, "default_prompt_name": "web"}))
    own = installed(engine, "judge", directory)
    documents = ["the house is red", "two three four"]
    found = engine.rerank(own, "what is red?", documents)
    for document, score in zip(documents, found):
        text = PAIR_TEMPLATE[PAIR_TEMPLATE.index("<|im_start|>"):].replace(
            '{{ wanted or "find answers" }}', "find pages")
        for part in ("query", "document"):
            begin = text.index("{{")
            text = text[:begin] + {"query": "what is red?", "document": document}[part] + text[text.index("}}") + 2:]
        ids = engine.tokenize(own, {"text": "what is red?", "text_pair": document})
        assert ids == engine.tokenize(own, {"text": text.rstrip("\n")}, bare=True)
        logits = reference_logits(checkpoint(name), ids)
        assert score == pytest.approx(1 / (1 + np.exp(logits[17] - logits[301])), abs=1e-5)
    assert engine.get_model_info(own).labels == ["relevant"]
    with pytest.raises(AllSparkError, match="a classifier and generates no tokens"):
        engine.start_request(own, {"text": "the"})
    engine.release_model(own)


CARD = """---
license: apache-2.0
pipeline_tag: text-ranking
---
# A reranker
"""


@pytest.mark.parametrize("serialized", [False, True])
def test_qwen3_reranker_as_first_published(engine, tmp_path, serialized):
    """By its model card's formula: the softmax of the last logits of yes and no, after the card's prompt."""
    directory = shutil.copytree(checkpoint("qwen3-tied"), tmp_path / "m")
    add_tokenizer(directory, 400, ("yes", "no", "<think>", "</think>"))
    own = installed(engine, "judge", directory)     # without the card, it generates
    assert not engine.get_model_info(own).only_pools
    engine.release_model(own)
    (directory / "README.md").write_text(CARD)
    if serialized:
        HuggingFaceModel(directory, "s").serialize_to_path(None, tmp_path)
    own = installed(engine, "judge", tmp_path / "s.asgraph" if serialized else directory)
    documents = ["the house is red", "two three four"]
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(directory)
    before = ("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
              'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for document, score in zip(documents, engine.rerank(own, "what is red?", documents)):
        text = ("<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
                f"<Query>: what is red?\n<Document>: {document}")
        ids = [i for part in (before, text, after) for i in tokenizer.encode(part, add_special_tokens=False)]
        logits = reference_logits(checkpoint("qwen3-tied"), ids)
        yes, no = (logits[tokenizer.convert_tokens_to_ids(word)] for word in ("yes", "no"))
        assert score == pytest.approx(np.exp(yes) / (np.exp(yes) + np.exp(no)), abs=1e-5)
    engine.release_model(own)


def test_rerankers_need_the_tokens_of_their_card(tmp_path):
    directory = shutil.copytree(checkpoint("qwen3-tied"), tmp_path / "m")
    add_tokenizer(directory, 400)
    (directory / "README.md").write_text(CARD)
    with pytest.raises(AllSparkError, match="README.md says that the model ranks texts.*no tokens 'yes' and 'no'"):
        read_modules(directory)
    (directory / "README.md").write_text(CARD.replace("text-ranking", "text-generation") + "pipeline_tag: text-ranking")
    assert not read_modules(directory).compared


def test_a_model_on_demand_is_loaded_for_its_texts(engine):
    engine.install_model(AsModelConfig("later", str(encoder("bert")), on_demand=True, num_threads=2))
    engine.start_model("later")
    given = texts("bert", (33,))
    check("bert", engine.embed("later", given, normalize=False), given)
    engine.release_model("later")


def test_what_encoders_do_not_have(engine):
    for field, value in (("speculation", "prompt_lookup"), ("host_cache_memory", 1 << 26)):
        with pytest.raises(AllSparkError, match=f"{field}=.*generates no tokens"):
            installed(engine, "no", encoder("bert"), **{field: value})
    with pytest.raises(AllSparkError, match="max_step_tokens=64.*longest text, 400 tokens"):
        installed(engine, "no", encoder("bert"), max_step_tokens=64)


def test_a_model_that_generates_embeds_with_its_checkpoints_pooling(engine, tmp_path):
    directory = shutil.copytree(checkpoint("qwen3-tied"), tmp_path / "m")
    name = installed(engine, "qwen", directory)
    assert engine.get_model_info(name).pooling == "last"
    ids = prompt_of(33)
    assert engine.embed(name, [ids]).tobytes() == engine.embed(name, [ids], pooling="last").tobytes()
    with pytest.raises(AllSparkError, match="pooling='cls' is not available.*'auto', 'last' and 'mean'"):
        engine.embed(name, [ids], pooling="cls")
    engine.release_model(name)


def test_positions_after_the_padding(engine):
    assert read_config(encoder("xlm-roberta")).max_position_embeddings == 700

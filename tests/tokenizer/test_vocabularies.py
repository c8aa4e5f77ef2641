"""Tokenizers of tiktoken and sentencepiece files: ids and texts equal those of the two libraries."""

from __future__ import annotations

import base64
import io
import json
import random
import unicodedata

import pytest

tiktoken = pytest.importorskip("tiktoken")
sentencepiece = pytest.importorskip("sentencepiece")

from allspark_client.errors import AllSparkError
from allspark_server.guided.grammar import Guide
from allspark_server.tokenizer.tokenizer import Tokenizer
from allspark_server.weights.checkpoint import _tokenizer
from support.tiny_tokenizer import TRAINING_TEXT

TEXT = [*TRAINING_TEXT, "def f(x):\n    return x ** 2  # squared\n\n\n" * 3, "ひらがな カタカナ 漢字 한국어 العربية",
        "3.14159 1,000,000 2024-05-06 0xff", "'s 're I'll WE'VE don't"] * 3
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")


def texts(count=400, seed=0):
    """Parts of the training text, characters of all kinds, and runs of one character."""
    rng = random.Random(seed)
    alphabet = "ab c\n\t0123 .,!?=-'’éß你好世界の한🙂\u0301\u200b\x00\r\\<>|"
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 6)):
            kind = rng.randrange(3)
            if kind == 0:
                one = rng.choice(TEXT)
                at = rng.randrange(len(one))
                parts.append(one[at : at + rng.randrange(30)])
            elif kind == 1:
                parts.append("".join(rng.choices(alphabet, k=rng.randrange(12))))
            else:
                parts.append(rng.choice(alphabet) * rng.randrange(40))
        yield "".join(parts)


@pytest.fixture(scope="module")
def ranks():
    """The ranks of tiktoken: bytes first, then tokens in the order of their merges."""
    from tokenizers import Tokenizer as Backend, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(TEXT + ["    " * 9, "=" * 40, "aaaaaaaaaaaaaaa"] * 4, trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    from allspark_server.tokenizer.detokenizer import BYTE_CHARACTERS

    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    return {bytes(BYTE_CHARACTERS[c] for c in token): i for i, (token, _) in enumerate(vocab)}


def write_ranks(path, ranks):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))


def write_json(path, **values):
    path.write_text(json.dumps(values))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory, ranks):
    directory = tmp_path_factory.mktemp("qwen")
    write_ranks(directory / "qwen.tiktoken", ranks)
    write_json(directory / "tokenizer_config.json", tokenizer_class="QWenTokenizer", model_max_length=8192)
    write_json(directory / "generation_config.json", chat_format="chatml", eos_token_id=len(ranks))
    return directory


GLM4_SPECIAL = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
                "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"]


@pytest.fixture(scope="module")
def glm4(tmp_path_factory, ranks):
    directory = tmp_path_factory.mktemp("glm4")
    write_ranks(directory / "tokenizer.model", ranks)
    added = {str(len(ranks) + i): {"content": text, "special": True} for i, text in enumerate(GLM4_SPECIAL)}
    write_json(directory / "tokenizer_config.json", tokenizer_class="ChatGLM4Tokenizer", added_tokens_decoder=added,
               chat_template="[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}")
    return directory


def check(tokenizer, encode, decode, prepare=lambda text: text):
    for text in texts():
        ids = encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        assert tokenizer.decode(ids) == decode(ids), repr(text)


# -- tiktoken ----------------------------------------------------------------------------------------------------------
def test_qwen_has_the_ids_of_tiktoken(qwen, ranks):
    special = {"<|endoftext|>": len(ranks), "<|im_start|>": len(ranks) + 1, "<|im_end|>": len(ranks) + 2}
    library = tiktoken.Encoding("qwen", pat_str=WORDS % "", mergeable_ranks=ranks, special_tokens=special)
    tokenizer = Tokenizer.from_dir(qwen)
    check(tokenizer, lambda text: library.encode(unicodedata.normalize("NFC", text), disallowed_special=()),
          library.decode)
    assert tokenizer.encode("<|im_start|>user\nx<|im_end|>") == library.encode(
        "<|im_start|>user\nx<|im_end|>", allowed_special="all")
    assert tokenizer.vocab_size == len(ranks) + 208 and tokenizer.mark_id("<|extra_204|>") == len(ranks) + 207


def test_qwen_chats_in_chatml(qwen):
    tokenizer = Tokenizer.from_dir(qwen)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "?"}]
    assert tokenizer.apply_chat_template(chat) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")
    system = [{"role": "system", "content": "S"}, chat[0]]
    first = tokenizer.vocab_size - 208
    assert tokenizer.stop_ids == [first + 2, first + 1]
    assert tokenizer.apply_chat_template(system).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi")


def test_glm4_has_the_ids_of_tiktoken(glm4, ranks):
    special = {text: len(ranks) + i for i, text in enumerate(GLM4_SPECIAL)}
    library = tiktoken.Encoding("glm4", pat_str=WORDS % "{1,3}", mergeable_ranks=ranks, special_tokens=special)
    tokenizer = Tokenizer.from_dir(glm4)
    check(tokenizer, lambda text: library.encode(text, disallowed_special=()), library.decode)
    prefix = [special["[gMASK]"], special["<sop>"]]
    assert tokenizer.encode("one") == [*prefix, *library.encode("one")]
    assert tokenizer.encode_chat([{"role": "user", "content": "one"}]) == [
        *prefix, special["<|user|>"], *library.encode("\none")]


# -- sentencepiece -----------------------------------------------------------------------------------------------------
def train(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, model_type="bpe", byte_fallback=True, minloglevel=2,
        **{"vocab_size": 560, "split_digits": True, "allow_whitespace_only_pieces": True, "character_coverage": 0.98,
           "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "max_sentence_length": 10000,
           **options})
    return model.getvalue()


@pytest.mark.parametrize("options", [
    {}, {"add_dummy_prefix": False, "user_defined_symbols": ["<reserved_1>", "<reserved_2>", "===="]},
    {"normalization_rule_name": "nmt_nfkc"}, {"remove_extra_whitespaces": True},
], ids=["plain", "no prefix", "nfkc", "blanks"])  # fmt: skip
@pytest.mark.parametrize("kind", ["ChatGLMTokenizer", "BaichuanTokenizer"])
def test_the_ids_of_sentencepiece(kind, options, tmp_path):
    data = train(**options)
    (tmp_path / "tokenizer.model").write_bytes(data)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class=kind, add_bos_token=False)
    library, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=data), Tokenizer.from_dir(tmp_path)
    for text in texts():
        if "normalization_rule_name" in options and ("\u0301" in text or "\r" in text):
            continue  # `tokenizers` normalizes a character with all of its marks, and "\r\n", as one
        ids = library.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        assert tokenizer.decode(ids) == library.decode(ids), repr(text)
    for symbol in options.get("user_defined_symbols", ()):
        text = f"one{symbol}two {symbol}"
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text)


def test_chatglm_puts_its_prefix_and_roles(tmp_path):
    data = train()
    (tmp_path / "tokenizer.model").write_bytes(data)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class="ChatGLMTokenizer")
    library, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=data), Tokenizer.from_dir(tmp_path)
    first = library.vocab_size()
    mask, sop, user, assistant = first + 1, first + 3, first + 6, first + 7
    assert tokenizer.encode("one two") == [mask, sop, *library.encode("one two")]
    assert tokenizer.encode_chat([{"role": "user", "content": "one"}]) == [
        mask, sop, user, *library.encode("\n"), *library.encode("one"), assistant]
    assert tokenizer.stop_ids == [user, assistant + 1]


def test_baichuan_chats_with_its_reserved_tokens(tmp_path):
    data = train(add_dummy_prefix=False, user_defined_symbols=["<reserved_106>", "<reserved_107>"])
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    user, assistant = library.piece_to_id("<reserved_106>"), library.piece_to_id("<reserved_107>")
    (tmp_path / "tokenizer.model").write_bytes(data)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class="BaichuanTokenizer", bos_token={"content": "<s>"})
    assert "default" not in Tokenizer.from_dir(tmp_path).chat_templates
    write_json(tmp_path / "generation_config.json", user_token_id=user, assistant_token_id=assistant)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("one") == [library.bos_id(), *library.encode("one")]
    chat = [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}]
    assert tokenizer.encode_chat(chat) == [*library.encode("one"), user, *library.encode("two"), assistant]


# -- what else needs a tokenizer ---------------------------------------------------------------------------------------
def test_guided_output_has_the_vocabulary(qwen):
    guide = Guide.from_dir(str(qwen), 1200, [10])
    try:
        grammar = guide.compile({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}})
        assert grammar is not None
    finally:
        guide.close()


def test_only_known_classes_are_tokenizers(qwen, tmp_path):
    assert _tokenizer(qwen) == str(qwen)
    (tmp_path / "qwen.tiktoken").write_bytes((qwen / "qwen.tiktoken").read_bytes())
    assert _tokenizer(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="the vocabulary of one of these classes: QWenTokenizer, ChatGLM"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("data, problem", [
    (b"IQ== 0\nxx 1\n", "line 2 of .*tokenizer.model is not a token in base64 with its rank"),
    (b"IQ== 0\nIg== x\n", "line 2 of .* is not a token"), (b"IQ== 0\n", "lacks a token for some byte values"),
    (b"IQ== 0\nIg== 0\n", "ranks that are not different numbers"),
    (b"\xff\xff\xff\xff", "is neither a sentencepiece model nor tiktoken's ranks"),
    (b"", "not a sentencepiece model of 1 to"),
    (b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256))
     + base64.b64encode(b"a" * 2000) + b" 256\n",
     "a token of 2000 bytes"),
])
def test_damaged_files(data, problem, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(data)
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class="ChatGLM4Tokenizer")
    with pytest.raises((ValueError, AllSparkError), match=problem):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("added", [{"x": {"content": "<a>"}}, {"5": {"content": 3}}, {"99999999": {"content": "<a>"}}])
def test_damaged_lists_of_added_tokens(added, qwen, tmp_path):
    (tmp_path / "qwen.tiktoken").write_bytes((qwen / "qwen.tiktoken").read_bytes())
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class="QWenTokenizer", added_tokens_decoder=added)
    with pytest.raises(ValueError, match="added_tokens_decoder of .*tokenizer_config.json holds .*: expected an id"):
        Tokenizer.from_dir(tmp_path)


def test_a_unigram_model_is_refused(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=model, vocab_size=200,
                                             model_type="unigram", minloglevel=2, hard_vocab_limit=False)
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    write_json(tmp_path / "tokenizer_config.json", tokenizer_class="BaichuanTokenizer")
    with pytest.raises(ValueError, match="is not a sentencepiece model of kind BPE"):
        Tokenizer.from_dir(tmp_path)


def test_served_as_text_and_serialized(qwen, tmp_path, engine_of):
    """An engine takes text and chats with such a checkpoint, and with its serialized form."""
    pytest.importorskip("torch")
    from allspark_client import AsModelConfig
    from allspark_server import HuggingFaceModel
    from support.published import PUBLISHED, write

    directory = write(tmp_path / "m", {**PUBLISHED["qwen"]})
    for file in qwen.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    model = HuggingFaceModel(directory, "m").serialize_to_path(None, tmp_path)
    assert model.get_tokenizer().encode("one")
    found = []
    engine = engine_of("engine")
    for name, path in (("qwen-a", directory), ("qwen-b", tmp_path / "m.asgraph")):
        engine.install_model(AsModelConfig(model_name=name, model_path=str(path), num_threads=1, engine_max_length=128,
                                           engine_max_batch=2))
        engine.start_model(name)
        assert len(engine.get_model_info(name).eos_token_ids) == 3
        answer = engine.start_request(name, {"text": "one two"}, {"max_new_tokens": 5, "do_sample": False})[2]
        found.append([i for elements in answer for i in elements.ids_from_generate])
        engine.release_model(name)
    assert found[0] == found[1] and found[0]

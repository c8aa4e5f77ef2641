"""Tokenizers, chat templates (against transformers) and streaming detokenization (against decoding all at once)."""

import json
import threading
import time
from datetime import datetime

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from allspark_server.limited_process import LimitedProcess
from allspark_server.tokenizer import templates
from allspark_server.tokenizer.tokenizer import Tokenizer
from support.seed import SEED
from support.waiting import wait_for

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, don't you think? It's 12,345 o'clock.",
    "  Two leading spaces, a tab\tand\nnew lines\n\n   and trailing ones   ",
    "Ünïcode: naïve café, Straße, 你好世界, こんにちは, 안녕하세요, привет, مرحبا, שלום, नमस्ते",
    "emoji 👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ and combining e\u0301 a\u0308\u0323 n\u0303; zero\u200bwidth; \ufffd itself",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}  # comment\n",
] * 4


@pytest.fixture(params=[SEED], ids=lambda s: f"seed{s}")
def rng(request):
    return np.random.default_rng(request.param)


# ---- tokenizers of the kinds that checkpoints have ----------------------------------------------------------


def byte_level():
    t = tokenizers.Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    t.add_tokens(["<tool call>", "é!"])
    return t


def llama2():
    """BPE with byte fallback and the decoder of Llama 2 and Mistral."""
    t = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    t.train_from_iterator(
        [line for line in CORPUS if line.isascii()],
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *SPECIAL, *byte_tokens], show_progress=False),
    )
    # The byte tokens must be ordinary ones of the model, not special added ones.
    state = json.loads(t.to_str())
    state["added_tokens"] = [a for a in state["added_tokens"] if a["content"] not in byte_tokens]
    t = tokenizers.Tokenizer.from_str(json.dumps(state))
    t.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return t


def gemma():
    t = llama2()
    t.normalizer = normalizers.Replace(" ", "▁")
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return t


def unigram():
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    t = tokenizers.Tokenizer(models.Unigram())
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.train_from_iterator(
        [line for line in CORPUS if line.isascii()],
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
        ),
    )
    state = json.loads(t.to_str())
    state["model"]["vocab"] += [[b, -20.0] for b in byte_tokens]
    state["model"]["byte_fallback"] = True
    t = tokenizers.Tokenizer.from_str(json.dumps(state))
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return t


def word_level():
    """A tokenizer without a decoder: ids are joined by spaces."""
    t = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIAL], show_progress=False))
    return t


def word_piece():
    """A decoder without a streaming form."""
    t = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.decoder = decoders.WordPiece(cleanup=False)
    t.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    )
    return t


KINDS = [byte_level, llama2, gemma, unigram, word_level, word_piece]
LOSSLESS = {byte_level, llama2, gemma}


@pytest.fixture(scope="module", params=KINDS, ids=lambda f: f.__name__)
def kind(request):
    return request.param, Tokenizer(request.param())


def random_text(rng):
    ranges = [
        (0x20, 0x7F),
        (0x20, 0x7F),
        (0xA0, 0x250),
        (0x300, 0x370),
        (0x400, 0x500),
        (0x900, 0x980),
        (0x4E00, 0x9FFF),
        (0x1F300, 0x1FAFF),
        (0x200B, 0x2010),
        (0xFE00, 0xFE10),
        (0xE000, 0xE010),
        (0xFFF0, 0xFFFE),
    ]
    out = []
    for _ in range(int(rng.integers(1, 12))):
        low, high = ranges[rng.integers(len(ranges))]
        out += [chr(c) for c in rng.integers(low, high, int(rng.integers(1, 8)))] + [" "] * int(rng.integers(0, 3))
    return "".join(out)


def stream(tokenizer, ids, rng, skip=True):
    """Texts of ids that are pushed in random portions; each must consist of whole characters."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = []
    at = 0
    while at < len(ids):
        step = int(rng.integers(0, 3))
        pieces.append(detokenizer.push(ids[at : at + step]))
        at += step
    pieces.append(detokenizer.finish())
    for piece in pieces:
        piece.encode("utf-8")  # no halves of surrogate pairs
    return pieces


# ---- streaming ----------------------------------------------------------------------------------------------


def test_stream_of_text_is_decode(kind, rng):
    make, tokenizer = kind
    for text in CORPUS + [random_text(rng) for _ in range(300)]:
        ids = tokenizer.encode(text)
        want = tokenizer.backend.decode(ids)
        assert tokenizer.decode(ids) == want
        pieces = stream(tokenizer, ids, rng)
        assert "".join(pieces) == want
        if make in LOSSLESS:
            assert want == text
            if "\ufffd" not in text:
                assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("skip", [True, False])
def test_stream_of_random_ids_is_decode(kind, rng, skip):
    """Random ids give bytes that are no characters, special tokens and unknown ids."""
    make, tokenizer = kind
    if make is word_piece:
        pytest.skip("decodes a window again: exact for text, not for arbitrary ids")
    size = tokenizer.vocab_size
    for _ in range(300):
        ids = [int(i) for i in rng.integers(0, size + 3, int(rng.integers(0, 60)))]
        want = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip) == want
        assert "".join(stream(tokenizer, ids, rng, skip)) == want


@pytest.mark.parametrize("make", [byte_level, llama2, gemma, unigram])
def test_invalid_bytes(make, rng):
    tokenizer = Tokenizer(make())
    if make is byte_level:
        alphabet = {b: c for c, b in decoders_alphabet().items()}
        byte_ids = [tokenizer.backend.token_to_id(alphabet[b]) for b in range(256)]
    else:
        byte_ids = [tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in range(256)]
    texts = "é", "你", "👍", "e\u0301", "👩‍👧", "x", "\x00"
    broken = b"\xff", b"\xc3", b"\xe4\xbd", b"\xf0\x9f\x91", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\x80"
    for _ in range(300):
        data = b""
        while len(data) < 40:
            data += (
                broken[rng.integers(len(broken))] if rng.random() < 0.3 else texts[rng.integers(len(texts))].encode()
            )
        ids = [byte_ids[b] for b in data]
        want = tokenizer.backend.decode(ids)
        assert tokenizer.decode(ids) == want
        assert "".join(stream(tokenizer, ids, rng)) == want


def decoders_alphabet():
    """The byte of each character of the byte-level alphabet, found by asking the decoder."""
    decoder = decoders.ByteLevel()
    out = {}
    for c in pre_tokenizers.ByteLevel.alphabet():
        # Two-byte sequences make the high bytes visible.
        for prefix, base in (("", 0), ("Â", 0), ("Ã", 64)):
            text = decoder.decode([prefix + c])
            if len(text) == 1 and text != "\ufffd":
                out[c] = ord(text) - base if prefix else ord(text)
                break
    taken = set(out.values())
    left = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(out), key=ord)
    # Bytes 0xC0...0xFF spell themselves.
    out.update({c: ord(c) for c in left})
    assert sorted(out.values()) == list(range(256)) and not taken & {ord(c) for c in left}
    return out


def test_characters_come_as_soon_as_they_are_whole():
    tokenizer = Tokenizer(byte_level())
    detokenizer = tokenizer.detokenizer()
    for c in "ab 👍你é":
        ids = tokenizer.encode(c)
        assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + [c]
    assert detokenizer.finish() == ""
    half = tokenizer.encode("👍")[:-1]
    assert detokenizer.push(half) == "" and detokenizer.finish() == "\ufffd"
    assert detokenizer.push(tokenizer.encode("new")) + detokenizer.finish() == "new"


def test_long_runs_of_byte_tokens_flow():
    tokenizer = Tokenizer(llama2())
    text = "བཀྲ་ཤིས་བདེ་ལེགས་" * 20
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    waiting, worst, out = 0, 0, ""
    for i in ids:
        piece = detokenizer.push([i])
        out += piece
        waiting = 0 if piece else waiting + 1
        worst = max(worst, waiting)
    assert out + detokenizer.finish() == text and worst <= 64 + 3


def test_leading_space_and_special_tokens():
    tokenizer = Tokenizer(llama2())
    ids = tokenizer.encode("Hello there")
    assert tokenizer.backend.id_to_token(ids[0]) == "<s>"
    assert tokenizer.decode(ids) == "Hello there"
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.encode("Hello there", add_special_tokens=False) == ids[1:]
    eos = tokenizer.backend.token_to_id("</s>")
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push([*ids, eos]) + detokenizer.finish() == "Hello there"


def test_bytes_of_tokens():
    from allspark_server.tokenizer.detokenizer import token_bytes

    llama = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    assert [token_bytes(llama, t) for t in ("▁the", "<0xE4>", "ü")] == [b" the", b"\xe4", "ü".encode()]
    assert token_bytes({"type": "ByteLevel"}, "Ġthe") == b" the"
    assert token_bytes({"type": "ByteLevel"}, "你") == "你".encode()  # an added token, in plain text
    assert token_bytes({"type": "Metaspace", "replacement": "▁"}, "▁a") == b" a"
    assert token_bytes(None, "a") == b"a"


def test_time_per_token_does_not_grow():
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode(CORPUS[0]) * 400
    detokenizer = tokenizer.detokenizer()

    def spent(part):
        start = time.perf_counter()
        for i in part:
            detokenizer.push([i])
        return time.perf_counter() - start

    half = len(ids) // 2
    spent(ids[:1000])
    first, second = min(spent(ids[:half]) for _ in range(3)), min(spent(ids[half:]) for _ in range(3))
    assert second < 5 * first + 0.05


# ---- directories --------------------------------------------------------------------------------------------


def save(path, make=byte_level, **config):
    path.mkdir(exist_ok=True)
    make().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_from_dir(tmp_path):
    path = save(
        tmp_path,
        bos_token={"content": "<s>", "special": True},
        eos_token="</s>",
        add_bos_token=False,
        chat_template="A",
    )
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_id == tokenizer.backend.token_to_id("</s>") and tokenizer.bos_token_id == 0
    assert tokenizer.vocab_size == max(tokenizer.backend.get_vocab().values()) + 1
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "A"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "B"}))
    assert Tokenizer.from_dir(path).apply_chat_template(messages) == "B"
    (path / "chat_template.jinja").write_text("C")
    assert Tokenizer.from_dir(str(path)).apply_chat_template(messages) == "C"
    (path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_dir(path).eos_token_id is None


def test_truncation_and_padding_are_off(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.from_dir(tmp_path).encode("x" * 40)
    assert Tokenizer.from_dir(tmp_path).decode(ids) == "x" * 40


def test_named_templates(tmp_path):
    path = save(
        tmp_path,
        chat_template=[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools[0].name }}"}],
    )
    tokenizer = Tokenizer.from_dir(path)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "Tf"


def test_errors_name_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.from_dir(tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is not valid JSON"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold an object"):
        Tokenizer.from_dir(tmp_path)
    good = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_dir(save(tmp_path)).apply_chat_template(good)
    with pytest.raises(ValueError, match="line 2"):
        Tokenizer.from_dir(save(tmp_path, chat_template="x\n{% if %}")).apply_chat_template(good)
    tokenizer = Tokenizer.from_dir(
        save(tmp_path, chat_template="{% if messages[0].role == 'x' %}{{ raise_exception('no x here') }}{% endif %}")
    )
    with pytest.raises(ValueError, match="no x here"):
        tokenizer.apply_chat_template([{"role": "x", "content": ""}])
    for messages, match in [
        ("hi", "list"),
        ([], "empty"),
        ({}, "list"),
        (["hi"], "message 0"),
        ([{"content": "hi"}], "role"),
        ([good[0], {"role": "user", "content": 3}], "message 1"),
        ([{"role": 1, "content": "x"}], "role"),
    ]:
        with pytest.raises(ValueError, match=match):
            tokenizer.apply_chat_template(messages)
    with pytest.raises(ValueError, match="tools"):
        tokenizer.apply_chat_template(good, tools=[print])
    with pytest.raises(TypeError, match="must be str"):
        tokenizer.encode(b"bytes")
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800")
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(ValueError, match="refused|failed"):
            Tokenizer(byte_level(), {}, {"default": attack + "{{ x.y.z }}"}).apply_chat_template(good)


def test_chats_do_not_wait_for_one_that_takes_long(monkeypatch):
    """Rendering starts no thread, and sends a template once to each process, however often it is used."""
    monkeypatch.setattr(threading, "Timer", None)
    slow = "{% for i in range(4000) %}{% for j in range(4000) %}{% endfor %}{% endfor %}"
    renderer = templates.Renderer()
    other = threading.Thread(target=renderer.render, args=(slow, {}))
    try:
        renderer.start()
        sent, ask = [], LimitedProcess.ask
        monkeypatch.setattr(LimitedProcess, "ask", lambda self, data: (sent.append(len(data[0])), ask(self, data))[1])
        long = "{{ x }}" + "{# a comment #}" * 10_000
        assert [renderer.render(long, {"x": i}) for i in range(3)] == ["0", "1", "2"]
        assert sent[0] > len(long) and max(sent[1:]) < 100
        other.start()
        wait_for(lambda: not renderer._pool._idle, 5)
        assert renderer.render(long, {"x": 5}) == "5" and other.is_alive()
        for i in range(templates.KNOWN_TEMPLATES + 5):     # more than a process keeps
            assert renderer.render(f"{i}{{{{ x }}}}", {"x": 0}) == f"{i}0"
        assert renderer.render(long, {"x": 6}) == "6"
        text = "\u00e9" * 300_000                          # more than a pipe holds, both ways
        assert renderer.render(long, {"x": text}) == text
    finally:
        other.join()
        renderer.close()


# ---- chat templates as transformers renders them ------------------------------------------------------------

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "Tools:" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.content is string %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- for part in message.content or [] %}{{ part.text | default('[' ~ part.type ~ ']') }}{% endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content ~ message.thinking }}</think>{% endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' ~ call.function.name ~ ' ' }}
        {{- (call.function.arguments | tojson(indent=2)) ~ '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
last user {{ ns.last }}
"""

LLAMA3 = """{{- bos_token }}
{%- if custom is defined %}
    {%- set extra = custom %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- eos_token }}
{% for message in messages %}
    {% if message.role == 'tool' %}
    {{ "tool: " + message.content | tojson }}
        {% continue %}
    {% endif %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
{{- (message['content'] or '') | trim + eos_token }}
    {% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{% endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}
{{ message['content'] + eos_token}}
{% endgeneration %}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}
   trailing <&> {{ "ünï<'&>" | tojson }}
{{ {'b': 1, 'a': [none, true, 1.5]} | tojson(sort_keys=true, separators=(',', ':')) }}
"""

CHATS = [
    [{"role": "user", "content": "Hi there"}],
    [{"role": "system", "content": " Be brief. \n"}, {"role": "user", "content": "  1 < 2 & 'so' \"on\" 你好 👍🏽 "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "{{ c }}"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}] * 4,
    [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]}],
    [
        {"role": "user", "content": "w"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": [1, 2], "city": "Köln"}}}],
        },
        {"role": "tool", "content": "12 °C"},
    ],
]
REASONED = 5  # the chat with reasoning, and with a content that is None
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "Größe & <x>", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    path = save(tmp_path_factory.mktemp("reference"), bos_token="<s>", eos_token="</s>")
    return path, transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL], ids=["chatml", "llama3", "mistral"])
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_chat_template_as_transformers(reference, template, chat, prompt, tools):
    import transformers

    if chat == REASONED and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("older versions, the newest for Python 3.10 too, show templates other fields of reasoning")
    path, theirs = reference
    theirs.chat_template = template
    (path / "chat_template.jinja").write_text(template)
    ours = Tokenizer.from_dir(path)
    for extra in ({}, {"enable_thinking": False, "custom": [1], "date_string": "26 Jul 2024"}):
        try:
            want = theirs.apply_chat_template(
                CHATS[chat], tools=tools, add_generation_prompt=prompt, tokenize=False, **extra
            )
        except Exception as error:
            with pytest.raises(ValueError) as caught:
                ours.apply_chat_template(CHATS[chat], prompt, tools, **extra)
            assert str(error).split("\n")[0] in str(caught.value)
            continue
        assert ours.apply_chat_template(CHATS[chat], prompt, tools, **extra) == want
        if prompt and tools is None and not extra:
            assert ours.encode_chat(CHATS[chat]) == theirs(want, add_special_tokens=False)["input_ids"]


def test_strftime_now():
    tokenizer = Tokenizer(byte_level(), {}, {"default": "{{ strftime_now('%Y') }}"})
    assert tokenizer.apply_chat_template(CHATS[0]) == str(datetime.now().year)

"""Constrained decoding: formats, grammars, matchers, and the process that tries grammars out."""

from __future__ import annotations

import json
import threading
import time

import jsonschema
import pytest

from allspark_client.types import VocabType
from allspark_server.guided import Guide, MatcherError, checker
from allspark_server.guided.checker import Checker, TooCostly
from allspark_server.guided.vocabulary import token_bytes
from allspark_server.tokenizer.tokenizer import Tokenizer
from support.grammars import EOS, FABLE, VOCAB, allowed, walk

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12},
                   "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}, **more}


@pytest.fixture(scope="module")
def guide():
    guide = Guide((FABLE / "tokenizer.json").read_text(), VOCAB, [EOS])
    yield guide
    guide.close()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(FABLE)


def test_masks_give_what_the_schema_says(guide, tokenizer):
    grammar = guide.compile(schema_format(PERSON, disable_any_whitespace=True))
    for seed in range(20):
        text = tokenizer.decode(walk(grammar.matcher([EOS]), seed))
        jsonschema.validate(json.loads(text), PERSON)
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) or "\\" in text


@pytest.mark.parametrize("form, texts, others", [
    ({"type": "choice", "choice": ["yes", "no", 'a "quoted"\n\u00e9\U0001f600', ""]},
     ["yes", 'a "quoted"\n\u00e9\U0001f600', ""], ["maybe", "yess"]),
    ({"type": "regex", "regex": "[a-c]{2}|[0-9]+"}, ["ab", "1234"], ["abc", "a", "12a"]),
    ({"type": "grammar", "grammar": 'start: "a" NUMBER+\nNUMBER: /[0-9]/'}, ["a1", "a12"], ["a", "b1"]),
    ({"type": "grammar", "syntax": "ebnf", "grammar": 'root ::= "x" [0-9]+ | root "y"'}, ["x1", "x12yy"], ["y", "x"]),
    ({"type": "json_object"}, ["{}", '{ "a": [1, null] }'], ["[]", "1", "{"]),
    ({"type": "json_object", "disable_any_whitespace": True}, ['{"a":[1,null]}'], ['{"a": 1}']),
    (schema_format({"const": 5}), ["5"], ["6"]),
    ({"type": "json_schema", "json_schema": json.dumps(PERSON)}, ['{"name": "x", "age": 5}'], ["{}"]),
    ({"type": "json_schema", "json_schema": PERSON}, ['{"name": "x", "age": 5}'], ["{}"]),
    ({"type": "json_schema", "json_schema": {"strict": False, "schema": {"type": "object", "not": {}}}}, ["{}"], ["1"]),
])
def test_formats(guide, tokenizer, form, texts, others):
    grammar = guide.compile(form)
    for text in texts:
        assert grammar.matcher([EOS], tokenizer.encode(text)).may_stop, text
    for text in others:
        try:
            assert not grammar.matcher([EOS], tokenizer.encode(text)).may_stop, text
        except MatcherError:
            pass


@pytest.mark.parametrize("form, error", [
    (schema_format({"type": "strin"}), r"response_format\.json_schema: .*strin"),
    (schema_format({"type": "object", "not": {}}), r"response_format\.json_schema: .*not"),
    (schema_format(False), r"response_format\.json_schema: .*nsatisfiable"),
    (schema_format({"$ref": "http://example.com/x"}), r"response_format\.json_schema"),
    ({"type": "regex", "regex": "("}, r"response_format\.regex: .*unclosed group"),
    ({"type": "regex", "regex": "(?=a)b"}, r"response_format\.regex: .*look-around"),
    ({"type": "grammar", "grammar": "start: foo"}, r"response_format\.grammar: .*unknown name"),
    ({"type": "grammar", "syntax": "ebnf", "grammar": "root ::= [a"}, r"response_format\.grammar: .*line 1"),
    ({"type": "grammar", "grammar": "start: <|nothing|>"}, r"response_format\.grammar: .*special token"),
])
def test_what_cannot_be_compiled_says_why(guide, form, error):
    for _ in range(2):  # the second answer comes from the cache
        with pytest.raises(ValueError, match="(?s)" + error):
            guide.compile(form)


def hostile():
    yield "regex repetition", {"type": "regex", "regex": "((a{1000}){1000}){1000}"}
    yield "long repetition", {"type": "regex", "regex": "a{100000000}"}
    yield "intersection", {"type": "grammar", "grammar":
                           "start: X\nX: " + " & ".join(f"/(.|\\n)*a.{{{i}}}(.|\\n)*/" for i in range(40))}
    rules = "\n".join(f'r{i}: r{i + 1} "a"| r{i + 2}' for i in range(18000)).replace("r0:", "start:", 1)
    yield "recursion", {"type": "grammar", "grammar": rules + '\nr18000: "x"\nr18001: "y"'}
    yield "all of", schema_format({"allOf": [{"type": "string", "pattern": f"^(a|b)*.{{{i}}}a.*$"} for i in range(99)]})
    yield "multiples", schema_format({"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949)]})
    yield "parentheses", {"type": "regex", "regex": "(" * 200_000 + "a" + ")" * 200_000}
    yield "itself", schema_format({"$ref": "#"})
    yield "size", {"type": "choice", "choice": ["x" * 100] * 10_000}
    yield "deep", schema_format(json.loads('{"items":' * 200 + "{}" + "}" * 200))
    yield "bytes", {"type": "regex", "regex": "\ud800"}


@pytest.mark.parametrize("form", [pytest.param(form, id=name) for name, form in hostile()])
def test_hostile_ones_are_refused_soon(guide, form):
    guide.compile({"type": "json_object"})  # the process runs
    began = time.monotonic()
    with pytest.raises(ValueError, match="response_format"):
        guide.compile(form)
    assert time.monotonic() - began < 5.0   # 0.6 s of a processor, which other tests use, too
    assert guide.compile({"type": "regex", "regex": f"ok{began}"})  # it did no harm


def test_nobody_waits_for_a_hostile_one(guide):
    hostile_ones = [{"type": "regex", "regex": f"((a{{1000}}){{1000}}){{99{i}}}"} for i in range(2)]
    threads = [threading.Thread(target=pytest.raises, args=(ValueError, guide.compile, form)) for form in hostile_ones]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    guide.compile({"type": "regex", "regex": "quick[0-9]"})
    assert time.monotonic() - began < 0.3
    for thread in threads:
        thread.join()


def test_the_end_is_the_requests(guide):
    form = {"type": "regex", "regex": "a?"}
    assert EOS in allowed(guide.compile(form).matcher([EOS]))
    other = guide.compile(form).matcher([7, 1599])
    assert {7, 1599} <= set(allowed(other)) and EOS not in allowed(other)
    other.accept([7])
    assert set(allowed(other)) == {7, 1599}  # and again, for a caller that ignores it
    letter = guide.compile({"type": "regex", "regex": "ab"})
    a = allowed(letter.matcher([EOS]))[0]
    assert a not in allowed(letter.matcher([a]))  # an end is no text


def test_an_end_that_the_tokenizer_does_not_have():
    for eos in ([1599], [], [9999]):
        guide = Guide((FABLE / "tokenizer.json").read_text(), VOCAB, eos)
        matcher = guide.compile({"type": "regex", "regex": "a?"}).matcher([1599])
        assert 1599 in allowed(matcher) and len(allowed(matcher)) == 2
        guide.close()


def test_forks_replays_and_ends(guide, tokenizer):
    grammar = guide.compile(schema_format(PERSON, disable_any_whitespace=True))
    matcher = grammar.matcher([EOS])
    forced = matcher.forced()
    assert tokenizer.decode(forced) == '{"name":'
    matcher.accept(forced)
    fork = matcher.fork()
    rest = tokenizer.encode('"x","age":5}')
    matcher.accept(rest)
    assert matcher.may_stop and not fork.may_stop
    assert allowed(grammar.matcher([EOS], forced)) == allowed(fork)
    fork.accept(rest)
    assert allowed(fork) == allowed(matcher) == [EOS] and fork.must_stop
    with pytest.raises(MatcherError):
        fork.accept(tokenizer.encode("}"))
    with pytest.raises(MatcherError):
        allowed(fork)


def test_a_vocabulary_of_the_request(guide, tokenizer):
    vocab = tokenizer.backend.get_vocab()
    form = schema_format(PERSON)
    own, given = guide.compile(form).matcher([EOS]), guide.compile(form, vocab, VocabType.VOCAB_TYPE_BPE).matcher([EOS])
    for i in tokenizer.encode('{"name": "a b", "age": 5}'):
        assert allowed(own) == allowed(given)
        own.accept([i])
        given.accept([i])
    few = guide.compile({"type": "regex", "regex": " a+"}, {"\u2581a": 5, "a": 6, "<0x61>": 7, "b": 8},
                        VocabType.VOCAB_TYPE_SPM).matcher([EOS])
    assert allowed(few) == [5]
    few.accept([5])
    assert allowed(few) == [EOS, 6, 7]
    with pytest.raises(ValueError, match="vocab has id 5000"):
        guide.compile(form, {"a": 5000})
    with pytest.raises(ValueError, match="vocab has a token of 2000 bytes, of id 5; allowed: 512"):
        guide.compile(form, {"a" * 2000: 5})    # llguidance would panic
    assert token_bytes("##ing", VocabType.VOCAB_TYPE_WPM) == b"ing"
    assert token_bytes("\u0120caf\u00c3\u00a9", None) == " caf\u00e9".encode()


def test_the_process_may_die(guide):
    guide.compile({"type": "json_object"})
    guide._checker._process.kill()
    guide._checker._process.wait()
    assert guide.compile({"type": "regex", "regex": "after[0-9]"})


def test_that_a_grammar_takes_too_long_is_not_remembered(guide, monkeypatch):
    """Only what is wrong with the grammar itself is: a busy machine refuses it once, not for ever. A request that
    another server has accepted gets more time.
    """
    form, wrong, asked = {"type": "regex", "regex": "slow[0-9]"}, {"type": "regex", "regex": "x((("}, []
    check = Checker.check

    def checked(self, response_format, patience=1):
        asked.append(response_format)
        if response_format is form and patience < 4:
            raise TooCostly("is too complex: it took too long")
        return check(self, response_format, patience)

    monkeypatch.setattr(Checker, "check", checked)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"response_format\.regex: is too complex"):
            guide.compile(form)
        with pytest.raises(ValueError, match="unclosed"):
            guide.compile(wrong)
    assert asked == [form, wrong, form]
    assert guide.compile(form, patience=4) is guide.compile(form)


def test_limits_of_a_grammar_are_cpu_time(guide, monkeypatch):
    """A process that gets no CPU time for a while does not make its grammar too complex."""
    monkeypatch.setattr("allspark_server.guided.checker._ask", lambda *a, ask=checker._ask: (time.sleep(1), ask(*a))[1])
    assert guide.compile({"type": "regex", "regex": "late[0-9]"}) and checker.SECONDS > 10 * checker.CPU_SECONDS


def test_closing_does_not_wait_for_a_start():
    guide = Guide((FABLE / "tokenizer.json").read_text(), VOCAB, [EOS])
    guide.start()
    guide.close()
    guide.close()
    with pytest.raises(ValueError, match="released"):
        guide.compile({"type": "json_object"})


def test_grammars_are_shared_within_a_scope(guide):
    form = {"type": "regex", "regex": "scope[0-9]"}
    assert guide.compile(form, scope="a") is guide.compile(form, scope="a") is not guide.compile(form, scope="b")


def test_grammars_that_are_not_used_are_forgotten(guide, monkeypatch):
    monkeypatch.setattr("allspark_server.guided.grammar.CACHED_GRAMMARS", 3)
    kept = guide.compile({"type": "regex", "regex": "kept"})
    for i in range(5):
        guide.compile({"type": "regex", "regex": f"x{i}"})
        assert guide.compile({"type": "regex", "regex": "kept"}) is kept
    assert len(guide._grammars) == 3

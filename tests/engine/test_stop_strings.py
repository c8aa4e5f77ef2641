"""Stop strings: the matcher against a plain reference, and the whole path through the engine."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

from allspark_client import AllSparkError, AsModelConfig, ClientEngine, GenerateConfig, GenerateRequestStatus as Status
from allspark_server import Engine
from allspark_server.tokenizer.stop_strings import StopMatcher, StopStrings
from support.fake_engine import FakeEngine, expected
from support.fake_service import serving

TEXT = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5)


def reference(text: str, stops: list[str]) -> tuple[str, str | None, int]:
    """The text that is left, the stop string, and the number of characters that were needed to find it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, len(text)


def undecided(text: str, stops: list[str]) -> int:
    """Characters at the end that may begin a stop string."""
    return max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))


@settings(max_examples=400, deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(1, 7), min_size=1, max_size=40))
def test_matcher_over_cut_text(text, stops, sizes):
    left, found, _needed = reference(text, stops)
    matcher, given_out, at, turn = StopMatcher(StopStrings(stops)), "", 0, 0
    while at < len(text) and matcher.found is None:
        piece = text[at : at + sizes[turn % len(sizes)]]
        at, turn = at + len(piece), turn + 1
        given_out += matcher.push(piece)
        if matcher.found is None:
            assert given_out == text[: at - undecided(text[:at], stops)]  # no more is held back than must be
    assert matcher.found == found
    assert given_out + ("" if found else matcher.finish()) == left


@settings(max_examples=100, deadline=None)
@given(TEXT, STOPS)
def test_matcher_at_every_cut(text, stops):
    left, found, _ = reference(text, stops)
    for cut in range(len(text) + 1):
        matcher = StopMatcher(StopStrings(stops))
        out = matcher.push(text[:cut])
        if matcher.found is None:
            out += matcher.push(text[cut:])
        assert (matcher.found, out + matcher.finish()) == (found, left)


def test_many_long_strings_cost_little():
    stops = StopStrings(["a" * 1023 + chr(200 + i) for i in range(64)])
    matcher, start = StopMatcher(stops), time.process_time()
    for _ in range(500):
        matcher.push("aaaa")
    assert matcher.found is None and time.process_time() - start < 2
    matcher.push(chr(263))
    assert matcher.found == "a" * 1023 + chr(263)


@pytest.mark.parametrize(
    "value, error, text",
    [
        (5, TypeError, "stop must be a list of str"),
        (["a", 5], TypeError, "stop must be a list of str"),
        ([""], ValueError, r"stop\[0\] has 0 characters; allowed: 1 to 1024"),
        (["a", "b" * 1025], ValueError, r"stop\[1\] has 1025 characters; allowed: 1 to 1024"),
        (["a"] * 65, ValueError, "stop has 65 strings; allowed: at most 64"),
        (["\ud800"], ValueError, r"stop\[0\] is not valid Unicode"),
    ],
)
def test_bad_values(value, error, text):
    with pytest.raises(error, match=text):
        GenerateConfig(stop=value)
    assert GenerateConfig(stop="a").stop == ["a"] and GenerateConfig().stop == []


# --- through the engine: tokens of the fake tokenizer are "<id>" ---


@pytest.fixture(params=["engine", "client"])
def fake(request):
    """The fake engine, and a function that starts requests on it."""
    with serving(core=FakeEngine(interval=0.001)) as (core, address):
        if request.param == "engine":
            yield core, core
        else:
            with ClientEngine(address) as client:
                yield core, client


def test_text_ids_and_usage(fake):
    core, engine = fake
    ids = expected([1], 40)
    text = "".join(f"<{i}>" for i in ids)
    cases = random.Random(5).sample(range(3, len(text) - 12), 12)
    for at in cases:
        stop = text[at : at + 11]  # over several tokens
        left, found, needed = reference(text, [stop, "never"])
        assert found == stop
        count = next(n for n in range(41) if len("".join(f"<{i}>" for i in ids[:n])) >= needed)
        config = {"max_new_tokens": 40, "stop": [stop, "never"]}
        with engine.generate("m", {"input_ids": [1]}, config, want_text=True) as generation:
            pieces = list(generation)
            assert generation.text == left and generation.ids == ids[:count]
            assert generation.finish_reason == "stop" and generation.status is Status.GenerateFinished
            assert (pieces[-1].finish_reason, pieces[-1].stop_string) == ("stop", stop)
            assert generation.usage.generated_tokens == count
            assert generation.queue.RequestStatInfo().generated_token_length == count
    _, _, queue = engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 40, "stop": [text[20:31]]})
    elements = list(queue)
    whole = [i for e in elements for i in e.ids_from_generate]
    assert len(whole) < 40 and whole == ids[: len(whole)] and not any(e.text for e in elements)
    assert queue.FinishReason() == "stop"
    assert not core.live


def test_what_is_held_back_comes_with_another_end(fake):
    _, engine = fake
    ids = expected([1], 6)
    text = "".join(f"<{i}>" for i in ids)
    with engine.generate("m", {"text": "x"}, {"max_new_tokens": 3}) as generation:
        plain = generation.read().text
    with engine.generate("m", {"input_ids": [1]}, {"max_new_tokens": 6, "stop": text[-9:] + "!"},
                         want_text=True) as generation:
        pieces = list(generation)
    assert generation.text == text and generation.finish_reason == "length" == pieces[-1].finish_reason
    with engine.generate("m", {"input_ids": [1]}, {"max_new_tokens": 6, "stop": text[-3:]}, want_text=True) as both:
        both.read()  # the stop string and the length with one token
    assert both.text == text[:-3] and both.finish_reason == "stop" and both.ids == ids
    with engine.generate("m", {"text": "x"}, {"max_new_tokens": 3, "stop": plain[-1] + "<"}) as generation:
        assert generation.read().text == plain[: plain.index("><")] + ""


def test_each_sample_has_its_own_stop(fake):
    _core, engine = fake
    outputs = [expected([1], 30, sample) for sample in range(3)]
    texts = ["".join(f"<{i}>" for i in ids) for ids in outputs]
    stop = texts[1][30:41]
    with engine.generate("m", {"input_ids": [1]}, {"max_new_tokens": 30, "n": 3, "stop": [stop]},
                         want_text=True) as generation:
        generation.read()
    for sample, text in zip(generation.samples, texts):
        left, found, _ = reference(text, [stop])
        assert (sample.text, sample.stop_string) == (left, found)
        assert sample.finish_reason == ("stop" if found else "length")
    assert [sample.finish_reason for sample in generation.samples] == ["length", "stop", "length"]
    assert generation.finish_reason == "length"
    with engine.generate("m", {"input_ids": [1]}, {"max_new_tokens": 30, "n": 3, "stop": [">"]}) as generation:
        assert generation.read().usage.generated_tokens == 3 and generation.finish_reason == "stop"


def test_resumed_with_text_held_back():
    core = FakeEngine(interval=0.02)
    with serving(core=core) as (_, address), ClientEngine(address) as engine:
        ids = expected([1], 60)
        text = "".join(f"<{i}>" for i in ids)
        for stop in ([text[60:160]], [text[60:160] + "!", text[200:210]]):
            left, found, _ = reference(text, stop)
            with engine.generate("m", {"input_ids": [1]}, {"max_new_tokens": 60, "stop": stop},
                                 want_text=True) as generation:
                request, cuts = engine._find(generation._handle), 0
                for _ in generation:
                    if len(generation.ids) in (20, 30):  # amid what is held back
                        request.session._call.cancel()
                        cuts += 1
            assert cuts == 2 and request.resumed
            assert generation.text == left and generation.finish_reason == "stop"
            assert generation.samples[0].stop_string == found


def test_resumed_after_the_stop_string():
    """The server is lost between the last token and the message that it was the last."""
    with serving(core=FakeEngine()) as (core, address), ClientEngine(address) as engine:
        ids = expected([1], 9)
        stop = "".join(f"<{i}>" for i in ids[-2:])
        spec = engine.generate("m", {"input_ids": [1]}, {"max_new_tokens": 60, "stop": stop})._spec
        spec.generated = ids
        _, _handle, queue = engine._start(spec)
        assert list(queue) == [] and queue.FinishReason() == "stop" and not core.live


# --- a real model ---


@pytest.mark.parametrize("speculation", ["off", "prompt_lookup"])
def test_real_text(tiny_model, speculation):
    with Engine() as engine:
        engine.install_model(AsModelConfig("m", tiny_model, engine_max_length=512, speculation=speculation))
        engine.start_model("m")
        config = {"seed": 5, "temperature": 3.0, "max_new_tokens": 120, "early_stopping": False}
        prompt = {"text": "naïve café 🙂"}
        with engine.generate("m", prompt, config) as plain:
            text = plain.read().text
        rng = random.Random(1)
        for _ in range(20):
            at = rng.randrange(len(text) - 8)
            stops = [text[at : at + rng.randrange(1, 8)], "no such text"]
            left, found, _ = reference(text, stops)
            with engine.generate("m", prompt, {**config, "stop": stops}) as generation:
                generation.read()
            assert (generation.text, generation.samples[0].stop_string) == (left, found)
            assert generation.ids == plain.ids[: len(generation.ids)]
        stat = engine.get_as_engine_stat("m")
        assert (stat.running_request, stat.pendding_request, stat.used_span) == (0, 0, 0)


def test_without_a_tokenizer():
    from support.checkpoints import checkpoint

    with Engine() as engine:
        engine.install_model(AsModelConfig("m", checkpoint("qwen2-gqa-tied")))
        engine.start_model("m")
        with pytest.raises(AllSparkError, match="has no tokenizer.json"):
            engine.start_request("m", {"input_ids": [1]}, {"stop": ["x"]})

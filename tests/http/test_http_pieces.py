"""Answers that are written in pieces: the same JSON, and turns for other calls; and what refused calls leave."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from types import SimpleNamespace

import pytest

from allspark_client.types import GeneratedElements
from allspark_server.access import Client, Role
from allspark_server.http import call
from allspark_server.http.bodies import BodyReader
from allspark_server.http.errors import ApiError
from allspark_server.http.logprobs import (
    CompletionLogprobs,
    TokenTexts,
    chat_logprobs,
    chat_logprobs_json,
    logprobs_in_pieces,
)
from allspark_server.http.metrics import Metrics
from allspark_server.http.pieces import joined, json_list, json_object


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_the_same_json(count):
    values = [{"é": i, "x": [None, 1.5]} for i in range(count)]
    assert "".join(json_list(iter(values), 2)) == json.dumps(values, ensure_ascii=False)
    fields = {"a": 1, "list": json_list(values, 2), "none": None, "objects": joined(map(json_object, values))}
    assert json.loads("".join(json_object(fields))) == {"a": 1, "list": values, "none": None, "objects": values}


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_in_pieces(top):
    tokens = {i: f"t{i}".encode() for i in range(200)}
    elements = GeneratedElements(list(range(200)), [[(i, -0.5), (i ^ 1, -1.0)] for i in range(200)], [-0.5] * 200)
    given = elements.ids_from_generate, elements.token_logprobs_list, elements.log_probs_list
    before = CompletionLogprobs(top).of([5], [None], [[]], tokens)
    maker, other = CompletionLogprobs(top, 2), CompletionLogprobs(top, 2)
    rest = other.of(*given, tokens)
    whole = {key: None if rest[key] is None else before[key] + rest[key] for key in rest}
    assert json.loads("".join(logprobs_in_pieces([before], maker, elements, tokens))) == whole


_BYTES = {1: b" the", 2: "é\n".encode(), 3: b"\xe2\x82", 4: b'"\\', 5: b"", 6: "\U0001f600\x00".encode(), 7: b" the"}


@pytest.mark.parametrize("top", [0, 1, 3])
def test_log_probabilities_of_a_chunk_are_the_json_that_they_were(top):
    """They are put together from known parts, in the bytes that json.dumps writes."""
    texts = TokenTexts()
    made, other = CompletionLogprobs(top, 3), CompletionLogprobs(top, 3)
    elements = [
        GeneratedElements([1], [[(1, -0.1), (7, -0.2), (2, -1e-9)]], [-0.1]),     # two tokens with one text
        GeneratedElements([2, 3, 6], [[(5, -1.0), (4, float("-inf")), (6, -17.25)], [], [(3, -0.5)]],
                          [-0.12345678901234567, float("-inf"), -1e-30]),
        GeneratedElements([4, 5], [[(2, -1.0)]] * 2, [-2.0, 0.0])]
    for new in elements:
        if not texts.bytes:
            for make in (lambda: made.json(elements[1], texts), lambda: chat_logprobs_json(elements[1], texts, top)):
                with pytest.raises(KeyError):
                    make()
            texts.bytes.update(_BYTES)
        wanted = other.of(new.ids_from_generate, new.token_logprobs_list, new.log_probs_list, _BYTES)
        assert made.json(new, texts) == json.dumps(wanted)
        entries = {"content": list(chat_logprobs(new, _BYTES, top)), "refusal": None}
        assert chat_logprobs_json(new, texts, top) == json.dumps(entries)


def test_turns():
    """Making a long answer leaves other calls their turns, and a short one has its length."""
    sent = []

    async def send(message):
        sent.append(message)

    def slow():
        for _ in range(20):
            time.sleep(0.01)
            yield "x" * 5000

    async def run():
        turns = 0

        async def other():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(other())
        pool, client = SimpleNamespace(pool=None, strict_fields=False), Client(Role.READ)
        await call.Call(pool, {"headers": []}, send, client).reply_in_pieces(slow())
        task.cancel()
        assert turns >= 10
        await call.Call(pool, {"headers": []}, send, client).reply_in_pieces(iter(["{", "}"]))

    asyncio.run(run())
    assert (b"content-length", b"2") in sent[-2]["headers"] and sent[-1]["body"] == b"{}"
    assert b"".join(message.get("body", b"") for message in sent[:-2]) == b"x" * 100_000


def test_refused_requests_leave_nothing():
    """What the frames of an error hold is freed at once, not at a garbage collection."""
    left = []

    class Big:
        pass

    async def handler(called, _):
        big = Big()
        left.append(weakref.ref(big))
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise ApiError(400, "no") from error

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.sleep(10)

    sent = []
    worker = call.HttpWorker(None, None, BodyReader(1000, 1000), Metrics())
    endpoint = call.Endpoint(worker, "test", handler, role=None)
    gc.disable()
    try:
        asyncio.run(endpoint({"headers": []}, receive, send))
        assert sent[0]["status"] == 400 and left[0]() is None
    finally:
        gc.enable()

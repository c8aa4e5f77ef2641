"""The fields and numbers of messages, counted without parsing."""

from __future__ import annotations

import random
import time

import pytest

from allspark_client._proto import allspark_pb2 as pb
from allspark_server.rpc.wire_format import MAX_FIELDS, MAX_NUMBERS, TooManyItems, check_items, find_number

START_ID = (2, 1)


def start(request_id: int = 7, **fields) -> bytes:
    request = pb.GenerateRequest(model="m", **fields)
    return pb.SessionRequest(start=pb.StartRequest(id=request_id, request=request)).SerializeToString()


def items(message) -> tuple[int, int]:
    """The fields, those of inner messages included, and the packed numbers of a message, from its parsed form."""
    fields = numbers = 0
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            fields += 3 * len(value)
            continue
        for one in value if descriptor.is_repeated and descriptor.message_type else [value]:
            fields += 1
            if descriptor.message_type is not None:
                inner = items(one)
                fields, numbers = fields + inner[0], numbers + inner[1]
            elif descriptor.is_repeated and descriptor.cpp_type != descriptor.CPPTYPE_STRING:
                numbers += len(one)
            elif descriptor.is_repeated:
                fields += len(one) - 1
    return fields, numbers


def any_request(rng: random.Random) -> pb.SessionRequest:
    config = pb.GenerateConfig(
        temperature=rng.random(), stop=["x"] * rng.randrange(4),
        vocab={f"t{i}": i + 1 for i in range(rng.randrange(4))},
        logit_bias={i + 1: 0.5 for i in range(rng.randrange(3))},
        bad_words_ids=[pb.TokenIds(ids=[1, 300, 1 << 20]) for _ in range(rng.randrange(5))])
    ids = pb.TokenIds(ids=[rng.choice([1, 127, 128, 1 << 14, -1]) for _ in range(rng.randrange(1, 300))])
    request = pb.GenerateRequest(model="m" * rng.randrange(200), config=config, input_ids=ids,
                                 generated=range(rng.randrange(200)), ticket=rng.randbytes(rng.randrange(40)))
    request.images.extend(pb.Image(content=rng.randbytes(rng.randrange(300)), max_pixels=rng.randrange(3))
                          for _ in range(rng.randrange(3)))
    if rng.random() < 0.3:
        request.chat.messages.extend(pb.ChatMessage(role="user", content="é" * i) for i in range(rng.randrange(1, 9)))
    return pb.SessionRequest(start=pb.StartRequest(id=rng.randrange(1, 1 << 40), request=request))


def test_items_are_counted_exactly():
    """At the limits a message passes, and one below it is refused."""
    rng = random.Random(3)
    for _ in range(200):
        message = any_request(rng)
        data = message.SerializeToString()
        fields, numbers = items(message)
        check_items(data, pb.SessionRequest, fields, numbers)
        with pytest.raises(TooManyItems, match=f"more than {fields - 1} fields"):
            check_items(data, pb.SessionRequest, fields - 1, numbers)
        if len(message.start.request.generated) + len(message.start.request.input_ids.ids) < numbers > 1:
            with pytest.raises(TooManyItems, match=f"more than {numbers - 1} numbers"):
                check_items(data, pb.SessionRequest, fields, numbers - 1)
        assert find_number(data, *START_ID) == message.start.id


@pytest.mark.parametrize("data, text", [
    (start(input_ids=pb.TokenIds(ids=[5] * (MAX_NUMBERS + 1))), "numbers .counted up to start.request.input_ids.ids"),
    (start(generated=[1 << 30] * (MAX_NUMBERS + 1)), "numbers .counted up to start.request.generated"),
    (start(samples=[pb.TokenIds()] * MAX_FIELDS), f"{MAX_FIELDS} fields .counted up to start.request"),
    (start(chat=pb.Chat(messages=[pb.ChatMessage(role="u")] * MAX_FIELDS)), "fields .* start.request.chat.messages"),
    (start(config=pb.GenerateConfig(vocab={str(i): i for i in range(MAX_FIELDS)})), "fields .* start.request.config"),
    (b"\x38\x01" * (MAX_FIELDS + 1), "fields"),                     # fields that no message has
    (b"\x3b" * (MAX_FIELDS + 1), "fields"),                         # groups
])
def test_rich_messages_are_refused_quickly(data, text):
    began = time.thread_time()
    with pytest.raises(TooManyItems, match=f"more than .*{text}"):
        check_items(data, pb.SessionRequest)
    assert time.thread_time() - began < 0.5


def test_what_is_no_message_is_left_to_the_parser():
    rng = random.Random(5)
    whole = any_request(rng).SerializeToString()
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        check_items(bytes(data[:rng.randrange(len(data) + 1)]), pb.SessionRequest)
        find_number(bytes(data), *START_ID)


def test_the_last_id_counts():
    """Fields of one message may come in parts, which a parser merges."""
    parts = start(3, text="x") + pb.SessionRequest(start=pb.StartRequest(id=9)).SerializeToString()
    assert pb.SessionRequest.FromString(parts).start.id == find_number(parts, *START_ID) == 9
    assert find_number(b"", *START_ID) is None and find_number(start(0), *START_ID) is None
    with pytest.raises(TooManyItems):
        find_number(b"\x38\x01" * (MAX_FIELDS + 1), *START_ID)

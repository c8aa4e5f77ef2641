"""Lists of token ids in native code: checked, packed, and hashed to the keys of spans."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import pytest

from allspark_server import Engine, _native

PARENT = bytes(range(16))


def keys_of(parent: bytes, ids: list[int], begin: int, end: int, size: int, images: list[bytes]) -> list[bytes]:
    keys = []
    for index in range(begin, end):
        data = parent + struct.pack(f"<{size}i", *ids[index * size : (index + 1) * size]) + images[index - begin]
        keys.append(parent := hashlib.blake2b(data, digest_size=16).digest())
    return keys


@pytest.mark.parametrize("size", [1, 4, 16, 27, 28, 29, 32, 60, 64, 128])   # of 28 and 60: whole blocks of the hash
def test_keys_are_those_of_hashlib(size):
    rng = random.Random(size)
    ids = [rng.randrange(1 << 31) for _ in range(41 * size + 3)]
    for begin, end in ((0, 41), (3, 17), (5, 5)):
        expected = keys_of(PARENT, ids, begin, end, size, [b""] * (end - begin))
        assert _native.span_keys(PARENT, ids, begin, end, size) == expected
        images = [rng.randbytes(rng.choice([0, 16, 128 - 4 * size % 128, 300])) for _ in range(begin, end)]
        assert _native.span_keys(PARENT, ids, begin, end, size, images) == \
            keys_of(PARENT, ids, begin, end, size, images)


def test_spans_that_are_not_there_are_refused():
    ids = list(range(64))
    for begin, end in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match=rf"spans {begin}\.\.\.{end} of 16 ids are not among 64 ids"):
            _native.span_keys(PARENT, ids, begin, end, 16)
    with pytest.raises(ValueError, match="images of 1 spans for 4"):
        _native.span_keys(PARENT, ids, 0, 4, 16, [b""])
    with pytest.raises(OverflowError, match="place 63"):
        _native.span_keys(PARENT, [*range(63), 1 << 31], 0, 4, 16)


def test_ids_are_checked():
    assert _native.ids_below([], 1) and _native.ids_below([0, 7, 6], 8)
    class Number(int):
        pass
    for wrong in (8, -1, 1 << 31, 1 << 70, -(1 << 70), True, 1.0, "1", None, np.int64(1), Number(1), [1]):
        assert not _native.ids_below([0, wrong, 1], 8), wrong


def test_ids_are_packed():
    ids = [0, 1, -1, 2**31 - 1, -(2**31)]
    assert _native.id_bytes(ids) == struct.pack("<5i", *ids) and _native.id_bytes([]) == b""
    assert _native.id_bytes([np.int32(5), True]) == struct.pack("<2i", 5, 1)
    for wrong, error in ((2**31, OverflowError), (2**70, OverflowError), (1.5, TypeError), ("a", TypeError)):
        with pytest.raises(error):
            _native.id_bytes([1, wrong])


def test_the_engine_reads_ids_as_a_client_does():
    ids = [3, 0, 2**31 - 1]
    assert Engine._token_ids(ids) == ids and Engine._token_ids(ids) is not ids
    assert Engine._token_ids([ids]) == Engine._token_ids((3, 0, 2**31 - 1)) == Engine._token_ids(np.array(ids)) == ids
    for wrong, error, text in (([1, -1], ValueError, r"input_ids\[1\]=-1 is negative"), ([], ValueError, "empty"),
                               ([2**31], ValueError, "beyond 32 bits"), ([1, True], TypeError, "not bool")):
        with pytest.raises(error, match=text):
            Engine._token_ids(wrong)

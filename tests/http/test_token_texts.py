"""Bytes of tokens are asked for in blocks, each once, also by requests at the same time."""

from __future__ import annotations

import asyncio

import pytest

from allspark_client.types import Detokenized, ModelInfo
from allspark_server.http.errors import ApiError
from allspark_server.http.pool import Pool


class Asked(Pool):
    """A pool whose server answers after a turn, or fails; keeps what it was asked for."""

    def __init__(self) -> None:
        self._tokens, self.questions, self.fails, self._background = {}, [], 0, set()

    async def detokenize(self, name: str, ids: list[int]) -> Detokenized:
        self.questions.append((ids[0], len(ids)))
        await asyncio.sleep(0.01)
        if self.fails:
            self.fails -= 1
            raise ApiError(503, "no server")
        return Detokenized("", [b"%d" % i for i in ids])


def info(vocab_size: int) -> ModelInfo:
    return ModelInfo(name="m", model_hash="h", vocab_size=vocab_size)


def test_a_block_is_asked_for_once():
    async def run() -> list[tuple[int, int]]:
        pool = Asked()
        found = await asyncio.gather(*(pool.token_bytes(info(2500), {i, 1023, 2047}) for i in range(0, 1024, 100)))
        assert all(each[i] == b"%d" % i for each, i in zip(found, range(0, 1024, 100)))
        assert len(await pool.token_bytes(info(2500), {2499, 5})) == 2500
        return sorted(pool.questions)

    assert asyncio.run(run()) == [(0, 1024), (1024, 1024), (2048, 452)]


def test_the_whole_vocabulary_is_asked_for_in_the_background():
    async def run() -> None:
        pool = Asked()
        await pool.token_bytes(info(5000), {3000})
        pool.fails = 1
        await asyncio.gather(*pool._background)     # gives up
        await pool.token_bytes(info(5000), {0})
        await asyncio.gather(*pool._background)
        assert len(await pool.token_bytes(info(5000), {4999})) == 5000
        assert sorted(pool.questions) == [(0, 1024), (0, 1024), (1024, 1024), (2048, 1024), (3072, 1024), (4096, 904)]

    asyncio.run(run())


def test_a_server_that_does_not_say_its_vocabulary_is_asked_up_to_the_largest_id():
    async def run() -> None:
        pool = Asked()
        assert (await pool.token_bytes(info(0), {7, 30}))[30] == b"30"
        assert (await pool.token_bytes(info(0), {90}))[90] == b"90"
        assert pool.questions == [(0, 31), (0, 91)]

    asyncio.run(run())


def test_a_request_that_is_given_up_ends_no_question_of_another():
    async def run() -> None:
        pool = Asked()
        first = asyncio.ensure_future(pool.token_bytes(info(100), {1}))
        second = asyncio.ensure_future(pool.token_bytes(info(100), {2}))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second)[2] == b"2" and len(pool.questions) == 1

    asyncio.run(run())


def test_a_failed_question_is_asked_again():
    async def run() -> None:
        pool = Asked()
        pool.fails = 1
        with pytest.raises(ApiError):
            await pool.token_bytes(info(100), {1})
        assert (await pool.token_bytes(info(100), {1}))[1] == b"1"

    asyncio.run(run())

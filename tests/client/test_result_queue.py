"""The result queue: merging, ends and errors, threads, event loops."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import allspark_client as a

Status = a.GenerateRequestStatus


def elements(*ids: int, sample: int = 0) -> a.GeneratedElements:
    return a.GeneratedElements(list(ids), sample_index=sample)


def test_queue_merges_and_ends():
    q = a.ResultQueue()
    assert q.GetNoWait() is None and q.Get(1) is None and q.GenerateStatus() is Status.Init
    for i in range(3):
        q.put(elements(i))
    q.put(elements(9, sample=1))
    q.put(elements(3))
    assert q.GeneratedLength() == 5
    assert q.Get().ids_from_generate == [0, 1, 2]
    second = q.Get()
    assert (second.ids_from_generate, second.sample_index) == ([9], 1)
    q.set_status(Status.Generating)
    q.set_status(Status.ContextFinished)  # never back
    assert q.GenerateStatus() is Status.Generating
    q.update_stat({"context_token_length": 4, "unknown": 1})
    q.finish(Status.GenerateFinished)
    q.finish(Status.InternalError, a.AllSparkError(a.AsStatus.ALLSPARK_IO_ERROR, "late"))
    q.put(elements(5))
    assert q.GenerateStatus() is Status.GenerateFinished and q.GetWithTimeout(10).ids_from_generate == [3]
    assert q.Get() is None and q.Get(5) is None and q.GetNoWait() is None and list(q) == []
    assert q.RequestStatInfo().context_token_length == 4
    for bad, error in ((-1, ValueError), ("x", TypeError), (True, TypeError)):
        with pytest.raises(error, match="timeout_ms"):
            q.Get(bad)


def test_queue_raises_the_error_after_the_tokens():
    q = a.ResultQueue()
    q.put(elements(1))
    q.finish(Status.InternalError, a.AllSparkError(a.AsStatus.ALLSPARK_CACHE_MEMORY_OUT, "no spans"))
    assert q.Get().ids_from_generate == [1]
    for get in (q.Get, q.GetNoWait, lambda: q.Get(1), lambda: list(q)):
        with pytest.raises(a.AllSparkError, match="^ALLSPARK_CACHE_MEMORY_OUT: no spans"):
            get()


def read_all(queue: a.ResultQueue) -> list[int]:
    return [i for e in queue for i in e.ids_from_generate]


async def read_all_async(queue: a.ResultQueue) -> list[int]:
    return [i async for e in queue for i in e.ids_from_generate]


def read_all_in_a_loop(queue: a.ResultQueue) -> list[int]:
    return asyncio.run(read_all_async(queue))


@pytest.mark.parametrize("read", [read_all, read_all_in_a_loop])
def test_iteration_raises_on_an_interruption_by_others(read):
    q = a.ResultQueue()
    q.put(elements(1))
    q.finish(Status.GenerateInterrupted, a.AllSparkError(a.AsStatus.ALLSPARK_RUNTIME_ERROR, "its model was stopped"))
    with pytest.raises(a.AllSparkError, match="^ALLSPARK_RUNTIME_ERROR: its model was stopped"):
        read(q)
    assert q.Get() is None and q.GetNoWait() is None  # the getters go by the status, as DashInfer's scripts do
    asked = a.ResultQueue()
    asked.put(elements(1))
    asked.finish(Status.GenerateInterrupted)
    assert read(asked) == [1]


def test_finish_reason():
    q = a.ResultQueue()
    assert q.FinishReason() is None
    q.finish(Status.GenerateFinished, None, "length")
    q.finish(Status.GenerateFinished, None, "stop")
    assert q.FinishReason() == "length"
    for status, reason in (
        (Status.GenerateFinished, "stop"),
        (Status.GenerateInterrupted, "interrupted"),
        (Status.InternalError, "error"),
    ):
        q = a.ResultQueue()
        q.finish(status)
        assert q.FinishReason() == reason


def test_a_reader_that_is_slow_costs_the_writer_nothing():
    """New results are merged at once, in a time that does not grow with the number of unread ones."""
    q, unread = a.ResultQueue(), 30_000

    def put(count: int) -> float:
        start = time.thread_time()
        for i in range(count):
            q.put(a.GeneratedElements([i], text="word "))
        return time.thread_time() - start

    first = put(1000)
    put(unread)
    assert put(1000) < 5 * first + 0.01
    start = time.thread_time()
    got = q.GetNoWait()  # the writer waits for the lock meanwhile
    assert time.thread_time() - start < 0.005
    assert len(got.ids_from_generate) == unread + 2000 and got.text == "word " * (unread + 2000)
    growing = a.GeneratedElements([0], text="x" * 10_000_000)
    start = time.thread_time()
    for i in range(1000):
        growing.extend(a.GeneratedElements([i], text="y"))
    assert time.thread_time() - start < 0.1
    assert growing.text == "x" * 10_000_000 + "y" * 1000 and growing == a.GeneratedElements(
        [0, *range(1000)], text=growing.text
    )


def test_queue_timeout_is_kept():
    q = a.ResultQueue()
    start = time.monotonic()
    assert q.Get(50) is None and 0.04 < time.monotonic() - start < 1.0


def test_queue_with_many_threads():
    q, seen, lock = a.ResultQueue(), [], threading.Lock()

    def read():
        for e in q:
            with lock:
                seen.extend(e.ids_from_generate)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for t in readers:
        t.start()
    for i in range(2000):
        q.put(elements(i))
    q.finish(Status.GenerateFinished)
    for t in readers:
        t.join(10)
    assert sorted(seen) == list(range(2000))


def test_queue_async():
    q = a.ResultQueue()

    def feed():
        for i in range(50):
            q.put(elements(i))
            time.sleep(0.001)
        q.finish(Status.GenerateFinished)

    async def read():
        got = []
        async for e in q:
            got += e.ids_from_generate
        return got

    async def main():
        reader = asyncio.create_task(read())
        threading.Thread(target=feed).start()
        return await asyncio.wait_for(reader, 10)

    assert asyncio.run(main()) == list(range(50))


def test_queue_async_error_cancel_and_closed_loop():
    q = a.ResultQueue()

    async def one():
        async for e in q:
            return e

    async def cancelled():
        task = asyncio.create_task(one())
        await asyncio.sleep(0.01)
        assert len(q._tasks._futures) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not q._tasks._futures

    asyncio.run(cancelled())
    loop = asyncio.new_event_loop()
    q._tasks._futures.append(loop.create_future())
    loop.close()
    q.put(elements(1))  # a closed loop does not disturb the engine
    q.finish(Status.InternalError, a.AllSparkError(a.AsStatus.ALLSPARK_IO_ERROR, "x"))
    assert asyncio.run(one()).ids_from_generate == [1]
    with pytest.raises(a.AllSparkError, match="ALLSPARK_IO_ERROR"):
        asyncio.run(one())


@pytest.mark.parametrize("logprob,top", [(None, []), (-0.5, [(3, -0.5), (4, -1.0)])])
def test_tokens_are_put_as_elements_are(logprob, top):
    one, other = a.ResultQueue(), a.ResultQueue()
    for sample, token in ((0, 3), (0, 4), (1, 5), (0, 6)):
        one.put_token(sample, token, f"t{token}", logprob, top, (7, 3, 4))
        other.put(a.GeneratedElements(
            [token], [] if logprob is None else [top], [] if logprob is None else [logprob], prefix_cache_len=7,
            prefix_len_gpu=3, prefix_len_cpu=4, sample_index=sample, text=f"t{token}"))
    assert one.GeneratedLength() == other.GeneratedLength() == 4
    for _ in range(3):
        found = one.Get()
        assert found == other.Get() and vars(found).keys() == vars(a.GeneratedElements()).keys()
    assert not one.GetNoWait() and not other.GetNoWait()
    one.finish(Status.GenerateFinished)
    one.put_token(0, 7, "t7", logprob, top, (7, 3, 4))
    assert one.Get() is None and one.GeneratedLength() == 4

"""AsyncClientEngine, where ClientEngine's tests do not cover it: cancellation, resumption, pools, many requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from allspark_client import (
    AllSparkError,
    AsModelConfig,
    AsStatus,
    AsyncClientEngine,
    GenerateRequestStatus as Status,
    client as client_module,
)
from allspark_client.queue import ResultQueue
from allspark_client.waiting import Event
from support.fake_engine import FakeEngine, expected
from support.fake_service import server_process, serving, wait_until


@pytest.fixture()
def served():
    with serving() as pair:
        yield pair


async def ids_of(queue):
    return [i async for e in queue for i in e.ids_from_generate]


def test_many_requests_and_few_threads(served):
    core, address = served
    core.interval = 0.001

    async def main():
        async with AsyncClientEngine(address) as engine:

            async def one(i):
                async with engine.generate("m", {"input_ids": [i + 1]}, {"max_new_tokens": 12}) as generation:
                    assert (await generation.read()).ids == expected([i + 1], 12)

            await asyncio.gather(*(one(i) for i in range(200)))
            assert len(engine._executor._threads) == 1  # which connected

    asyncio.run(main())
    assert len(core.submitted) == 200 and not core.live


def test_resumed_on_another_server(tmp_path):
    async def main():
        with server_process(f"unix:{tmp_path}/a") as (a, first), server_process(f"unix:{tmp_path}/b") as (b, second):
            async with AsyncClientEngine([first, second], reconnect_timeout=20) as engine:
                async with engine.generate("m", {"input_ids": [3]}, {"max_new_tokens": 100}) as generation:
                    async for _ in generation:
                        if len(generation.ids) == 5:
                            request = engine._engine._find(generation._handle)
                            (a if request.session.address == first else b).kill()
                    assert generation.ids == expected([3], 100) and request.resumed
                    assert generation.usage.generated_tokens == 100

    asyncio.run(main())


def test_a_pool_shares_the_load():
    async def main():
        with contextlib.ExitStack() as stack:
            served = [stack.enter_context(serving(core=FakeEngine(interval=0.01))) for _ in range(3)]
            engine = await stack_enter(stack, AsyncClientEngine([address for _, address in served]))
            assert await engine.install_model(AsModelConfig("n", "/none")) is AsStatus.ALLSPARK_SUCCESS
            assert len(await engine.list_models()) == 6
            started = [await engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 1000}) for _ in range(12)]
            assert [len(core.submitted) for core, _ in served] == [4, 4, 4]
            for _, handle, queue in started:
                await engine.release_request("m", handle)
                assert queue.GenerateStatus() is Status.GenerateInterrupted
            await asyncio.to_thread(wait_until, lambda: not any(core.live for core, _ in served), 5)
            await engine.close()

    async def stack_enter(stack, engine):
        return await engine.__aenter__()

    asyncio.run(main())


def test_cancelled_tasks_leave_nothing(served):
    core, address = served

    async def main():
        async with AsyncClientEngine(address) as engine:

            async def one():
                async with engine.generate("m", {"input_ids": [1]}, {"max_new_tokens": 100_000}) as generation:
                    reading.append(generation)
                    await generation.read()

            reading = []
            task = asyncio.create_task(one())
            while not reading or not reading[0].ids:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert reading[0].status is Status.GenerateInterrupted and not engine._engine._requests
            await asyncio.to_thread(wait_until, lambda: not core.live, 5)
            core.submit_seconds = 0.3  # cancelled before the server answers
            task = asyncio.create_task(one())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, lambda: len(core.submitted) == 2 and not core.handles, 5)

    asyncio.run(main())


def test_a_cancellation_that_comes_with_what_was_waited_for_is_one():
    async def main() -> None:
        event, queue = Event(), ResultQueue()
        for wait, come in ((event.wait_async(10), event.set),
                           (queue.wait_final_async(10), lambda: queue.finish(Status.GenerateFinished))):
            task = asyncio.ensure_future(wait)
            await asyncio.sleep(0.05)
            come()
            await asyncio.sleep(0)          # the future is resolved; the task has not run since
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_cancelled_while_no_server_can_be_reached(served):
    core, address = served

    async def main():
        async with AsyncClientEngine(address, reconnect_timeout=30) as engine:
            session = engine._engine._pool.members[0].live_session
            blocked = engine._engine._pool.members[0]
            await asyncio.to_thread(blocked._lock.acquire)  # as if another thread were connecting
            session._call.cancel()
            await asyncio.to_thread(wait_until, lambda: session.broken is not None, 5)
            task = asyncio.create_task(engine.start_request("m", {"input_ids": [1]}))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            blocked._lock.release()
            _, _handle, queue = await engine.start_request("m", {"input_ids": [2]}, {"max_new_tokens": 5})
            assert await ids_of(queue) == expected([2], 5)
            assert [spec.input_ids for spec in core.submitted if spec.input_ids == [1]] == []

    asyncio.run(main())


def test_refusals_and_failures(served):
    core, address = served

    async def main():
        engine = AsyncClientEngine(address)
        with pytest.raises(AllSparkError, match="no model named 'x'"):
            await engine.start_request("x", {"input_ids": [1]})
        core.refusal = AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, "the queue is full", retryable=True)
        with pytest.raises(AllSparkError, match="the queue is full") as caught:
            async with engine.generate("m", {"input_ids": [1]}):
                pass
        assert caught.value.retryable and not engine._engine._requests
        core.refusal = None
        async with engine.generate("m", {"input_ids": [999]}) as generation:
            with pytest.raises(AllSparkError, match="not finite"):
                await generation.read()
            assert len(generation.ids) == 3 and generation.finish_reason == "error"
        with pytest.raises(TypeError, match="request_handle"):
            await engine.stop_request("m", "1")
        _, handle, queue = await engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 100_000})
        assert await queue.GetAsync() is not None
        reader = asyncio.create_task(ids_of(queue))
        await engine.close()
        await asyncio.wait_for(reader, 5)
        assert queue.GenerateStatus() is Status.GenerateInterrupted
        for call in (engine.list_models(), engine.stop_request("m", handle), engine.start_request("m", {"text": "x"})):
            with pytest.raises(AllSparkError, match="the engine is closed"):
                await call
        await engine.close()

    asyncio.run(main())


def test_a_deaf_server_and_time_outs(served, monkeypatch):
    core, address = served
    monkeypatch.setattr(client_module, "STOP_SECONDS", 0.3)

    async def main():
        async with AsyncClientEngine(address) as engine:
            core.interval = 0.2
            _, handle, queue = await engine.start_request("m", {"input_ids": [1]}, {"max_new_tokens": 100_000})
            assert await queue.GetAsync(1) is None and not await queue.wait_final_async(0.01)
            core.deaf = True
            await asyncio.wait_for(engine.stop_request("m", handle), 3)
            assert queue.GenerateStatus() is Status.GenerateInterrupted and await queue.wait_final_async(0)
            with pytest.raises(ValueError, match="timeout_ms"):
                await queue.GetAsync(-1)

    asyncio.run(main())


def test_one_engine_in_two_loops(served):
    _, address = served
    engine = AsyncClientEngine(address)

    async def one(i):
        async with engine.generate("m", {"input_ids": [i]}, {"max_new_tokens": 30}) as generation:
            assert (await generation.read()).ids == expected([i], 30)

    threads = [threading.Thread(target=lambda i=i: asyncio.run(one(i))) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    asyncio.run(one(3))
    asyncio.run(engine.close())

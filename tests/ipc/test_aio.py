from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from ipc.aio import AsyncReceiver
from ipc.channel import Receiver, Sender
from ipc.messages import Abort, EngineMessage, Shutdown

DEADLINE_S = 60.0


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return asyncio.run if request.param == "asyncio" else uvloop.run


def test_batches_arrive_whatever_the_limit(run: Any, short_dir: Path) -> None:
    address = f"ipc://{short_dir}/x"

    async def main() -> None:
        with Receiver[Any](address, EngineMessage) as receiver, Sender(address) as sender:
            inbox = AsyncReceiver(receiver, limit=7)
            got: list[int] = []
            for burst in (1, 6, 7, 8, 500, 1):  # stopping at the limit must not lose the wake-up for the rest
                for i in range(burst):
                    sender.send(Abort(request_ids=[i]))
                seen = 0
                while seen < burst:
                    batch = await asyncio.wait_for(inbox.receive(), DEADLINE_S)
                    assert 1 <= len(batch) <= 7
                    seen += len(batch)
                    got += [message.request_ids[0] for message in batch]
            assert got == [i for burst in (1, 6, 7, 8, 500, 1) for i in range(burst)]

    run(main())


def test_waiting_leaves_the_loop_free_and_a_cancelled_wait_loses_nothing(run: Any, short_dir: Path) -> None:
    address = f"ipc://{short_dir}/x"

    async def main() -> None:
        with Receiver[Any](address, EngineMessage) as receiver, Sender(address) as sender:
            inbox = AsyncReceiver(receiver)
            for i in range(20):
                waiting = asyncio.ensure_future(inbox.receive())
                await asyncio.sleep(0)
                if i % 2:
                    sender.send(Abort(request_ids=[i]))
                    await asyncio.sleep(0)
                waiting.cancel()
                done = await asyncio.gather(waiting, return_exceptions=True)
                batch = done[0] if isinstance(done[0], list) else []
                if i % 2 and not batch:
                    batch = await asyncio.wait_for(inbox.receive(), DEADLINE_S)
                assert [message.request_ids for message in batch] == ([[i]] if i % 2 else [])

    run(main())


def test_iteration_and_post(run: Any, short_dir: Path) -> None:
    address = f"ipc://{short_dir}/x"

    async def main() -> None:
        inbox: AsyncReceiver[Any] = AsyncReceiver(receiver := Receiver[Any](address, EngineMessage))
        asyncio.get_running_loop().call_later(0.05, receiver.post, Shutdown())
        async with asyncio.timeout(DEADLINE_S):
            async for batch in inbox:
                assert batch == [Shutdown()]
                break
        # An idle wait must not turn the loop into a spin: the wake-up has been consumed.
        turns = 0
        waiting = asyncio.ensure_future(inbox.receive())
        for _ in range(100):
            await asyncio.sleep(0)
            turns += waiting.done()
        assert turns == 0
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        inbox.close()

    run(main())
    assert list(short_dir.iterdir()) == []

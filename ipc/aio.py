"""The inbox of an asyncio process: await readable, then drain. One await per batch, never one per message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from ipc.channel import Receiver

T = TypeVar("T")


class AsyncReceiver(Generic[T]):
    """`async for batch in AsyncReceiver(receiver)`; one consumer. Owns the receiver from then on."""

    def __init__(self, receiver: Receiver[T], limit: int = 1024) -> None:
        self._receiver = receiver
        self._limit = limit

    async def receive(self) -> list[T]:
        """The messages that are here, at least one. Cancelling loses none."""
        while True:
            batch = self._receiver.drain(self._limit)
            if batch:
                return batch
            await self._readable()

    async def __aiter__(self) -> AsyncIterator[list[T]]:
        while True:
            yield await self.receive()
            await asyncio.sleep(0)  # under load a batch is always here already: let everything else have its turn

    def close(self) -> None:
        self._receiver.close()

    async def _readable(self) -> None:
        # ZeroMQ's descriptor signals a change, not a state: it may stay quiet while messages wait. That is safe only
        # because we come here after `drain` found nothing, which also consumed all earlier signals.
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def on_ready() -> None:
            if not ready.done():
                ready.set_result(None)

        def on_wake() -> None:
            self._receiver.clear_wake()
            on_ready()

        socket_fd, wake_fd = self._receiver.fds
        loop.add_reader(socket_fd, on_ready)
        loop.add_reader(wake_fd, on_wake)
        try:
            await ready
        finally:
            loop.remove_reader(socket_fd)
            loop.remove_reader(wake_fd)

"""Inbox and outbox in one process, for tests: same interface and same type checks as `ipc.channel`, no sockets."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from ipc.codec import encode, make_decoder

T = TypeVar("T")


class MemoryChannel(Generic[T]):
    """Both ends of a channel. Messages are encoded and decoded on the way, so a message that the union does not hold
    is dropped and counted here as it would be on a socket."""

    def __init__(self, union_type: Any) -> None:
        self.dropped = 0
        self._decoder = make_decoder(union_type)
        self._messages: deque[T] = deque()
        self._arrived = threading.Condition(threading.RLock())  # a signal handler may post while its thread waits

    def send(self, message: msgspec.Struct) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, frame: bytes) -> None:
        """Raw bytes, as a broken or hostile peer would send them."""
        try:
            message = self._decoder.decode(frame)
        except Exception:
            self.dropped += 1
        else:
            self.post(message)

    def post(self, message: T) -> None:
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify_all()

    def drain(self, limit: int = 1024) -> list[T]:
        with self._arrived:
            return [self._messages.popleft() for _ in range(min(limit, len(self._messages)))]

    def wait(self, timeout_s: float | None = None) -> bool:
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._messages), timeout_s)

    def close(self) -> None:
        with self._arrived:
            self._messages.clear()

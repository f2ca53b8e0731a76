"""What an actor sees of its surroundings: one inbox it reads, outboxes it writes. Two transports implement them,
`ipc.channel` (ZeroMQ, between processes) and `ipc.memory` (a deque, for tests)."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

T = TypeVar("T")


class Outbox(Protocol):
    def send(self, message: msgspec.Struct) -> None:
        """Queue `message` and return at once."""

    def close(self) -> None: ...


class Inbox(Protocol[T]):
    def drain(self, limit: int = 1024) -> list[T]:
        """Up to `limit` messages that are here now, oldest first; empty if none. Never blocks."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `drain` may return something. False: the time ran out. None: no limit."""

    def post(self, message: Any) -> None:
        """Put a message into this inbox from another thread, or from a signal handler, of the same process."""

    def close(self) -> None: ...


class MessageTooLarge(ValueError):
    """The encoded message is above the receiver's limit."""

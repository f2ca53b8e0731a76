"""One HTTP request as the route sees it: an async source of events, with a bound on what may pile up in it.

Plain text of a stream that keeps up takes a short cut: `direct` writes it to the connection, and no task is woken.

    route waits in `next`, stream begun, nothing queued     text goes to `direct`
    anything else (start, end, log-probabilities, a slow    events queue, `next` returns them and `direct` is off
    client whose connection takes no more)                  until the route waits again
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ipc.messages import Detail

_EVENT_BYTES = 64  # what an event costs beside its text
_LOGPROB_BYTES = 128


class Event(NamedTuple):
    """News of one choice. The last event of a choice has `detail.ended`."""

    choice: int
    text: str
    num_tokens: int
    detail: Detail | None


class Direct(Protocol):
    """A connection that takes text at once and writes it when `flush` is called."""

    @property
    def blocked(self) -> bool:
        """The client is behind: the connection takes no more for now."""

    def add(self, choice: int, text: str) -> bool:
        """True: the first text since the last `flush`, which the caller has to see to."""

    def flush(self) -> None: ...

    def take_back(self) -> list[tuple[int, str]]:
        """The text per choice that is not yet written; it will not be."""


class Handle:
    """The answers to one HTTP request: choice i has the request id `first_id + i`.

    Written by the backend, read by one route. Closed means that nobody listens any more (the client went away or was
    dropped): `next` then returns an empty list.
    """

    def __init__(self, first_id: int, num_choices: int, buffer_bytes: int) -> None:
        self.first_id = first_id
        self.unfinished = set(range(num_choices))
        self.tokenizers: set[str] = set()  # the outboxes of those that were sent its prompts
        self.arrival = time.monotonic_ns()
        self.last_token = [0] * num_choices  # CLOCK_MONOTONIC ns of each choice's latest token, 0: none yet
        self.first_token: dict[int, tuple[int, int]] = {}  # choice -> when its first came, ns it had been queued
        self.closed = False
        self.on_overflow: Callable[[], None] | None = None  # cuts the connection, whose writer may be blocked
        self.direct: Direct | None = None  # set while the route waits for a stream that has begun
        self._begun: Direct | None = None
        self._limit = buffer_bytes
        self._buffered = 0
        self._events: list[Event] = []
        self._news = asyncio.Event()

    def push(self, event: Event) -> bool:
        """False: the reader is so far behind that the bound is passed."""
        if self.closed:
            return True
        if self.direct is not None:  # what comes now is behind the text that it holds
            self._events += [Event(choice, text, 0, None) for choice, text in self.direct.take_back()]
            self.direct = None
        self._events.append(event)
        self._buffered += _EVENT_BYTES + len(event.text)
        if event.detail is not None:
            rows = event.detail.logprobs
            self._buffered += sum(_LOGPROB_BYTES * (1 + len(row.top)) for row in rows)
        self._news.set()
        return self._buffered <= self._limit

    def begin(self, direct: Direct) -> None:
        """From the next `next` on, plain text may go straight to `direct`. The first event must have been sent."""
        self._begun = direct

    async def next(self) -> list[Event]:
        """All events that arrived since the last call, waiting for the first; empty when closed."""
        while not self._events and not self.closed:
            self._news.clear()
            self.direct = self._begun
            await self._news.wait()
        events, self._events, self._buffered = self._events, [], 0
        return [] if self.closed else events

    def close(self) -> None:
        self.closed = True
        if self.direct is not None:
            self.direct.take_back()
            self.direct = None
        self._events.clear()
        self._news.set()

    def request_ids(self) -> list[int]:
        """Ids of the choices that have not ended."""
        return [self.first_id + choice for choice in sorted(self.unfinished)]

    def silent_ids(self) -> list[int]:
        """Those of them that have no token yet: their prompt may still be with its tokenizer."""
        return [self.first_id + choice for choice in sorted(self.unfinished) if not self.last_token[choice]]

"""The answers that clients wait for: what comes for each of them goes to its handle, and what it tells is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Literal

from frontend.handle import Direct, Event, Handle
from frontend.metrics import Metrics
from ipc.codec import unpack_request_ids
from ipc.messages import Deltas, Detail, Ended, Error, Usage
from ipc.recorder.events import LEFT, WRITE
from ipc.recorder.ring import Recorder


class InFlight:
    """Handles by request id: one entry for each choice that has not ended.

    `on_overflow` is called for a handle whose client is too far behind.
    """

    def __init__(self, metrics: Metrics, recorder: Recorder, on_overflow: Callable[[Handle], None]) -> None:
        self.idle = asyncio.Event()  # there are none
        self.idle.set()
        self._metrics = metrics
        self._recorder = recorder
        self._on_overflow = on_overflow
        self._handles: dict[int, Handle] = {}
        self._unflushed: list[Direct] = []

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: Handle) -> None:
        self._handles.update(dict.fromkeys(handle.request_ids(), handle))
        self.idle.clear()

    def forget(self, request_ids: Iterable[int]) -> None:
        """Whatever still comes for them is for nobody."""
        for request_id in request_ids:
            if self._forget(request_id) is not None:
                self._recorder.mark(LEFT, request_id)

    def deltas(self, message: Deltas) -> None:
        """Plain text may wait for `flush`."""
        now = time.monotonic_ns()
        details = {detail.row: detail for detail in message.details}
        ids = unpack_request_ids(message.request_ids)
        handles, gap = self._handles, self._metrics.inter_token
        for row, (request_id, text, count) in enumerate(zip(ids, message.texts, message.num_tokens, strict=False)):
            handle = handles.get(request_id)
            if handle is None:  # cancelled
                continue
            choice = request_id - handle.first_id
            last = handle.last_token[choice]
            # The plain case first: this loop is what the process spends its time on.
            if last and row not in details:
                if count:
                    gap(now - last, count)
                    handle.last_token[choice] = now
                if (direct := handle.direct) is not None and not direct.blocked:
                    if direct.add(choice, text):
                        self._unflushed.append(direct)
                    continue
                detail = None
            else:
                detail = details.get(row)
                if count:
                    self._count(handle, choice, now, last, count)
                if detail is not None:
                    self._note(request_id, choice, handle, detail, now)
            if not handle.push(Event(choice, text, count, detail)):
                self._on_overflow(handle)

    def flush(self) -> None:
        """Write each connection that has text, once."""
        if not self._unflushed:
            return
        unflushed, self._unflushed = self._unflushed, []
        began = self._recorder.begin(WRITE)
        for direct in unflushed:
            direct.flush()
        # One span for all streams, and of none: a request's own are those of its first and last event.
        self._recorder.end(WRITE, began, -1, 0, len(unflushed))

    def end(self, request_id: int, reason: Literal["rejected", "error"], error: Error) -> None:
        """An end that does not come from the engine."""
        handle = self._forget(request_id)
        if handle is None:
            return
        self._recorder.mark(LEFT, request_id)
        choice = request_id - handle.first_id
        handle.unfinished.discard(choice)
        ended = Ended(reason, Usage(0, 0), error=error)
        self._metrics.ended(ended, time.monotonic_ns() - handle.arrival)
        handle.push(Event(choice, "", 0, Detail(row=0, ended=ended)))

    def end_all(self, error: Error) -> None:
        for request_id in list(self._handles):
            self.end(request_id, "error", error)

    def _count(self, handle: Handle, choice: int, now: int, last: int, count: int) -> None:
        if last:
            self._metrics.inter_token(now - last, count)
        else:
            self._metrics.first_token(now - handle.arrival)
        handle.last_token[choice] = now

    def _note(self, request_id: int, choice: int, handle: Handle, detail: Detail, now: int) -> None:
        if detail.opened is not None:
            self._metrics.opened(detail.opened.queued)
            handle.first_token[choice] = (now, detail.opened.queued)
        if detail.ended is not None:
            if (first := handle.first_token.get(choice)) and detail.ended.reason in ("stop", "length"):
                came, queued = first
                tokens = detail.ended.usage.completion_tokens
                self._metrics.phases(max(0, came - handle.arrival - queued), now - came, tokens)
            self._forget(request_id)
            handle.unfinished.discard(choice)
            self._metrics.ended(detail.ended, now - handle.arrival)

    def _forget(self, request_id: int) -> Handle | None:
        handle = self._handles.pop(request_id, None)
        if not self._handles:
            self.idle.set()
        return handle

"""The other processes as the HTTP side sees them: submit, cancel, call, and where their messages are sent on to.

Knows nothing of HTTP. Every request submitted here gets exactly one terminal event per choice, unless it is cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import assert_never

import msgspec

from frontend.errors import ApiError, from_error
from frontend.handle import Handle
from frontend.heartbeat import Heartbeat
from frontend.in_flight import InFlight
from frontend.metrics import Metrics
from frontend.openai.job import Job, Limits
from frontend.request_watch import RequestWatch
from frontend.siblings import Siblings
from ipc.channel import frontend_key, tokenizer_key
from ipc.config import FrontendProcessConfig
from ipc.mailbox import MessageTooLarge, Outbox
from ipc.messages import (
    Abort,
    AskMetrics,
    Decode,
    Decoded,
    Deltas,
    Encode,
    Encoded,
    EngineStats,
    Error,
    FrontendMessage,
    Message,
    MetricsText,
    ModelReady,
    ProcessLost,
    Profile,
    Profiled,
    Rejected,
    RequestList,
    Shutdown,
    Submit,
)
from ipc.recorder.ring import Recorder

logger = logging.getLogger(__name__)


Answer = Encoded | Decoded | Profiled  # to a call, by its id


class Phase(Enum):
    LOADING = "the model is loading"
    READY = "ready"
    LOST = "a part of the server has died"
    STOPPING = "the server is shutting down"


class Backend:
    """One thread, one event loop."""

    def __init__(
        self,
        config: FrontendProcessConfig,
        outboxes: Mapping[str, Outbox],
        metrics: Metrics,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder or Recorder()
        self.phase = Phase.LOADING
        self.model: ModelReady | None = None
        self.accepting = asyncio.Event()  # ModelReady has arrived
        self.stopped = asyncio.Event()  # Shutdown has arrived
        self.names = (config.served_model_name or "default", *config.model_aliases)
        self._config = config
        self._outboxes = outboxes
        self._metrics = metrics
        self._in_flight = InFlight(metrics, self.recorder, self._drop)
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        others = (i for i in range(len(config.endpoints.frontends)) if i != config.index)
        self.siblings = Siblings(config.index, {i: outboxes[frontend_key(i)] for i in others}, metrics)
        self._tokenizers = itertools.cycle(tokenizer_key(i) for i in range(len(config.endpoints.tokenizers)))
        self._next_id = config.index << 48  # so that ids of all frontends differ
        self._heartbeat = Heartbeat(config.stall_seconds)
        self.requests = RequestWatch(config.index, outboxes["engine"])

    @property
    def idle(self) -> asyncio.Event:
        """Set while no request is in flight."""
        return self._in_flight.idle

    @property
    def next_id(self) -> int:
        """The id of the next request's first choice."""
        return self._next_id

    # --- asked by routes --------------------------------------------------------------------------------------------

    def limits(self) -> Limits:
        """Raises `ApiError` 503 unless requests can be accepted now."""
        if self.phase is not Phase.READY or self.model is None:
            raise ApiError(503, self.phase.value, code="not_ready", retry_after=2)
        return Limits(self.model.max_model_len, self.model.vocab_size, self.names)

    def stalled(self) -> str | None:
        """Why the server cannot answer now; None if it is ready and the engine makes progress."""
        if self.phase is not Phase.READY:
            return str(self.phase.value)
        still = self._heartbeat.stalled()
        return None if still is None else f"the engine has made no progress for {still:.0f} s"

    def submit(self, job: Job) -> Handle:
        """Send every prompt of `job` on its way. Raises `ApiError`, then nothing is in flight."""
        self.limits()
        self._check_room(job.num_choices)
        n = job.sampling.n
        # What is not streamed is kept until the end anyway; only a client that reads too slowly needs a bound.
        buffer_bytes = self._config.stream_buffer_bytes if job.stream else sys.maxsize
        handle = Handle(self._take_ids(job.num_choices), job.num_choices, buffer_bytes)
        self._in_flight.add(handle)
        self._metrics.accepted(job.num_choices)
        try:
            for i, prompt in enumerate(job.prompts):
                first = handle.first_id + i * n
                message = self._submit_message(job, prompt, list(range(first, first + n)), handle.arrival)
                tokenizer = next(self._tokenizers)
                handle.tokenizers.add(tokenizer)
                self._send(tokenizer, message)
        except ApiError:
            self.cancel(handle)
            raise
        return handle

    def cancel(self, handle: Handle) -> None:
        """Nobody wants these answers any more. Does nothing to choices that have ended."""
        handle.close()
        ids, silent = handle.request_ids(), handle.silent_ids()
        handle.unfinished.clear()
        self._in_flight.forget(ids)
        if ids:
            self._metrics.cancelled(len(ids))
            self._send("engine", Abort(request_ids=ids))
        if silent:
            for tokenizer in handle.tokenizers:
                self._send(tokenizer, Abort(request_ids=silent))

    async def encode(self, prompt: msgspec.Raw) -> Encoded:
        """`prompt`: an encoded `Prompt`. Raises `ApiError`."""
        call_id = self._take_ids(1)
        message = Encode(call_id=call_id, frontend=self._config.index, prompt=prompt)
        answer = await self._call(call_id, message)
        assert isinstance(answer, Encoded)
        return answer

    async def decode(self, ids: bytes, skip_special_tokens: bool) -> Decoded:
        """Raises `ApiError`."""
        call_id = self._take_ids(1)
        message = Decode(call_id=call_id, frontend=self._config.index, ids=ids, skip_special_tokens=skip_special_tokens)
        answer = await self._call(call_id, message)
        assert isinstance(answer, Decoded)
        return answer

    async def profile(self, on: bool) -> None:
        """Start or stop the capture of the engine's profiler. Raises `ApiError`."""
        call_id = self._take_ids(1)
        await self._call(call_id, Profile(call_id=call_id, frontend=self._config.index, on=on), to="engine")

    # --- told by the other processes --------------------------------------------------------------------------------

    def deliver(self, batch: Iterable[FrontendMessage]) -> None:
        """One wake-up: each stream's connection is written at most once, at the end."""
        try:
            self._dispatch(batch)
        finally:
            self._in_flight.flush()

    def _dispatch(self, batch: Iterable[FrontendMessage]) -> None:
        for message in batch:
            match message:
                case Deltas():
                    self._in_flight.deltas(message)
                case Rejected():
                    for request_id in message.request_ids:
                        self._in_flight.end(request_id, "rejected", message.error)
                case Encoded() | Decoded() | Profiled():
                    future = self._calls.pop(message.call_id, None)
                    if future is not None and not future.done():
                        future.set_result(message)
                case EngineStats():
                    self._heartbeat.beat(message)
                    self._metrics.heard(message)
                case AskMetrics() | MetricsText():
                    self.siblings.deliver(message)
                case RequestList():
                    self.requests.deliver(message)
                case ModelReady():
                    self.model = message
                    self._metrics.ready(message)
                    self.phase = Phase.READY
                    self._heartbeat.start()
                    self.accepting.set()
                case ProcessLost():
                    if self.model is not None:  # a failed start is told by whoever started us, and why
                        logger.error("%s died: %s", message.name, message.detail)
                    self.phase = Phase.LOST
                    self.fail_all(Error(503, f"{message.name} died: {message.detail}", type="server_error"))
                case Shutdown():
                    self.phase = Phase.STOPPING
                    self.stopped.set()
                case _:
                    assert_never(message)

    def fail_all(self, error: Error) -> None:
        """End everything in flight with `error`."""
        self._in_flight.end_all(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(from_error(error))
        self._calls.clear()

    # --- private ----------------------------------------------------------------------------------------------------

    def _drop(self, handle: Handle) -> None:
        logger.warning("dropped a client that left more than %d bytes unread", self._config.stream_buffer_bytes)
        self.cancel(handle)
        if handle.on_overflow is not None:
            handle.on_overflow()

    async def _call(self, call_id: int, message: Message, to: str | None = None) -> Answer:
        self.limits()
        self._check_room(1)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        outbox = to or next(self._tokenizers)
        try:
            self._send(outbox, message)
            answer = await future
        except asyncio.CancelledError:
            if to is None:
                self._send(outbox, Abort(request_ids=[call_id]))
            raise
        finally:
            self._calls.pop(call_id, None)
        if answer.error is not None:
            raise from_error(answer.error)
        return answer

    def _check_room(self, wanted: int) -> None:
        limit = self._config.max_queued_requests
        if wanted > limit:
            raise ApiError(400, f"prompts times n must be at most {limit} on this server, got {wanted}", "n")
        used = len(self._in_flight) + len(self._calls)
        share = math.ceil(limit / len(self._config.endpoints.frontends))
        # A request that is larger than this frontend's share still gets its turn when the frontend has nothing else.
        if used and used + wanted > share:
            raise ApiError(
                503, f"{used} requests are in progress, the limit is {share}", code="overloaded", retry_after=1
            )

    def _take_ids(self, count: int) -> int:
        first = self._next_id
        self._next_id += count
        return first

    def _submit_message(self, job: Job, prompt: msgspec.Raw, ids: list[int], arrival: int) -> Submit:
        return Submit(
            request_ids=ids,
            frontend=self._config.index,
            prompt=prompt,
            sampling=job.sampling,
            arrival=arrival,
            priority=job.priority,
            echo=job.echo,
            cache_salt=job.cache_salt,
        )

    def _send(self, name: str, message: Message) -> None:
        try:
            self._outboxes[name].send(message)
        except MessageTooLarge as error:
            raise ApiError(413, f"the request is too large: {error}", code="too_large") from None
        except (OverflowError, ValueError, RecursionError) as error:
            raise ApiError(400, f"the request holds a value that cannot be processed: {error}") from None

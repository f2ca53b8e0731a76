"""The requests of one client process: streamed, over a connection each, every event with the time of its arrival."""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import httptools
import msgspec

from frontend.loadtest.workload import Request
from frontend.unreachable import explained

TIMEOUT_S = 6 * 3600.0


class Target(msgspec.Struct, frozen=True):
    """Whom to ask, and how."""

    url: str  # the server's root
    chat: bool
    model: str | None
    api_key: str | None
    extra: dict[str, Any]  # more fields of the body

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, request: Request) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if self.chat:
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt
        return msgspec.json.encode({key: value for key, value in fields.items() if value is not None})


class Outcome(msgspec.Struct):
    """One request. Times are seconds; those of the first and of later events count from when it was sent."""

    ttft: float = 0.0
    latency: float = 0.0  # to the last token
    itl: list[float] = []  # between events with text, in order
    prompt_tokens: int = 0
    output_tokens: int = 0
    model: str = ""  # as the server calls it
    error: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    model: str | None = None
    error: Any = None


class Exchange(asyncio.Protocol):
    """One request on one connection; `done` is set when its outcome is complete."""

    def __init__(self, head: bytes, body: bytes, decoder: msgspec.json.Decoder[_Event]) -> None:
        self.outcome = Outcome(itl=[])
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = head + body
        self._decoder = decoder
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._begin = self._last = self._now = 0.0
        self._events = 0
        self._complete = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._begin = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"{type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._complete:
            self._fail(str(exc or "the connection closed in the middle of the answer"))
        self._finish()

    # --- called by the parser ---------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._fail(f"HTTP {self._parser.get_status_code()}: {body[:500].decode(errors='replace')}")
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._on_event(event[6:])

    def on_message_complete(self) -> None:
        if not self._complete:
            self._fail("the answer ended without [DONE]")
        self._finish()

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._complete = True
            return
        try:
            event = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            self._fail(f"an event that is no chunk: {error}")
            return
        outcome = self.outcome
        if event.error is not None:
            self._fail(f"the server broke off: {str(event.error)[:500]}")
        if event.usage is not None:
            outcome.prompt_tokens, outcome.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        if not any(_has_text(choice) for choice in event.choices):
            return
        self._events += 1
        if self._events == 1:
            outcome.model = event.model or ""
            outcome.ttft = self._now - self._begin
        else:
            outcome.itl.append(self._now - self._last)
        self._last = self._now
        outcome.latency = self._now - self._begin

    def _fail(self, why: str) -> None:
        self.outcome.error = self.outcome.error or why

    def _finish(self) -> None:
        # A server that tells no usage: one token an event, as others count too.
        self.outcome.output_tokens = self.outcome.output_tokens or self._events
        if not self.done.done():
            self.done.set_result(None)


def _has_text(choice: _Choice) -> bool:
    return bool(choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning_content)))


async def run(
    target: Target, requests: Sequence[Request], max_concurrency: int | None = None, start: float | None = None
) -> list[Outcome]:
    """Send every request at its time, `start` being a CLOCK_MONOTONIC moment; at most so many at once."""
    room = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    start = time.monotonic() if start is None else start

    async def send(request: Request) -> Outcome:
        await asyncio.sleep(max(0.0, start + request.at - time.monotonic()))
        async with room:
            return await ask(target, request)

    return await asyncio.gather(*(send(request) for request in requests))


async def ask(target: Target, request: Request) -> Outcome:
    """Never raises for the server's sake: what went wrong is in the outcome."""
    parts = urllib.parse.urlsplit(target.url)
    secure = parts.scheme == "https"
    body = target.body(request)
    key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
    head = (
        f"POST {parts.path.rstrip('/').removesuffix('/v1')}{target.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
        f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    decoder = msgspec.json.Decoder(_Event)
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            transport, exchange = await asyncio.get_running_loop().create_connection(
                lambda: Exchange(head.encode(), body, decoder),
                parts.hostname or "localhost",
                parts.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
            )
            await exchange.done
        return exchange.outcome
    except OSError as error:  # TimeoutError too
        return Outcome(error=f"{type(error).__name__}: {explained(error)}")
    finally:
        if transport is not None:
            transport.close()

"""Reading bodies and writing responses in raw ASGI, and the uvicorn protocol with the limits it lacks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Protocol, TypeVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from frontend.errors import ApiError, error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]
T = TypeVar("T")

MAX_HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 30.0  # from a connection's start, or the first byte of its next request, to the end of the headers
BODY_SECONDS = 30.0  # between two pieces of a body
BODIES_AT_ONCE = 8  # so many bodies of the largest size fit into memory together
# Scope extension: the `Connection` of the request.
CONNECTION = "gapless.connection"
_CHUNK_HEADS = [b"%x\r\n" % size for size in range(4096)]


class Connection(Protocol):
    """What ASGI has no words for. Optional: without it everything goes through `send`."""

    @property
    def blocked(self) -> bool:
        """So much is unread by the client that it should be sent no more for now."""

    def write_chunk(self, data: bytes) -> None:
        """More of a response whose headers were sent by `send`, with no length; `send` sends the last of it."""

    def cut(self) -> None:
        """Close the connection, even if its writer is blocked."""

    on_lost: Callable[[], None] | None
    """Called when the connection is gone. The ASGI messages tell only the last request that came in, which need not be
    the one that is answered."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete, or answered."""


class BodyReader:
    """Reads request bodies of at most `limit` bytes, and of at most BODIES_AT_ONCE times as many bytes together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._room = limit * BODIES_AT_ONCE

    @contextlib.asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes | bytearray]:
        """The body, which counts until the `async with` is left: its prompts live as long as their answers.

        Raises `ApiError` 413 above the limit, 503 above that of all bodies, 408 when the client stops sending,
        `ClientGone`.
        """
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._limit:
                raise self._too_large()
        body = bytearray()  # grows in place: to join the pieces of a large one would hold up everyone
        size = 0
        try:
            more = True
            while more:
                piece, more = await _next_piece(receive)
                size += len(piece)
                self._room -= len(piece)
                if size > self._limit:
                    raise self._too_large()
                if self._room < 0:
                    raise ApiError(
                        503, "too many large requests are in progress", code="overloaded", retry_after=1, close=True
                    )
                body += piece
            whole = [body]
            del body
            yield whole.pop()  # not kept here: once parsed, the bytes may go
        finally:
            self._room += size

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request body must have at most {self._limit} bytes", code="too_large", close=True)


async def _next_piece(receive: Receive) -> tuple[bytes, bool]:
    """A piece of the body, and whether there is more."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            message = await receive()
    except TimeoutError:
        raise ApiError(408, f"no part of the request body came for {BODY_SECONDS:.0f} s", close=True) from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


@contextlib.asynccontextmanager
async def watching(scope: Scope, receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """While inside, `on_gone` is called when the client has left, perhaps twice. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
    if connection is not None:
        connection.on_lost = on_gone
    watcher = asyncio.ensure_future(watch())  # also needed because nothing is read of a connection before `receive`
    try:
        yield
    finally:
        watcher.cancel()
        if connection is not None:
            connection.on_lost = None


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client leaves before, `work` is cancelled: `ClientGone`."""
    task = asyncio.ensure_future(work)
    left = False

    def leave() -> None:
        nonlocal left
        left = task.cancel() or left

    async with watching(scope, receive, leave):
        try:
            return await task
        except asyncio.CancelledError:
            if left:
                raise ClientGone from None
            raise


async def respond(send: Send, status: int, headers: HeaderList, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a bound on the size of headers, on the time they take, and short cuts to the connection.

    It is the request's `Connection`: a `send` costs more than what it sends when that is one token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._in_headers = True
        self._header_timer: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()

    @property
    def blocked(self) -> bool:
        return self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        if self.transport.is_closing():  # the client left: its request's task will hear of it
            return
        size = len(data)
        head = _CHUNK_HEADS[size] if size < len(_CHUNK_HEADS) else b"%x\r\n" % size
        self.transport.write(b"".join((head, data, b"\r\n")))

    def cut(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        if self._header_timer is None:  # not the connection's first request
            self._start_timer()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        self._stop_timer()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES:
            raise ValueError("headers too large")  # the parser turns it into `send_400_response`
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._write_error(400, "Bad Request", f"invalid HTTP request (headers may have {MAX_HEADER_BYTES} bytes)")

    def _refuse_headers(self) -> None:
        if not self.transport.is_closing():
            self._write_error(431, "Request Header Fields Too Large", f"headers may have {MAX_HEADER_BYTES} bytes")

    def _write_error(self, status: int, phrase: str, message: str) -> None:
        body = error_body(message, "invalid_request_error", None, None)
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._headers_late)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

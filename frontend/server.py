"""uvicorn inside our own event loop: our listening socket, our inbox beside it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn

from frontend.app import App
from frontend.backend import Backend
from frontend.http import BoundedHttpProtocol
from ipc.aio import AsyncReceiver
from ipc.errors import UserError
from ipc.messages import Error, FrontendMessage, Shutdown
from ipc.recorder.events import DELIVER


class Server(uvicorn.Server):
    """Signals are not its business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, *, shared: bool = False, first: bool = True) -> socket.socket:
    """A bound, listening socket. Raises `UserError` if the address cannot be had.

    `shared`: several frontends bind the same port and the kernel spreads new connections over them. `first` is the one
    that finds out whether somebody else has it: two sockets that both share are no conflict for the kernel, even if
    they are two servers.
    """
    if shared and first and port:
        listen(host, port).close()
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise UserError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another --port"
        ) from None
    sock.setblocking(False)
    return sock


def client_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a socket bound to `host` and `port`; no slash at the end."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    app: App, backend: Backend, inbox: AsyncReceiver[FrontendMessage], sock: socket.socket, grace_seconds: float
) -> None:
    """Run until Shutdown: then stop accepting, let answers in flight go on for `grace_seconds`, end the rest.

    Raises what a message from another process raised.
    """
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(grace_seconds) + 2,
    )
    server = Server(config)
    reader = asyncio.ensure_future(_read(inbox, backend))
    # A message that cannot be handled ends the process: one that hears nothing would let every answer hang.
    reader.add_done_callback(lambda _: backend.deliver([Shutdown()]))
    stopper = asyncio.ensure_future(_stop(server, backend, grace_seconds))
    try:
        await server.serve([sock])
    finally:
        for task in (reader, stopper):
            task.cancel()
        await asyncio.gather(reader, stopper, return_exceptions=True)
        await app.close()
    if not reader.cancelled():
        reader.result()


async def _read(inbox: AsyncReceiver[FrontendMessage], backend: Backend) -> None:
    async for batch in inbox:
        began = backend.recorder.begin(DELIVER)
        backend.deliver(batch)
        backend.recorder.end(DELIVER, began, 0, len(batch))


async def _stop(server: Server, backend: Backend, grace_seconds: float) -> None:
    await backend.stopped.wait()
    server.should_exit = True  # closes the listening socket
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(backend.idle.wait(), grace_seconds)
    backend.fail_all(Error(503, "the server is shutting down", type="server_error"))

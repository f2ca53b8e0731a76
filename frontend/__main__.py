"""`python -m frontend CONFIG.json`: the HTTP process."""

from __future__ import annotations

import asyncio
import gc
import signal

import uvloop

from frontend.app import App
from frontend.backend import Backend
from frontend.metrics import Metrics
from frontend.server import client_url, listen, serve
from ipc.aio import AsyncReceiver
from ipc.channel import Receiver, connect
from ipc.config import FrontendProcessConfig
from ipc.messages import FrontendMessage, Shutdown
from ipc.runtime import Child, child_main

# What is taken in between two turns of the event loop: a backlog must not hold up /health and new requests.
MESSAGES_PER_TURN = 64


def body(config: FrontendProcessConfig, child: Child) -> None:
    uvloop.run(_run(config, child))


async def _run(config: FrontendProcessConfig, child: Child) -> None:
    metrics = Metrics(config.served_model_name)
    outboxes = connect(config.endpoints, "tokenizers", "engine", "frontends")
    backend = Backend(config, outboxes, metrics, child.recorder)
    inbox: AsyncReceiver[FrontendMessage] = AsyncReceiver(
        Receiver(config.endpoints.frontends[config.index], FrontendMessage), limit=MESSAGES_PER_TURN
    )
    sock = listen(config.host, config.port, shared=len(config.endpoints.frontends) > 1, first=config.index == 0)
    host, port = sock.getsockname()[:2]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: backend.deliver([Shutdown()]))
    gc.collect()
    gc.freeze()  # start-up's objects live for ever: no collection needs to look at them again
    child.ready({"host": host, "port": port, "url": client_url(host, port)})
    announcing = asyncio.ensure_future(_announce(backend, child))
    try:
        await serve(App(config, backend, metrics), backend, inbox, sock, config.grace_seconds)
    finally:
        announcing.cancel()
        inbox.close()
        for outbox in outboxes.values():
            outbox.close(linger_s=1.0)


async def _announce(backend: Backend, child: Child) -> None:
    await backend.accepting.wait()
    child.serving()


if __name__ == "__main__":
    child_main("frontend", FrontendProcessConfig, body)

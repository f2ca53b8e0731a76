"""The ASGI application: guard, the two hot routes, and a Starlette router for everything else."""

from __future__ import annotations

import difflib
import logging
import time
import uuid
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.routing import Router

from frontend.backend import Backend
from frontend.cold import ColdRoutes
from frontend.errors import ApiError
from frontend.generate import Generator
from frontend.guard import Guard
from frontend.http import BodyReader, ClientGone, HeaderList, Receive, Scope, Send, respond
from frontend.metrics import Metrics
from frontend.openai.parse import CHAT, COMPLETIONS
from frontend.parser.client import BodyParser
from ipc.config import FrontendProcessConfig
from ipc.recorder.events import PARSE

logger = logging.getLogger(__name__)


class App:
    """`await app(scope, receive, send)`. Every failure becomes an error object; none reaches the server."""

    def __init__(self, config: FrontendProcessConfig, backend: Backend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics
        self._reader = BodyReader(config.max_body_bytes)
        self._guard = Guard(config.host, config.api_key)
        self._parser = BodyParser()
        self._cold = ColdRoutes(config, backend, self._parser, self._reader)
        routes = self._cold.routes()
        self._router = Router(routes, redirect_slashes=False)
        self._paths = [CHAT, COMPLETIONS, *(route.path for route in routes if "{" not in route.path)]
        self._generator = Generator(backend, self._cold.model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        try:
            self._guard.check(path, scope["headers"])
            if path in (CHAT, COMPLETIONS):
                status = await self._generate(path, scope, receive, send)
                if status is not None:
                    self._metrics.responded(path, status)
            else:
                scope["app"] = self  # makes the router raise what it cannot route
                await self._router(scope, receive, send)
        except ClientGone:
            return
        except ApiError as error:
            await self._refuse(path, error, send)
        except HTTPException as error:
            await self._refuse(path, _routing_error(scope, error, self._paths), send)
        except Exception:
            incident = uuid.uuid4().hex
            logger.exception("request failed (%s)", incident)
            await self._refuse(path, ApiError(500, f"internal error {incident}, see the server's log"), send)

    async def _generate(self, path: str, scope: Scope, receive: Receive, send: Send) -> int | None:
        if scope["method"] != "POST":
            raise ApiError(405, f"{path} takes POST, not {scope['method']}", allow="POST")
        limits = self._backend.limits()
        async with self._reader.read(scope, receive) as body:
            began = time.monotonic_ns()
            try:
                job = await self._parser.job(path, body, limits)
            finally:
                recorder = self._backend.recorder
                recorder.span(PARSE, began, time.monotonic_ns(), self._backend.next_id, len(body))
            del body
            return await self._generator.answer(job, scope, receive, send)

    async def close(self) -> None:
        """Ends the process that it may have started."""
        await self._parser.close()

    async def _refuse(self, path: str, error: ApiError, send: Send) -> None:
        self._metrics.responded(path if path in (CHAT, COMPLETIONS) else "other", error.status)
        headers: HeaderList = [*error.headers(), (b"x-request-id", f"req-{uuid.uuid4().hex}".encode())]
        await respond(send, error.status, headers, error.body())


def _routing_error(scope: Scope, error: HTTPException, paths: Sequence[str]) -> ApiError:
    path = scope["path"][:200]
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return ApiError(405, f"{path} takes {allow}, not {scope['method']}", allow=allow)
    close = difflib.get_close_matches(path, paths, n=1, cutoff=0.8)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ApiError(404, f"there is no {path} here{hint}", code="not_found")

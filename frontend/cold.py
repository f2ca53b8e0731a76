"""Routes that are called now and then: models, tokenize, health, metrics, version, the page."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from importlib.resources import files
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.backend import Backend
from frontend.errors import ApiError
from frontend.http import BodyReader, while_connected
from frontend.openai.job import check_model
from frontend.openai.parse import DETOKENIZE, TOKENIZE
from frontend.parser.client import BodyParser
from frontend.version import package_version
from ipc.codec import unpack_ids
from ipc.config import FrontendProcessConfig
from ipc.messages import RequestState


class ColdRoutes:
    """`routes` is the table; methods are the endpoints. All raise `ApiError`."""

    def __init__(self, config: FrontendProcessConfig, backend: Backend, parser: BodyParser, reader: BodyReader) -> None:
        self.model = backend.names[0]
        self._reader = reader
        self._backend = backend
        self._parser = parser
        self._created = int(time.time())
        self._page, self._page_headers = load_page()

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/requests", self.requests, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.one_model, methods=["GET"]),
            Route(TOKENIZE, self.tokenize, methods=["POST"]),
            Route(DETOKENIZE, self.detokenize, methods=["POST"]),
            Route("/profile/start", self.profile_start, methods=["POST"]),
            Route("/profile/stop", self.profile_stop, methods=["POST"]),
        ]

    async def page(self, _: Request) -> Response:
        return Response(self._page, headers=self._page_headers, media_type="text/html")

    async def health(self, _: Request) -> Response:
        """Alive: this process answers. Says nothing of the engine; see `ready`."""
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        reason = self._backend.stalled()
        if reason is not None:
            raise ApiError(503, reason, code="not_ready", retry_after=2)
        return _json({"status": "ready"})

    async def version(self, _: Request) -> Response:
        return _json({"version": package_version()})

    async def metrics(self, _: Request) -> Response:
        text = await self._backend.siblings.metrics_text()
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def requests(self, _: Request) -> Response:
        """Those in the engine. Nothing of what they say."""
        self._backend.limits()
        found = await self._backend.requests.ask()
        if found is None:
            raise ApiError(503, "the engine does not answer", code="not_ready", retry_after=2)
        return _json({"total": found.total, "requests": [_request_state(each) for each in found.requests]})

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self._backend.limits())
        return _json(self._card())

    async def tokenize(self, request: Request) -> Response:
        limits = self._backend.limits()
        async with self._reader.read(request.scope, request.receive) as body:
            wanted = await self._parser.tokenize(body, limits)
            encoded = await while_connected(request.scope, request.receive, self._backend.encode(wanted.prompt))
        ids = unpack_ids(encoded.ids)
        return _json(
            {
                "count": len(ids),
                "max_model_len": limits.max_model_len,
                "tokens": ids,
                "token_strs": encoded.tokens if wanted.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        limits = self._backend.limits()
        async with self._reader.read(request.scope, request.receive) as body:
            wanted = await self._parser.detokenize(body, limits)
        call = self._backend.decode(wanted.ids, wanted.skip_special_tokens)
        decoded = await while_connected(request.scope, request.receive, call)
        return _json({"prompt": decoded.text})

    async def profile_start(self, _: Request) -> Response:
        await self._backend.profile(True)
        return _json({"status": "started"})

    async def profile_stop(self, _: Request) -> Response:
        await self._backend.profile(False)
        return _json({"status": "stopped"})

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "gapless",
            "root": self.model,
            "max_model_len": self._backend.limits().max_model_len,
        }


def _request_state(state: RequestState) -> dict[str, Any]:
    return {
        "id": str(state.request_id),  # JSON's readers take large numbers for floats
        "state": state.state,
        "age_seconds": round(state.age / 1e9, 3),
        "prompt_tokens": state.prompt_tokens,
        "computed_tokens": state.computed_tokens,
        "output_tokens": state.output_tokens,
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def load_page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers: only its own script and style may run, and it may talk to this server alone."""
    page = files("frontend.page").joinpath("index.html").read_bytes()
    policy = (
        f"default-src 'none'; script-src {_hashes(page, b'script')}; style-src {_hashes(page, b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _hashes(page: bytes, tag: bytes) -> str:
    blocks = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(block).digest()).decode()}'" for block in blocks)

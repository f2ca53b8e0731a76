"""The API key, and the checks that keep other sites' pages away from a local server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from frontend.errors import ApiError
from frontend.guard import Guard, is_loopback
from tests.frontend.fake import FakeServer

KEY = "sëcret-123"
PROTECTED = [
    "/v1/models", "/v1/models/x", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/metrics",
    "/profile/start", "/profile/stop", "/requests",
    "/version", "/nothing", "/health/", "/health/../v1/models", "//health", "/Health", "/ready%2f..",
]  # fmt: skip

RIGHT: list[Any] = [{"authorization": b"Bearer " + KEY.encode()}, {"x-api-key": KEY.encode()}]
WRONG: list[Any] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": KEY.encode()},
    {"authorization": b"Bearer " + KEY.encode()[:-1]},
    {"x-api-key": "x"},
]


@pytest.fixture(scope="module")
def locked(make_server: Callable[..., FakeServer]) -> FakeServer:
    return make_server(api_key=KEY)


@pytest.mark.parametrize("path", PROTECTED)
def test_everything_but_probes_and_page_needs_the_key(locked: FakeServer, path: str) -> None:
    with httpx.Client(trust_env=False) as http:
        for headers in WRONG:
            for method in ("GET", "POST"):
                response = http.request(method, locked.url + path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"


def test_the_key_opens(locked: FakeServer) -> None:
    with httpx.Client(base_url=locked.url, trust_env=False) as http:
        for headers in RIGHT:
            assert http.get("/v1/models", headers=headers).status_code == 200
            assert http.get("/metrics", headers=headers).status_code == 200
        for path in ("/", "/health", "/ready"):
            assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80", "app.localhost", "LOCALHOST."]
)
def test_local_names_are_answered(host: str) -> None:
    Guard("127.0.0.1", None).check("/health", [(b"host", host.encode())])


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "", "[::2]"]
)
def test_rebound_names_are_refused_on_loopback_only(host: str) -> None:
    with pytest.raises(ApiError) as refused:
        Guard("localhost", None).check("/health", [(b"host", host.encode())])
    assert refused.value.status == 403
    Guard("0.0.0.0", None).check("/health", [(b"host", host.encode())])


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1:8000", True),
        ("app://obsidian.md", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("null", False),
        ("http://[", False),
    ],
)
def test_pages_of_other_sites_are_refused(server: FakeServer, origin: str, allowed: bool) -> None:
    response = httpx.get(f"{server.url}/v1/models", headers={"origin": origin}, trust_env=False)
    assert response.status_code == (200 if allowed else 403)


def test_rebinding_over_http(server: FakeServer) -> None:
    refused = httpx.get(f"{server.url}/", headers={"host": "evil.example"}, trust_env=False)
    assert refused.status_code == 403
    assert "--host 0.0.0.0" in refused.json()["error"]["message"]


def test_loopback_names() -> None:
    assert is_loopback("127.8.9.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("localhost.example")

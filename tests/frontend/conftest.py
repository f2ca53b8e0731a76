from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.frontend.fake import Fake, FakeServer


@pytest.fixture(scope="session")
def make_server() -> Iterator[Callable[..., FakeServer]]:
    """Servers that live until the end of the session. Socket paths must be short, hence no tmp_path."""
    with ExitStack() as stack:

        def make(**settings: Any) -> FakeServer:
            run_dir = tempfile.mkdtemp(prefix="gl-")
            stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
            server = FakeServer(Path(run_dir), **settings)
            stack.callback(server.close)
            return server

        yield make


@pytest.fixture(scope="session")
def server(make_server: Callable[..., FakeServer]) -> FakeServer:
    return make_server()


@pytest.fixture
def fake(server: FakeServer) -> Fake:
    return server.fake


@pytest.fixture
def http(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client

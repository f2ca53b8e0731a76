"""Large bodies are parsed beside the event loop, with the same results as small ones."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from frontend.parser.client import LARGE_BODY
from tests.frontend.fake import MODEL, FakeServer

USER = {"role": "user", "content": "hi"}
BODIES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": [USER], "tools": [{"a": [1, None]}], "n": 2}),
    ("/v1/chat/completions", {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [USER], "temperature": 200}),
    ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"a": 2**70}}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1, "priority": 3, "cache_salt": "s"}),
    ("/v1/completions", {"prompt": [1, 2, 3], "seed": 2**63 - 1, "stop": ["x"], "logit_bias": {"3": 1.5}}),
    ("/v1/completions", {"prompt": [1, -2, 3]}),
    ("/v1/completions", {"prompt": "a", "model": "another", "temperature": 200}),
    ("/v1/completions", {"prompt": 7}),
    ("/tokenize", {"prompt": "AB", "return_token_strs": True}),
    ("/tokenize", {"messages": [USER], "model": MODEL}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [65, 66]}),
    ("/detokenize", {"tokens": [65, 1000]}),
]


def plain(response: httpx.Response) -> Any:
    """What does not differ between two answers to the same request."""
    try:
        body = response.json()
    except ValueError:
        *events, _ = response.text.split("\n\n")
        body = [json.loads(event.removeprefix("data: ")) for event in events if event != "data: [DONE]"]
        # How texts are joined depends on when they come.
        text = "".join(c["delta"].get("content", "") for chunk in body for c in chunk["choices"])
        return response.status_code, text, body[-1]["usage"]
    for name in ("id", "created"):
        body.pop(name, None)
    return response.status_code, body


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_size_makes_no_difference(http: httpx.Client, server: FakeServer, path: str, body: Any) -> None:
    small = json.dumps(body).encode()
    expected = plain(http.post(path, content=small))
    first = server.fake.submits[-1] if server.fake.submits else None
    assert plain(http.post(path, content=small + b" " * LARGE_BODY)) == expected
    if expected[0] == 200 and path.startswith("/v1") and first is not None:
        second = server.fake.last()
        assert (second.prompt, second.sampling, second.priority) == (first.prompt, first.sampling, first.priority)


def test_what_is_no_json_is_refused_alike(http: httpx.Client) -> None:
    for small in (b"", b"{", b"[" * 2000, b"\xff", b'{"prompt": "\xff"}', b'{"prompt": "a\\ud800b"}'):
        answers = [http.post("/v1/completions", content=body) for body in (small, b" " * LARGE_BODY + small)]
        assert [answer.status_code for answer in answers] == [400, 400], small
        assert answers[0].json()["error"]["code"] == answers[1].json()["error"]["code"]


def parsers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.cmdline()[0].startswith("gapless: parser")]


def test_health_answers_while_a_large_body_is_parsed(make_server: Callable[..., FakeServer]) -> None:
    server = make_server()
    body = json.dumps({"messages": [USER] * 200_000}).encode()
    done = threading.Event()

    def send() -> None:
        httpx.post(f"{server.url}/v1/chat/completions", content=body, trust_env=False, timeout=120)
        done.set()

    sender = threading.Thread(target=send)
    sender.start()
    answered = 0
    with httpx.Client(base_url=server.url, trust_env=False, timeout=120) as http:
        while not done.is_set():
            assert http.get("/health").status_code == 200
            answered += not done.is_set()
    sender.join()
    assert answered >= 10


def test_a_killed_parser_costs_nothing_and_none_outlives_its_frontend(make_server: Callable[..., FakeServer]) -> None:
    before = {child.pid for child in parsers()}
    server = make_server()
    body = json.dumps({"prompt": "hi"}).encode() + b" " * LARGE_BODY
    for _ in range(3):
        answer = httpx.post(f"{server.url}/v1/completions", content=body, trust_env=False, timeout=60)
        assert answer.status_code == 200
        (mine,) = [child for child in parsers() if child.pid not in before]
        os.kill(mine.pid, signal.SIGKILL)
    answer = httpx.post(f"{server.url}/v1/completions", content=body, trust_env=False, timeout=60)
    assert answer.status_code == 200
    server.close()
    end = time.monotonic() + 60
    while [child for child in parsers() if child.pid not in before]:
        assert time.monotonic() < end, "the parsing process is still there"
        time.sleep(0.05)


def test_a_process_that_cannot_be_started_is_no_fault_of_the_client(
    make_server: Callable[..., FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    server = make_server()
    body = json.dumps({"prompt": "hi"}).encode() + b" " * LARGE_BODY
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        monkeypatch.setattr("asyncio.create_subprocess_exec", fail)
        for path in ("/v1/completions", "/tokenize"):
            answer = http.post(path, content=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert answer.headers["retry-after"] == "1"
        assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200  # small ones need no process
        monkeypatch.undo()
        assert http.post("/v1/completions", content=body).status_code == 200
    assert server.backend.idle.is_set()

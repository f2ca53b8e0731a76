"""A chat that is rendered beside the tokenizer, and how the process that does it ends with the server."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from .conftest import DEADLINE_S, alive, eventually

# Small enough for the test's context, but its message is large: a template does not show what it does not know.
LARGE = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"a": {"b": [1, {"c": None}]}}] * 30_000,
    "max_tokens": 2,
}

pytestmark = pytest.mark.model


def renderers(tokenizer: int) -> list[int]:
    found = psutil.Process(tokenizer).children()
    return [child.pid for child in found if "renderer" in " ".join(child.cmdline())]


@pytest.mark.parametrize("how", ["stopped", "supervisor killed"])
def test_a_large_chat_is_answered_and_leaves_no_process(real: Callable[..., Any], how: str) -> None:
    run = real()
    run.wait_for("ready")
    url = run.events[-1]["facts"]["frontend"]["url"]

    def ask(body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "temperature": 0}, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    small = ask({**LARGE, "tools": None})
    assert renderers(run.pids["tokenizer_proc"]) == []
    for _ in range(2):
        large = ask(LARGE)
        assert large["choices"][0]["message"] == small["choices"][0]["message"]
        assert large["usage"]["prompt_tokens"] == small["usage"]["prompt_tokens"]
    (renderer,) = renderers(run.pids["tokenizer_proc"])
    if how == "stopped":
        run.process.send_signal(signal.SIGTERM)
        assert run.exit_code() == 0
    else:
        run.process.kill()
    run.assert_nothing_left()
    eventually(lambda: not alive(renderer), "the end of the renderer")


def test_a_server_stops_while_it_is_at_work(real: Callable[..., Any]) -> None:
    run = real()
    run.wait_for("ready")
    url = run.events[-1]["facts"]["frontend"]["url"]
    endless = {"messages": [{"role": "user", "content": "Hi"}] * 300_000, "max_tokens": 1}
    statuses: list[int] = []

    def ask() -> None:
        answer = httpx.post(f"{url}/v1/chat/completions", json=endless, timeout=DEADLINE_S)
        statuses.append(answer.status_code)

    client = threading.Thread(target=ask)
    client.start()
    eventually(lambda: renderers(run.pids["tokenizer_proc"]), "a renderer")
    run.process.send_signal(signal.SIGTERM)
    assert run.exit_code() == 0
    client.join(DEADLINE_S)
    assert statuses == [503]
    run.assert_nothing_left()
    assert "Traceback" not in run.stderr
    assert "killed" not in run.stderr, run.stderr

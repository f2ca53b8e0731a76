"""Start, death and end of the real four processes, with a request in flight."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from frontend.topology import Server
from ipc.config import ServerOptions

from .conftest import DEADLINE_S

NAMES = ("frontend", "tokenizer_proc", "engine_core", "detokenizer_proc")

pytestmark = pytest.mark.model


class Stream(threading.Thread):
    """A long answer being streamed; `started` once its first text is there, `lines` all that came in the end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.broken = False  # the connection ended in the middle of the response
        self.started = threading.Event()
        self._url = url
        self.start()
        assert self.started.wait(DEADLINE_S), self.lines

    def run(self) -> None:
        body = {
            "model": "smollm2",
            "prompt": "Once upon a time",
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with httpx.stream("POST", self._url + "/v1/completions", json=body, timeout=DEADLINE_S) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
                    if '"text"' in line:
                        self.started.set()
        except httpx.TransportError:
            self.broken = True

    def end(self) -> list[dict[str, Any]]:
        """All events, the `[DONE]` left out; fails unless the stream ended with it."""
        self.join(DEADLINE_S)
        assert not self.is_alive()
        events = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-3:]
        return [json.loads(event) for event in events[:-1]]

    def assert_ended_in_an_error(self) -> None:
        events = self.end()
        assert "error" in events[-1], events[-3:]
        assert events[-1]["error"]["message"]
        assert not any("error" in event for event in events[:-1])


@pytest.fixture
def stream(real: Callable[..., Any]) -> tuple[Any, Stream]:
    run = real()
    facts = run.wait_for("ready")["facts"]
    return run, Stream(facts["frontend"]["url"])


def test_ready_with_facts_titles_and_model(running_server: Server) -> None:
    facts = running_server.facts
    assert facts["engine_core"].facts["max_model_len"] == 8192
    assert facts["engine_core"].facts["vocab_size"] == 49152
    assert facts["engine_core"].facts["num_blocks"] * facts["engine_core"].facts["block_size"] >= 16_384
    assert {name: psutil.Process(pid).cmdline()[0].rstrip() for name, pid in running_server.pids.items()} == {
        name: f"gapless: {name}" for name in NAMES
    }
    assert httpx.get(running_server.url + "/ready").status_code == 200
    (model,) = httpx.get(running_server.url + "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("smollm2", 8192)


def test_only_the_frontend_listens_on_tcp_and_only_on_loopback(running_server: Server) -> None:
    for name, pid in running_server.pids.items():
        listening = [c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert listening == (["127.0.0.1"] if name == "frontend" else [])


@pytest.mark.parametrize("victim", NAMES)
def test_a_killed_process_fails_the_request_and_ends_all(stream: tuple[Any, Stream], victim: str) -> None:
    run, answer = stream
    os.kill(run.pids[victim], signal.SIGKILL)
    failure = run.wait_for("failed")
    assert (failure["name"], run.exit_code()) == (victim, 1)
    assert failure["cause"].startswith("was killed by SIGKILL")
    run.assert_nothing_left()
    if victim == "frontend":
        answer.join(DEADLINE_S)
        assert answer.broken
    else:
        answer.assert_ended_in_an_error()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_requests_with_an_error_and_leaves_nothing(
    stream: tuple[Any, Stream], number: signal.Signals
) -> None:
    run, answer = stream
    run.process.send_signal(number)
    run.wait_for("stopped")
    assert run.exit_code() == 0
    answer.assert_ended_in_an_error()
    run.assert_nothing_left()
    assert "Traceback" not in run.stderr
    assert "killed" not in run.stderr, run.stderr


def test_a_killed_supervisor_takes_everything_along(stream: tuple[Any, Stream]) -> None:
    run, answer = stream
    run.process.kill()
    run.assert_nothing_left()
    answer.join(DEADLINE_S)
    assert answer.broken


def test_a_port_in_use_is_a_plain_error(real: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = real(server=ServerOptions(port=port))
        failure = run.wait_for("failed")
    assert failure["name"] == "frontend"
    assert str(port) in failure["cause"]
    assert failure["lines"] == []
    assert run.exit_code() == 1
    assert "Traceback" not in run.stderr
    run.assert_nothing_left()


def test_a_missing_model_is_a_plain_error(real: Callable[..., Any], tmp_path: Path) -> None:
    run = real(model=str(tmp_path / "missing.gguf"))
    failure = run.wait_for("failed")
    assert failure["name"] in ("engine_core", "tokenizer_proc")
    assert "missing.gguf" in failure["cause"]
    assert failure["lines"] == []
    assert "Traceback" not in run.stderr
    run.assert_nothing_left()

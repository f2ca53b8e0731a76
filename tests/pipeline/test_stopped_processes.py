"""A process that does not run, however long, holds up no step of the engine, and loses nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from frontend.topology import Server, process_specs
from ipc.channel import Receiver
from ipc.messages import EngineStats, FrontendMessage
from ipc.processes import Facts, ProcessSpec
from ipc.run_dir import RunDirectory

from .conftest import DEADLINE_S, launch_config

STOPPED_S, STEPS, MAX_TOKENS = 2.0, 40, 300

pytestmark = pytest.mark.model


class Observed:
    """The real four, and a second frontend, played by the test, which hears the engine's heartbeat."""

    def __init__(self, model: Path) -> None:
        self._launch = launch_config(model)
        self._beats: Receiver[EngineStats]
        self.server = Server(self._launch, build_specs=self._specs)
        self.server.start()

    def _specs(self, run_dir: RunDirectory) -> Sequence[ProcessSpec]:
        address = run_dir.address("frontend.1")
        self._beats = Receiver(address, FrontendMessage)

        def with_second_frontend(build: Callable[[Facts], Any]) -> Callable[[Facts], Any]:
            def config(facts: Facts) -> Any:
                first = build(facts)
                ends = msgspec.structs.replace(first.endpoints, frontends=(*first.endpoints.frontends, address))
                return msgspec.structs.replace(first, endpoints=ends)

            return config

        return [
            dataclasses.replace(spec, config=with_second_frontend(spec.config))
            for spec in process_specs(self._launch, run_dir)
        ]

    def step(self) -> int:
        """The engine's step counter in a heartbeat that was sent after this call."""
        self._beats.drain(10_000)
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            self._beats.wait(1.0)
            if beats := self._beats.drain():
                return beats[-1].step
        pytest.fail("no heartbeat")

    def close(self) -> None:
        self.server.stop()
        self._beats.close()


@pytest.fixture(scope="module")
def observed(smollm2_path: Path) -> Iterator[Observed]:
    observed = Observed(smollm2_path)
    yield observed
    observed.close()


class Answer(threading.Thread):
    """A long greedy answer, streamed."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.events: list[Any] = []
        self._url = url
        self.start()

    def run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=body, timeout=DEADLINE_S, trust_env=False
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    self.events.append(data if data == "[DONE]" else json.loads(data))
                    self.begun.set()

    def text(self) -> str:
        """The whole text; fails unless the stream is complete, to the last token."""
        self.join(DEADLINE_S)
        assert not self.is_alive()
        *chunks, finish, usage, done = self.events
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] == MAX_TOKENS
        assert finish["choices"][0]["finish_reason"] == "length"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.fixture(scope="module")
def undisturbed(observed: Observed) -> str:
    return Answer(observed.server.url).text()


@pytest.mark.parametrize("name", ["frontend", "tokenizer_proc", "detokenizer_proc"])
def test_steps_go_on_while_a_process_is_stopped(observed: Observed, undisturbed: str, name: str) -> None:
    answer = Answer(observed.server.url)
    assert answer.begun.wait(DEADLINE_S)
    pid = observed.server.pids[name]
    os.kill(pid, signal.SIGSTOP)
    try:
        begin, first = time.monotonic(), observed.step()
        while observed.step() < first + STEPS:
            assert time.monotonic() < begin + DEADLINE_S, "the engine waits"
        time.sleep(max(0.0, begin + STOPPED_S - time.monotonic()))
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        if name != "tokenizer_proc":  # nothing passes it
            assert answer.is_alive()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.text() == undisturbed

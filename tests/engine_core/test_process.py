"""`python -m engine_core` as its neighbours see it: a real process, a tiny model, sockets where they would be."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.channel import Receiver, Sender
from ipc.codec import pack_ids, unpack_ids
from ipc.config import Endpoints, EngineConfig, EngineProcessConfig
from ipc.messages import (
    Abort,
    DetokenizerMessage,
    EngineStats,
    FrontendMessage,
    Generate,
    Progress,
    Ready,
    Shutdown,
    StartFailed,
    StepOutput,
    SupervisorMessage,
)
from ipc.run_dir import RunDirectory
from ipc.sampling import SamplingParams
from tests.engine_core.tiny_models import save_model

DEADLINE_S = 180.0
ROOT = Path(__file__).parents[2]


class Neighbours:
    """Supervisor, detokenizer and a frontend of one engine process."""

    def __init__(self, run_dir: RunDirectory, engine: EngineConfig) -> None:
        ends = Endpoints.make(run_dir.address)
        self.supervisor = Receiver[Any](ends.supervisor, SupervisorMessage)
        self.detokenizer = Receiver[StepOutput](ends.detokenizers[0], DetokenizerMessage)
        self.frontend = Receiver[EngineStats](ends.frontends[0], FrontendMessage)
        self.engine = Sender(ends.engine)
        settings = run_dir.write_config("engine_core", EngineProcessConfig(engine=engine, endpoints=ends))
        self.process = subprocess.Popen([sys.executable, "-m", "engine_core", str(settings)], cwd=ROOT)

    def receive(self, inbox: Receiver[Any]) -> Any:
        end = time.monotonic() + DEADLINE_S
        while True:
            for message in inbox.drain(1):
                return message
            assert self.process.poll() is None, f"the engine ended with {self.process.returncode}"
            assert time.monotonic() < end, "nothing came"
            inbox.wait(1.0)

    def start(self) -> Ready | StartFailed:
        while True:
            message = self.receive(self.supervisor)
            if not isinstance(message, Progress):
                assert isinstance(message, Ready | StartFailed)
                return message

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for inbox in (self.supervisor, self.detokenizer, self.frontend):
            inbox.close()
        self.engine.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory(tmp_path) as directory:
        yield directory


def test_ready_with_facts_tokens_heartbeats_and_an_ordered_end(run_dir: RunDirectory, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    config = EngineConfig(model=str(tmp_path / "model"), kv_tokens=512, threads=1, weights="none", dtype="float32")
    around = Neighbours(run_dir, config)
    try:
        ready = around.start()
        assert isinstance(ready, Ready), ready
        assert (ready.name, ready.pid) == ("engine_core", around.process.pid)
        assert ready.facts["kv_tokens"] == 512
        assert ready.facts["max_model_len"] > 0
        assert ready.facts["num_blocks"] == 512 // ready.facts["block_size"] + 1
        beat = around.receive(around.frontend)
        assert (beat.running, beat.kv_blocks_free) == (0, beat.kv_blocks_total)

        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        ids = pack_ids([1, 2, 3])
        around.engine.send(Abort(request_ids=[1]))
        for request_id in (1, 2):
            around.engine.send(
                Generate(
                    request_id=request_id, frontend=0, prompt_ids=ids, sampling=sampling, arrival=time.monotonic_ns()
                )
            )
        tokens: list[int] = []
        reasons: dict[int, str] = {}
        while len(reasons) < 2:
            output = around.receive(around.detokenizer)
            tokens += unpack_ids(output.token_ids)
            reasons |= {finished.request_id: finished.reason for finished in output.finished}
        assert reasons == {1: "abort", 2: "length"}
        assert len(tokens) == 4

        around.engine.send(Generate(request_id=3, frontend=0, prompt_ids=ids, sampling=sampling, arrival=0))
        around.engine.send(Shutdown())
        last: dict[int, str] = {}
        while 3 not in last:
            last |= {finished.request_id: finished.reason for finished in around.receive(around.detokenizer).finished}
        assert around.process.wait(DEADLINE_S) == 0
        assert not (run_dir.path / "engine.sock").exists()
    finally:
        around.close()


def test_a_model_that_is_not_there_is_told_plainly(run_dir: RunDirectory, tmp_path: Path) -> None:
    around = Neighbours(run_dir, EngineConfig(model=str(tmp_path / "nothing")))
    try:
        failed = around.start()
        assert isinstance(failed, StartFailed)
        assert str(tmp_path / "nothing") in failed.message
        assert "Traceback" not in failed.message
        assert around.process.wait(DEADLINE_S) == 1
    finally:
        around.close()


def test_the_age_of_a_process_is_no_more_than_the_time_since_it_was_started() -> None:
    began = time.monotonic()
    code = "from engine_core.__main__ import seconds_alive; print(seconds_alive())"
    age = float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))
    assert 0.0 < age < time.monotonic() - began + 0.02  # the system tells a start to a hundredth of a second

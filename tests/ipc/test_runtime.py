"""`child_main`, in children of this test (a supervisor's view of it is in tests/pipeline)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ipc.channel import Receiver
from ipc.config import DetokenizerProcessConfig, Endpoints
from ipc.messages import Progress, Ready, StartFailed, SupervisorMessage
from ipc.run_dir import RunDirectory
from ipc.runtime import PARENT_FD_ENV

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0

PROGRAM = """
import sys, time
from ipc.config import DetokenizerProcessConfig
from ipc.errors import UserError
from ipc.runtime import child_main

def body(config, child):
    {body}

child_main("detokenizer_proc", DetokenizerProcessConfig, body, (KeyError,))
"""


class Child:
    def __init__(self, run_dir: RunDirectory, body: str) -> None:
        ends = Endpoints.make(run_dir.address)
        self.inbox = Receiver[Any](ends.supervisor, SupervisorMessage)
        path = run_dir.write_config(
            "detokenizer_proc", DetokenizerProcessConfig(tokenizer_json="tokens.json", endpoints=ends)
        )
        read_end, self.parent = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(body=body), str(path)],
            cwd=ROOT,
            env={**os.environ, PARENT_FD_ENV: str(read_end)},
            pass_fds=(read_end,),
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(read_end)

    def messages(self, count: int) -> list[Any]:
        got: list[Any] = []
        while len(got) < count:
            assert self.inbox.wait(DEADLINE_S)
            got += self.inbox.drain()
        return got

    def end(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, stderr

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.inbox.close()
        if self.parent >= 0:
            os.close(self.parent)


@pytest.fixture
def start(short_dir: Path) -> Any:
    children = []
    with RunDirectory(short_dir) as run_dir:

        def start(body: str) -> Child:
            children.append(Child(run_dir, body))
            return children[-1]

        yield start
        for child in children:
            child.close()


def test_ready_carries_facts_and_phase_times(start: Any) -> None:
    child = start(
        "with child.phase('loading'):\n"
        "        for i in range(1000): child.progress('loading', i / 1000)\n"
        "        child.progress('loading', 1.0)\n"
        "    child.ready({'path': config.tokenizer_json})"
    )
    assert child.end() == (0, "")
    messages = child.messages(1)
    ready, progress = messages[-1], messages[:-1]
    assert isinstance(ready, Ready)
    assert (ready.name, ready.pid, ready.facts) == ("detokenizer_proc", child.process.pid, {"path": "tokens.json"})
    assert list(ready.seconds) == ["loading"]
    assert ready.seconds["loading"] > 0
    assert all(isinstance(message, Progress) and message.phase == "loading" for message in progress)
    assert progress[0].fraction is None
    assert progress[-1].fraction == 1.0
    assert len(progress) < 1000


@pytest.mark.parametrize("error", ["UserError('bring a tokenizer')", "KeyError('bring a tokenizer')"])
def test_a_users_error_is_told_without_a_traceback(start: Any, error: str) -> None:
    child = start(f"raise {error}")
    code, stderr = child.end()
    assert (code, stderr) == (1, "")
    (message,) = child.messages(1)
    assert isinstance(message, StartFailed)
    assert "bring a tokenizer" in message.message


def test_a_bug_leaves_its_traceback(start: Any) -> None:
    code, stderr = start("raise RuntimeError('oops')").end()
    assert code == 1
    assert stderr.rstrip().endswith("RuntimeError: oops")


def test_sys_exit_keeps_its_code(start: Any) -> None:
    assert start("sys.exit(7)").end() == (7, "")


def test_the_child_vanishes_with_its_parent(start: Any, short_dir: Path) -> None:
    child = start("child.ready({})\n    time.sleep(3600)")
    child.messages(1)
    os.close(child.parent)
    child.parent = -1
    code, _ = child.end()
    assert code != 0
    assert list(short_dir.iterdir()) == []


@pytest.mark.parametrize(("arguments", "complaint"), [([], "usage"), (["/nowhere/gapless-x/c.json"], "cannot read")])
def test_started_by_hand(arguments: list[str], complaint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body="pass"), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr

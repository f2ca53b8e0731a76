"""Several client processes that start at one moment, so that the client is not what is measured."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import uvloop

from frontend.loadtest.__main__ import Report, Task
from frontend.loadtest.client import Outcome, Target, ask
from frontend.loadtest.workload import Request
from ipc.processes import child_environment

_HEAD_START_S = 0.2


class LoadTestError(Exception):
    """The server cannot be measured; the message is fit for the user."""


@dataclass(frozen=True)
class Measured:
    outcomes: list[Outcome]  # in the order of the requests
    duration: float  # seconds, from the start to the end of the last request
    client_cpu: float  # busiest client process: CPU seconds per second


def check(target: Target, request: Request) -> str:
    """One request to see that it works. Returns what the server calls the model. Raises `LoadTestError`."""
    outcome: Outcome = uvloop.run(ask(target, request))
    if outcome.error:
        raise LoadTestError(f"{target.url}{target.path}: {outcome.error}")
    return outcome.model


def measure(target: Target, requests: Sequence[Request], max_concurrency: int | None, procs: int) -> Measured:
    """Raises `LoadTestError` if a client process fails."""
    procs = max(1, min(procs, len(requests), max_concurrency or len(requests)))
    processes = []
    try:
        for index in range(procs):
            share = None if max_concurrency is None else len(range(index, max_concurrency, procs))
            task = Task(target, list(requests[index::procs]), share)
            processes.append(_start(task))
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise LoadTestError("a client process did not start")
        start = time.monotonic() + _HEAD_START_S
        reports = [_finish(process) for process in _started(processes, start)]
    finally:
        for process in processes:
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:  # waits, and closes its pipes
                pass
    outcomes: list[Outcome] = [Outcome()] * len(requests)
    for index, report in enumerate(reports):
        outcomes[index::procs] = report.outcomes
    duration = max(report.end for report in reports) - start
    return Measured(outcomes, duration, max(report.cpu_seconds for report in reports) / duration)


def _start(task: Task) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "frontend.loadtest"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(task) + b"\n")
    process.stdin.flush()
    return process


def _started(processes: Sequence[subprocess.Popen[bytes]], start: float) -> Sequence[subprocess.Popen[bytes]]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"%r\n" % start)
        process.stdin.close()
    return processes


def _finish(process: subprocess.Popen[bytes]) -> Report:
    assert process.stdout is not None
    data = process.stdout.read()
    if process.wait():
        raise LoadTestError(f"a client process ended with status {process.returncode}")
    return msgspec.json.decode(data, type=Report)

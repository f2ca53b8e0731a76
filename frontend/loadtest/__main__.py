"""`python -m frontend.loadtest`: one client process. Standard input: a `Task`, then the moment to start. Standard
output: "ready", then a `Report`."""

from __future__ import annotations

import sys
import time

import msgspec
import uvloop

from frontend.loadtest.client import Outcome, Target, run
from frontend.loadtest.workload import Request


class Task(msgspec.Struct, frozen=True):
    target: Target
    requests: list[Request]
    max_concurrency: int | None


class Report(msgspec.Struct, frozen=True):
    outcomes: list[Outcome]  # in the order of the requests
    end: float  # CLOCK_MONOTONIC, when the last one was done
    cpu_seconds: float


def main() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    start = float(sys.stdin.buffer.readline())
    cpu = time.process_time()
    outcomes = uvloop.run(run(task.target, task.requests, task.max_concurrency, start))
    report = Report(outcomes, time.monotonic(), time.process_time() - cpu)
    sys.stdout.buffer.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main()

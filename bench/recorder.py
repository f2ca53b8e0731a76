"""What the flight recorder costs: one record, and a step of the engine with it and without.

    python -m bench.recorder [--rounds 9] [--requests 256]

A record's time is wall time, clock included, into a ring in shared memory. A step is schedule, launch, commit and
message with no model behind it; both engines take turns, each in CPU time of this thread, and the difference is that of
the medians. The share is of a step of 584 us: one sequence of Qwen3-0.6B on an H200, where most of this time is hidden
behind the step before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import timeit
from pathlib import Path

from bench.scheduler import InstantRunner, build
from engine_core.engine import Engine
from ipc.memory import MemoryChannel
from ipc.messages import DetokenizerMessage, EngineMessage
from ipc.recorder.events import COMMIT, GPU, INTAKE, PUBLISH, SCHEDULE
from ipc.recorder.nvtx import NvtxRecorder, profiler_attached
from ipc.recorder.ring import Recorder, RingRecorder

GPU_STEP_US = 584.0
REPEAT = 100_000


def per_call_ns(recorder: Recorder) -> dict[str, float]:
    """Nanoseconds of each call, the median of several runs."""
    began = time.monotonic_ns()
    calls = {
        "begin": lambda: recorder.begin(SCHEDULE),
        "end": lambda: recorder.end(SCHEDULE, began, 1, 2, 3, 4),
        "span": lambda: recorder.span(GPU, began, began + 1000, 1, 2, 3, 4),
        "mark": lambda: recorder.mark(COMMIT, 1, 2, 3, 4),
        "begin + end": lambda: recorder.end(SCHEDULE, recorder.begin(SCHEDULE), 1, 2, 3, 4),
    }
    empty = _ns(lambda: None)
    return {name: _ns(call) - empty for name, call in calls.items()}


def _ns(call: object) -> float:
    return statistics.median(timeit.repeat(call, number=REPEAT, repeat=7)) / REPEAT * 1e9  # type: ignore[arg-type]


class RecordingRunner(InstantRunner):
    """Records a step on a device, as the real runners do."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def launch(self, plan):  # type: ignore[no-untyped-def]
        began = self._recorder.begin(GPU)
        super().launch(plan)
        self._recorder.end(GPU, began, plan.step, plan.num_tokens, len(plan.rows))
        return self


def engine_with(recorder: Recorder, requests: int, steps: int) -> Engine:
    return build(requests, steps, RecordingRunner(recorder), recorder)


class Loop:
    """What `engine_core.loop.run` does for a step while there is work, with its records."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._recorder = engine, engine.recorder
        self._inbox, self._outbox = MemoryChannel(EngineMessage), MemoryChannel(DetokenizerMessage)

    def step(self) -> None:
        began = self._recorder.begin(INTAKE)
        messages = self._inbox.drain(64)
        self._recorder.end(INTAKE, began, 0, len(messages))
        output = self._engine.step()
        began = self._recorder.begin(PUBLISH)
        self._outbox.send(output)
        self._recorder.end(PUBLISH, began, output.step, len(output.token_ids) // 4)

    def read(self) -> None:
        """As the detokenizer would."""
        self._outbox.drain()


def steps_us(engine: Engine, count: int) -> list[float]:
    """CPU microseconds of the loop's part of a step."""
    loop, times = Loop(engine), []
    for _ in range(count):
        start = time.thread_time_ns()
        loop.step()
        times.append((time.thread_time_ns() - start) / 1000)
        loop.read()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=256)
    args = parser.parse_args()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        ring: Recorder = RingRecorder(Path(folder), "bench")
        print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; nanoseconds of a call")
        recorders = {"no recorder": Recorder(), "ring": ring}
        if profiler_attached():
            recorders["ring + NVTX"] = NvtxRecorder(ring)
        for name, recorder in recorders.items():
            print(f"{name:<14}" + "".join(f"{call} {ns:5.0f}   " for call, ns in per_call_ns(recorder).items()))

        per_round = 200
        for requests in (1, args.requests):
            without = engine_with(Recorder(), requests, args.rounds * per_round)
            recorded = engine_with(ring, requests, args.rounds * per_round)
            times: dict[str, list[float]] = {"without": [], "with": []}
            for index in range(args.rounds):
                pair = [("without", without), ("with", recorded)]
                for name, engine in pair if index % 2 else reversed(pair):
                    times[name] += steps_us(engine, per_round - 8)
            before, after = (statistics.median(times[name]) for name in ("without", "with"))
            print(
                f"{requests:>4} requests: {before:.1f} us a step without, {after:.1f} with: {after - before:+.1f} us, "
                f"{(after - before) / GPU_STEP_US:.2%} of a step of {GPU_STEP_US:.0f} us"
            )


if __name__ == "__main__":
    main()

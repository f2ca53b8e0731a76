"""Steps of a GPU placed in the host's time, with a device whose clock runs differently and is known to the test."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.cuda.results import CudaStep
from engine_core.cuda.spans import WINDOW, DeviceSpans
from engine_core.plan import StepTokens
from engine_core.usage import Host, Usage
from ipc.recorder.reader import Record, read_ring
from ipc.recorder.ring import Recorder, RingRecorder

US = 1000
COUNT = 4
STREAM = object()


class World:
    """A host clock, and a device that runs what is on its stream one after the other. The device's clock is fast by
    `drift`; events tell float32 milliseconds, as CUDA's do."""

    def __init__(self, drift: float) -> None:
        self.now = 50_000_000_000
        self.busy_until = 0
        self.drift = drift
        self.truth: list[tuple[int, int]] = []

    def clock(self) -> int:
        return self.now

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def events(self) -> list[FakeEvent]:
        return [self.event() for _ in range(COUNT)]


class FakeEvent:
    def __init__(self, world: World) -> None:
        self._world, self._at = world, 0

    def record(self, stream: object) -> None:
        self._at = max(self._world.busy_until, self._world.now + 3 * US)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return float(np.float32((end_event._at - self._at) * (1 + self._world.drift) / 1e6))


def drive(folder: Path, world: World, steps: int, seed: int) -> list[Record]:
    """Two steps in flight, as the engine keeps them; the host sees a step's end some microseconds late."""
    draw = random.Random(seed)
    recorder = RingRecorder(folder, "engine_core", 1 << 14)
    ends = world.events()
    spans = DeviceSpans(recorder, ends, world.event, world.clock)
    in_flight: list[tuple[int, int, int]] = []
    for step in range(1, steps + 1):
        turn = step % COUNT
        spans.begin(turn, STREAM)
        begin = max(world.busy_until, world.now + 3 * US)
        world.now += draw.randrange(40, 80) * US
        world.busy_until = begin + draw.randrange(400, 700) * US
        ends[turn].record(STREAM)
        world.truth.append((begin, world.busy_until))
        in_flight.append((turn, step, world.busy_until))
        if len(in_flight) == 2:
            turn, done, end = in_flight.pop(0)
            waited = end > world.now
            world.now = max(world.now, end) + draw.randrange(6, 20) * US
            spans.read(turn, waited, done, 8, 8)
            world.now += draw.randrange(20, 60) * US
    return read_ring(recorder.path).records


@pytest.mark.parametrize("drift", [0.0, 3e-5, -3e-5])
def test_steps_lie_where_they_were(tmp_path: Path, drift: float) -> None:
    world = World(drift)
    records = drive(tmp_path, world, 4 * WINDOW, seed=1)
    assert len(records) == 4 * WINDOW - 1
    for record, (begin, end) in zip(records, world.truth, strict=False):
        assert abs(record.duration - (end - begin)) < 1 * US
        assert abs(record.begin - begin) < 30 * US
    gaps = [later.begin - record.end for record, later in itertools.pairwise(records)]
    real = [later[0] - earlier[1] for earlier, later in itertools.pairwise(world.truth)]
    wrong = [gap for gap, true in zip(gaps, real, strict=False) if abs(gap - true) > 1 * US]
    assert len(wrong) <= 8  # where the chain is moved to the host's clock


def test_a_step_after_a_long_rest_begins_at_its_launch(tmp_path: Path) -> None:
    world = World(0.0)
    recorder = RingRecorder(tmp_path, "engine_core", 64)
    ends = world.events()
    spans = DeviceSpans(recorder, ends, world.event, world.clock)
    for step, rest in ((1, 0), (2, 3_600_000_000_000), (3, 100 * US)):
        world.now += rest
        launched = world.now
        spans.begin(step, STREAM)
        world.busy_until = world.now + 503 * US
        ends[step].record(STREAM)
        world.now = world.busy_until + 10 * US
        span = spans.read(step, True, step, 1, 1)
        record = read_ring(recorder.path).records[-1]
        assert span == (record.begin, record.end)
        assert launched <= record.begin <= launched + 15 * US
        assert record.end <= world.now


def test_nobody_records_nothing_is_measured() -> None:
    def no_event() -> FakeEvent:
        raise AssertionError("an event was made")

    ends = World(0.0).events()
    spans = DeviceSpans(Recorder(), ends, no_event)
    spans.begin(0, STREAM)
    ends[0].record(STREAM)
    assert spans.read(0, True, 1, 1, 1) is None


def test_usage_finds_the_gaps_of_overlapped_steps() -> None:
    """As the engine drives it: a host that is late now and then leaves gaps, and they are told from busy time."""
    world, draw = World(0.0), random.Random(2)
    ends = world.events()
    spans = DeviceSpans(_Keeps(), ends, world.event, world.clock)
    usage = Usage(clock=world.clock)
    in_flight: list[tuple[int, int]] = []
    for step in range(1, 400):
        turn = step % COUNT
        usage.doing(Host.SCHEDULE)
        world.now += draw.choice([20, 20, 20, 900]) * US  # one step in four is planned too slowly
        usage.doing(Host.LAUNCH)
        spans.begin(turn, STREAM)
        begin = max(world.busy_until, world.now + 3 * US)
        world.now += 50 * US
        world.busy_until = begin + 500 * US
        ends[turn].record(STREAM)
        usage.launched()
        usage.doing(Host.COLLECT)
        world.truth.append((begin, world.busy_until))
        in_flight.append((turn, world.busy_until))
        if len(in_flight) == 2:
            turn, end = in_flight.pop(0)
            waited = end > world.now
            world.now = max(world.now, end) + 10 * US
            usage.landed(spans.read(turn, waited, step, 8, 8))
    done = world.truth[:-1]
    busy = sum(end - begin for begin, end in done)
    gaps = sum(later[0] - earlier[1] for earlier, later in itertools.pairwise(done))
    totals = usage.totals()
    idle = {cause: seconds for cause, seconds in totals.idle_seconds.items() if cause != "nothing"}
    assert gaps > 20_000 * US
    assert totals.busy_seconds == pytest.approx(busy / 1e9, rel=1e-3)
    assert sum(idle.values()) == pytest.approx(gaps / 1e9, rel=0.03)
    assert idle["schedule"] > 0.9 * sum(idle.values())


class _Keeps(Recorder):
    keeps = True


class _Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def test_a_step_tells_when_it_ran() -> None:
    seen: list[bool] = []

    def read(waited: bool) -> tuple[int, int]:
        seen.append(waited)
        return 5, 9

    step = CudaStep(_Done(), torch.tensor([7], dtype=torch.int32), StepTokens([]), {}, None, read)  # type: ignore[arg-type]
    tokens = step.wait()
    assert (tokens.span, tokens.token_ids, seen) == ((5, 9), [7], [False])

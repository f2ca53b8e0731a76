"""Steps of a GPU placed in the host's time, with a device whose clock runs differently and is known to the test."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.cuda.results import CudaStep
from engine_core.cuda.spans import DeviceSpans
from engine_core.usage import Host, Usage
from ipc.recorder.reader import Record, read_ring
from ipc.recorder.ring import Recorder, RingRecorder

US = 1000
COUNT = 4
STEPS = 1024  # some windows of each kind of step


class World:
    """A host clock, and a device that runs what it is given one after the other. The device's clock has another zero,
    is fast by `drift` and moves 32 ns at a time."""

    def __init__(self, drift: float) -> None:
        self.now = 50_000_000_000
        self.busy_until = 0
        self.drift = drift
        self.truth: list[tuple[int, int]] = []

    def clock(self) -> int:
        return self.now

    def run(self, duration: int) -> int:
        """A step that is launched now; when it will end."""
        begin = max(self.busy_until, self.now + 3 * US)
        self.busy_until = begin + duration
        self.truth.append((begin, self.busy_until))
        return self.busy_until

    def stamps(self, step: int) -> tuple[int, int]:
        """What the device wrote down of the step'th step, from 1."""
        begin, end = (1_700_000_000_000_000_000 + int(at * (1 + self.drift)) // 32 * 32 for at in self.truth[step - 1])
        return begin, end


def drive(
    folder: Path, world: World, steps: int, seed: int, lasts: range = range(400, 700), capture: int = 0
) -> list[Record]:
    """Two steps in flight, as the engine keeps them; the host sees a step's end some microseconds late.

    `lasts`: us of a step. `capture`: ns that the first two launches take before the device has anything to do.
    """
    draw = random.Random(seed)
    recorder = RingRecorder(folder, "engine_core", 1 << 14)
    spans = DeviceSpans(recorder, COUNT, world.clock)
    in_flight: list[tuple[int, int]] = []
    for step in range(1, steps + 1):
        spans.launch(step % COUNT)
        world.now += capture if step <= 2 else 0
        end = world.run(draw.choice(lasts) * US)
        world.now += draw.randrange(40, 80) * US
        in_flight.append((step, end))
        if len(in_flight) == 2:
            done, end = in_flight.pop(0)
            waited = end > world.now
            world.now = max(world.now, end) + draw.randrange(6, 20) * US
            spans.read(done % COUNT, waited, *world.stamps(done), done, 8, 8)
            world.now += draw.randrange(20, 60) * US
    return read_ring(recorder.path).records


@pytest.mark.parametrize("drift", [0.0, 3e-5, -3e-5])
@pytest.mark.parametrize("lasts", [range(400, 700), range(4_000, 4_200), range(200_000, 210_000)])
def test_steps_lie_where_they_were(tmp_path: Path, drift: float, lasts: range) -> None:
    world = World(drift)
    records = drive(tmp_path, world, STEPS, 1, lasts)
    assert len(records) == STEPS - 1
    for record, (begin, end) in zip(records, world.truth, strict=False):
        assert record.duration == pytest.approx(end - begin, rel=4e-5, abs=1 * US)
        assert abs(record.begin - begin) < 30 * US
    gaps = [later.begin - record.end for record, later in itertools.pairwise(records)]
    real = [later[0] - earlier[1] for earlier, later in itertools.pairwise(world.truth)]
    wrong = [gap - true for gap, true in zip(gaps, real, strict=False) if abs(gap - true) > 1 * US]
    assert lasts.start > 1_000 or len(wrong) <= 8  # where a window ends
    assert all(abs(error) < 30 * US for error in wrong)


def test_steps_lie_where_they_were_if_the_first_was_over_before_the_host_looked(tmp_path: Path) -> None:
    """As one is whose launch, or that of the step behind it, captures a graph: launches tell little then."""
    world = World(0.0)
    records = drive(tmp_path, world, 50, 1, range(4_000, 4_200), capture=500_000 * US)
    first, *others = zip(records, world.truth, strict=False)
    assert abs(first[0].begin - first[1][0]) == pytest.approx(500_000 * US, rel=0.01)
    for record, (begin, _) in others:
        assert abs(record.begin - begin) < 30 * US


def test_a_step_after_a_long_rest_begins_at_its_launch(tmp_path: Path) -> None:
    world = World(3e-5)  # a tenth of a second in the second rest
    recorder = RingRecorder(tmp_path, "engine_core", 64)
    spans = DeviceSpans(recorder, COUNT, world.clock)
    for step, rest, waited in ((1, 0, True), (2, 3_600_000_000_000, True), (3, 100 * US, True), (4, 10**12, False)):
        world.now += rest
        launched = world.now
        spans.launch(step % COUNT)
        world.now = world.run(503 * US) + (10 * US if waited else 300 * US)
        span = spans.read(step % COUNT, waited, *world.stamps(step), step, 1, 1)
        record = read_ring(recorder.path).records[-1]
        assert span == (record.begin, record.end)
        assert launched <= record.begin <= launched + 15 * US
        assert record.end <= world.now


def test_nobody_records_nothing_is_told() -> None:
    spans = DeviceSpans(Recorder(), COUNT)
    assert not spans.keeps
    spans.launch(0)
    assert spans.read(0, True, 0, 0, 1, 1, 1) is None


def test_usage_finds_the_gaps_of_overlapped_steps() -> None:
    """As the engine drives it: a host that is late now and then leaves gaps, and they are told from busy time."""
    world, draw = World(0.0), random.Random(2)
    spans = DeviceSpans(_Keeps(), COUNT, world.clock)
    usage = Usage(clock=world.clock)
    in_flight: list[tuple[int, int]] = []
    for step in range(1, 400):
        usage.doing(Host.SCHEDULE)
        world.now += draw.choice([20, 20, 20, 900]) * US  # one step in four is planned too slowly
        usage.doing(Host.LAUNCH)
        spans.launch(step % COUNT)
        end = world.run(500 * US)
        world.now += 50 * US
        usage.launched()
        usage.doing(Host.COLLECT)
        in_flight.append((step, end))
        if len(in_flight) == 2:
            oldest, end = in_flight.pop(0)
            waited = end > world.now
            world.now = max(world.now, end) + 10 * US
            usage.landed(spans.read(oldest % COUNT, waited, *world.stamps(oldest), oldest, 8, 8))
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
    seen: list[tuple[bool, int, int]] = []

    def read(waited: bool, begin: int, end: int) -> tuple[int, int]:
        seen.append((waited, begin, end))
        return 5, 9

    times, ids = np.array([3, 7]), torch.tensor([7], dtype=torch.int32)
    step = CudaStep(_Done(), times, ids, {}, None, (), read)  # type: ignore[arg-type]
    tokens = step.wait()
    assert (tokens.span, tokens.token_ids, seen) == ((5, 9), [7], [(False, 3, 7)])

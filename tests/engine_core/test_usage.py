"""Where the device's time goes: every nanosecond is charged once, to whoever had it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bench.shapes import SHAPES
from engine_core.costs import ModelCosts
from engine_core.engine import Engine
from engine_core.layers.held import mean_weight_bytes
from engine_core.models.config import from_hf
from engine_core.peaks import measure_peaks
from engine_core.plan import ScheduledRow, StepPlan
from engine_core.request import Request
from engine_core.usage import MOST_MARKS, Host, Usage
from ipc.buckets import STEP_SECONDS, STEP_TOKENS
from ipc.config import EngineConfig, EngineOptions
from ipc.messages import DeviceUsage, EngineStats
from ipc.sampling import SamplingParams
from tests.engine_core.test_engine import Seen, generate
from tests.engine_core.tiny_models import load, save_model
from tests.fakes import FakeRunner, make_facts


class Clock:
    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def nanoseconds(usage: DeviceUsage) -> dict[str, int]:
    found = {cause: round(seconds * 1e9) for cause, seconds in usage.idle_seconds.items()}
    return {"busy": round(usage.busy_seconds * 1e9), **{cause: value for cause, value in found.items() if value}}


def test_a_gap_is_charged_to_what_the_host_did_meanwhile() -> None:
    clock = Clock()
    usage = Usage(clock=clock)
    for at, cause in ((10, Host.INPUT), (13, Host.SCHEDULE), (18, Host.LAUNCH)):
        clock.now = at
        usage.doing(cause)
    clock.now = 25
    usage.launched()
    usage.doing(Host.COLLECT)
    clock.now = 60
    usage.landed((22, 55))  # began while it was being launched, was seen five late
    assert nanoseconds(usage.totals()) == {
        "busy": 33,
        Host.NOTHING: 10,
        Host.INPUT: 3,
        Host.SCHEDULE: 5,
        Host.LAUNCH: 4,
        Host.COLLECT: 5,
    }


def test_steps_that_overlap_leave_no_gap() -> None:
    clock = Clock()
    usage = Usage(clock=clock)
    usage.doing(Host.LAUNCH)
    for _ in range(2):
        clock.now += 5
        usage.launched()
    clock.now = 100
    usage.landed((5, 90))
    usage.landed((90, 100))
    clock.now = 150
    assert nanoseconds(usage.totals()) == {"busy": 95, Host.LAUNCH: 5 + 50}
    assert nanoseconds(usage.totals())["busy"] == 95  # asking changes nothing


def test_without_spans_a_step_runs_from_its_launch_until_it_is_seen() -> None:
    clock = Clock()
    usage = Usage(clock=clock)
    usage.doing(Host.SCHEDULE)
    clock.now = 7
    usage.launched()
    clock.now = 30
    usage.launched()
    clock.now = 40
    usage.landed(None)
    clock.now = 70
    usage.landed(None)
    assert nanoseconds(usage.totals()) == {"busy": 63, Host.SCHEDULE: 7}


def test_what_was_given_up_is_idle_time() -> None:
    clock = Clock()
    usage = Usage(clock=clock)
    usage.doing(Host.LAUNCH)
    usage.launched()
    usage.doing(Host.COLLECT)
    clock.now = 20
    usage.abandoned()
    assert nanoseconds(usage.totals()) == {"busy": 0, Host.COLLECT: 20}


def test_a_host_that_never_steps_holds_no_memory() -> None:
    clock = Clock()
    usage = Usage(clock=clock)
    for _ in range(10 * MOST_MARKS):
        clock.now += 1
        usage.doing(Host.INPUT)
    assert len(usage._marks) == MOST_MARKS
    assert nanoseconds(usage.totals()) == {"busy": 0, Host.INPUT: clock.now}


def test_against_a_count_nanosecond_by_nanosecond() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(30):
        clock = Clock()
        usage = Usage(clock=clock)
        host, device = [Host.NOTHING], [False]  # at each nanosecond
        free_at = 0

        def until(now: int, clock: Clock = clock, host: list[str] = host) -> None:
            host.extend(host[-1:] * (now - len(host)))
            clock.now = now

        for _ in range(40):
            for cause in rng.sample(list(Host), 3):
                until(clock.now + rng.randrange(0, 9))
                usage.doing(cause)
                host.append(cause)
                del host[clock.now : -1]
            usage.launched()
            began = max(clock.now, free_at)
            free_at = ended = began + rng.randrange(1, 30)
            until(ended + rng.randrange(0, 9))
            usage.landed((began, ended))
            device.extend([False] * (began - len(device)) + [True] * (ended - began))
            if rng.random() < 0.2:
                usage.totals()
        device.extend([False] * (clock.now - len(device)))
        expected = {"busy": sum(device)}
        for cause, busy in zip(host[: clock.now], device, strict=False):
            if not busy:
                expected[cause] = expected.get(cause, 0) + 1
        assert nanoseconds(usage.totals()) == expected


def test_steps_are_counted_by_time_and_size() -> None:
    usage = Usage()
    for tokens, elapsed in ((1, 90_000), (8, 100_000), (9, 1_200_000), (20_000, 60_000_000_000)):
        usage.count(StepPlan((), num_tokens=tokens), elapsed)
    totals = usage.totals()
    assert (totals.step_tokens, totals.step_seconds) == (20_018, 60.00139)
    by_seconds = dict(zip((*STEP_SECONDS, "more"), totals.steps_by_seconds, strict=True))
    assert {bound: count for bound, count in by_seconds.items() if count} == {0.0001: 2, 0.0015: 1, "more": 1}
    by_tokens = dict(zip((*STEP_TOKENS, "more"), totals.steps_by_tokens, strict=True))
    assert {bound: count for bound, count in by_tokens.items() if count} == {1: 1, 8: 1, 16: 1, "more": 1}


def test_bytes_and_operations_are_those_of_the_plan() -> None:
    costs = ModelCosts(from_hf(SHAPES["qwen3-0.6b"]), 2, 2)
    usage = Usage(costs)
    request = Request(1, [0], SamplingParams())
    rows = [ScheduledRow(request, start, 1, True) for start in (99, 200)]
    rows.append(ScheduledRow(request, 10, 40, False))  # part of a prompt: no logits
    usage.count(StepPlan(tuple(rows), num_tokens=42, num_decodes=2), 1)
    work = costs.step([100, 201], [(10, 50)], sampled=2)
    totals = usage.totals()
    assert (totals.bytes, totals.flops) == (work.bytes, work.flops)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engine_charges_all_of_its_time(depth: int) -> None:
    clock = Clock(1000)

    def ticking() -> int:
        clock.now += 10
        return clock.now

    facts = make_facts()
    began = clock.now
    engine = Engine(FakeRunner(facts), facts, EngineConfig(model="fake"), depth=depth, clock=ticking)
    seen = Seen()
    for request_id in range(3):
        engine.add(generate(request_id))
    while engine.has_work:
        seen.take(engine.step())
    stats: EngineStats = engine.stats()
    assert stats.usage is not None
    charged = nanoseconds(stats.usage)
    assert set(charged) >= {"busy", Host.SCHEDULE, Host.NOTHING}
    assert charged["busy"] > 0
    assert abs(sum(charged.values()) - (clock.now - began)) <= 20  # two readings of the clock
    assert sum(stats.usage.steps_by_seconds) == sum(stats.usage.steps_by_tokens) == stats.step
    assert stats.usage.step_tokens >= 3 * 7


def test_what_the_engine_says_of_its_requests() -> None:
    facts = make_facts()
    engine = Engine(FakeRunner(facts), facts, EngineConfig(model="fake", max_num_seqs=1), clock=Clock(2000))
    for request_id in (7, 8):
        engine.add(generate(request_id))
    engine.step()
    first, second = engine.requests(10)
    assert (first.request_id, first.state, first.prompt_tokens, first.output_tokens) == (7, "decode", 8, 1)
    assert (first.age, first.computed_tokens) == (1500, 8)
    assert (second.request_id, second.state, second.computed_tokens) == (8, "waiting", 0)
    assert engine.requests(1) == [first]
    assert engine.num_requests == 2


def test_weights_weigh_what_they_are_held_in(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    assert mean_weight_bytes(load(tmp_path).model) == pytest.approx(4.0, rel=0.03)  # norms and padding beside
    # blocks of 32 bytes with a scale of two
    assert mean_weight_bytes(load(tmp_path, weights="int8").model) == pytest.approx(34 / 32, rel=0.1)


def test_peaks_are_measured_or_given() -> None:
    torch.set_num_threads(1)
    measured = measure_peaks("cpu", "float32", EngineOptions())
    assert 1e8 < measured["bytes"] < 1e13
    assert 1e8 < measured["flops"] < 1e14
    given = measure_peaks("cpu", "float32", EngineOptions(peak_bandwidth=4300, peak_tflops=790))
    assert given == {"bytes": 4.3e12, "flops": 790e12}

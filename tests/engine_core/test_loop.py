"""The step loop on in-memory channels: what it sends, when it blocks, how it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from engine_core import loop
from engine_core.engine import IDLE_AFTER_NS, Engine
from engine_core.loop import HEARTBEAT_BUSY_S, HEARTBEAT_IDLE_S, EngineBroken, Heartbeat, run
from ipc.codec import pack_ids, pack_prompt, unpack_ids, unpack_request_ids
from ipc.config import EngineConfig
from ipc.memory import MemoryChannel
from ipc.messages import (
    Abort,
    DetokenizerMessage,
    EngineMessage,
    EngineStats,
    FrontendMessage,
    Generate,
    Shutdown,
    StepOutput,
    Submit,
    TokenPrompt,
)
from ipc.sampling import SamplingParams
from tests.fakes import FakeRunner, Launched, expected_tokens, make_facts

PROMPT = [3, 1, 4, 1, 5]
DEADLINE_S = 60.0


def generate(request_id: int, max_tokens: int = 5) -> Generate:
    sampling = SamplingParams(seed=request_id, max_tokens=max_tokens, ignore_eos=True)
    return Generate(request_id=request_id, frontend=0, prompt_ids=pack_ids(PROMPT), sampling=sampling, arrival=1)


class Setup:
    def __init__(self, runner: FakeRunner | None = None, num_frontends: int = 1) -> None:
        facts = make_facts()
        self.engine = Engine(runner or FakeRunner(facts), facts, EngineConfig(model="fake"))
        self.inbox: MemoryChannel[EngineMessage] = MemoryChannel(EngineMessage)
        self.detokenizer: MemoryChannel[StepOutput] = MemoryChannel(DetokenizerMessage)
        self.frontends = [MemoryChannel[EngineStats](FrontendMessage) for _ in range(num_frontends)]

    def run(self) -> None:
        run(self.engine, self.inbox, self.detokenizer, self.frontends)

    def outputs(self) -> list[StepOutput]:
        return self.detokenizer.drain(100_000)

    def ends(self) -> dict[int, str]:
        return {finished.request_id: finished.reason for output in self.outputs() for finished in output.finished}


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.005)


def test_requests_in_one_output_per_step_out_and_an_ordered_end() -> None:
    setup = Setup()
    thread = in_background(setup.run)
    setup.inbox.send(generate(1))
    setup.inbox.send(generate(2))
    outputs: list[StepOutput] = []

    def all_done() -> bool:
        outputs.extend(setup.outputs())
        return sum(len(output.finished) for output in outputs) == 2

    eventually(all_done)
    setup.inbox.send(Shutdown())
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for output in outputs:
        for request_id, token in zip(unpack_request_ids(output.request_ids), unpack_ids(output.token_ids), strict=True):
            tokens[request_id].append(token)
    for request_id, got in tokens.items():
        assert got == expected_tokens(PROMPT, generate(request_id).sampling, request_id, 128)
    steps = [output.step for output in outputs]
    assert steps == sorted(set(steps))


def test_shutdown_ends_what_is_left_with_an_abort() -> None:
    setup = Setup()
    for message in (generate(1, max_tokens=100), generate(2, max_tokens=100), Shutdown()):
        setup.inbox.send(message)
    setup.run()
    assert setup.ends() == {1: "abort", 2: "abort"}
    assert setup.engine.scheduler.kv.idle


def test_an_abort_that_comes_before_its_request() -> None:
    setup = Setup()
    for message in (Abort(request_ids=[1]), generate(1), generate(2)):
        setup.inbox.send(message)
    thread = in_background(setup.run)
    eventually(lambda: setup.engine.stats().step > 0 and not setup.engine.has_work)
    setup.inbox.send(Shutdown())
    thread.join(DEADLINE_S)
    assert setup.ends() == {1: "abort", 2: "length"}


def test_garbage_and_messages_for_others_change_nothing() -> None:
    setup = Setup()
    setup.inbox.send_bytes(b"\xc1 no message")
    setup.inbox.send_bytes(b"")
    stray = Submit(
        request_ids=[7], frontend=0, prompt=pack_prompt(TokenPrompt(ids=b"")), sampling=SamplingParams(), arrival=0
    )
    setup.inbox.send(stray)
    torn = msgspec.structs.replace(generate(8), prompt_ids=b"abc")
    setup.inbox.send(torn)
    setup.inbox.send(generate(1))
    thread = in_background(setup.run)
    ends: dict[int, str] = {}

    def both_ended() -> bool:
        ends.update(setup.ends())
        return len(ends) == 2

    eventually(both_ended)
    setup.inbox.send(Shutdown())
    thread.join(DEADLINE_S)
    assert ends == {8: "rejected", 1: "length"}
    assert setup.inbox.dropped == 3


def test_a_burst_of_messages_does_not_hold_up_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MESSAGES_PER_STEP", 2)
    runner = FakeRunner(make_facts())
    runner.max_plans = 3
    setup = Setup(runner)
    for request_id in range(6):
        setup.inbox.send(generate(request_id, max_tokens=50))
    setup.inbox.send(Shutdown())
    setup.run()
    assert [len({row.request.request_id for row in plan.rows}) for plan in runner.plans] == [1, 4, 6]


def test_steps_without_news_are_not_sent() -> None:
    setup = Setup()
    setup.engine = Engine(FakeRunner(make_facts()), make_facts(), EngineConfig(model="fake", max_num_batched_tokens=1))
    thread = in_background(setup.run)
    setup.inbox.send(generate(1, max_tokens=1))
    eventually(lambda: setup.engine.stats().output_tokens == 1 and not setup.engine.has_work)
    setup.inbox.send(Shutdown())
    thread.join(DEADLINE_S)
    assert [output.step for output in setup.outputs()] == [len(PROMPT)]


def test_an_engine_that_is_broken_ends_the_process_after_the_last_word(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(FakeRunner(make_facts(), raise_in_wait=set(range(10))))
    for request_id in range(3):
        setup.inbox.send(generate(request_id))
    with caplog.at_level(logging.CRITICAL), pytest.raises(EngineBroken, match="3 steps failed"):
        setup.run()
    assert setup.ends() == {0: "error", 1: "error", 2: "error"}


class SlowRunner(FakeRunner):
    def launch(self, plan: object) -> Launched:
        time.sleep(0.02)
        return FakeRunner.launch(self, plan)  # type: ignore[arg-type]


def test_every_frontend_gets_a_heartbeat_and_the_last_one_shows_rest() -> None:
    setup = Setup(SlowRunner(make_facts()), num_frontends=2)
    setup.inbox.send(generate(1, max_tokens=40))
    thread = in_background(setup.run)
    eventually(lambda: setup.engine.stats().output_tokens == 40)
    beats: list[list[EngineStats]] = [[], []]

    def rested() -> bool:
        for seen, frontend in zip(beats, setup.frontends, strict=True):
            seen.extend(frontend.drain())
        return all(seen and seen[-1].output_tokens == 40 for seen in beats)

    eventually(rested)
    setup.inbox.send(Shutdown())
    thread.join(DEADLINE_S)
    for seen in beats:
        assert any(beat.running == 1 and beat.step_seconds > 0 for beat in seen)
        assert (seen[-1].running, seen[-1].kv_blocks_total) == (0, 63)


class FakeClock:
    now = 128.0

    def __call__(self) -> float:
        return self.now


def test_heartbeats_come_often_when_busy_and_at_once_when_it_ends() -> None:
    clock, channel = FakeClock(), MemoryChannel[EngineStats](FrontendMessage)
    engine = Setup().engine
    heartbeat = Heartbeat(engine, (channel,), clock)

    def beats() -> int:
        heartbeat.beat_if_due()
        return len(channel.drain())

    assert (beats(), beats()) == (1, 0)
    assert heartbeat.seconds_left == pytest.approx(HEARTBEAT_IDLE_S)
    clock.now += HEARTBEAT_IDLE_S
    assert (beats(), beats()) == (1, 0)
    engine.add(generate(1))
    assert heartbeat.seconds_left == pytest.approx(HEARTBEAT_BUSY_S)
    clock.now += HEARTBEAT_BUSY_S
    assert (beats(), beats()) == (1, 0)
    while engine.has_work:
        engine.step()
    assert (beats(), beats()) == (1, 0)
    assert heartbeat.seconds_left == pytest.approx(HEARTBEAT_IDLE_S)


def test_what_can_wait_is_done_piece_by_piece_once_it_is_quiet() -> None:
    now, facts = 0, make_facts()
    runner = FakeRunner(facts, put_off=4)
    engine = Engine(runner, facts, EngineConfig(model=""), clock=lambda: now)
    assert not engine.idle()  # it has only just started
    now += IDLE_AFTER_NS
    assert engine.idle()
    engine.add(generate(1))
    assert not engine.idle()
    while engine.has_work:
        engine.step()
    assert not engine.idle()
    assert runner.put_off == 3
    now += IDLE_AFTER_NS
    assert [engine.idle() for _ in range(4)] == [True, True, False, False]


def test_messages_are_taken_between_two_pieces_of_what_can_wait() -> None:
    runner = FakeRunner(make_facts(), put_off=10**9)
    setup = Setup(runner)
    setup.engine._last_step -= IDLE_AFTER_NS
    thread = in_background(setup.run)
    eventually(lambda: runner.put_off < 10**9 - 3)
    setup.inbox.send(generate(1, max_tokens=3))
    eventually(lambda: setup.engine.stats().output_tokens == 3)
    setup.inbox.send(Shutdown())
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_idle_is_a_blocked_poll() -> None:
    setup = Setup()
    waits: list[float | None] = []
    drains = 0

    class Watching(MemoryChannel[EngineMessage]):
        def wait(self, timeout_s: float | None = None) -> bool:
            waits.append(timeout_s)
            if len(waits) == 3:
                self.post(Shutdown())
            return MemoryChannel.wait(self, 0.0)

        def drain(self, limit: int = 1024) -> list[EngineMessage]:
            nonlocal drains
            drains += 1
            return MemoryChannel.drain(self, limit)

    setup.inbox = Watching(EngineMessage)
    setup.run()
    assert drains == 4
    assert waits[0] == 0.0  # the first heartbeat is due
    assert all(wait is not None and 0.0 < wait <= HEARTBEAT_IDLE_S for wait in waits[1:])

from __future__ import annotations

import pytest

from engine_core.build import build_engine
from engine_core.engine import Engine
from engine_core.loop import run
from engine_core.profiler import NothingToProfile, Profiler, parse_steps
from ipc.codec import pack_ids
from ipc.config import EngineConfig
from ipc.errors import UserError
from ipc.memory import MemoryChannel
from ipc.messages import DetokenizerMessage, EngineMessage, FrontendMessage, Generate, Profile, Profiled, Shutdown
from ipc.sampling import SamplingParams
from tests.fakes import FakeRunner, make_facts


class Calls:
    """Stands in for cudaProfilerStart and Stop, and remembers during which step each was called."""

    def __init__(self) -> None:
        self.runner = FakeRunner(make_facts(eos=()))
        self.seen: list[tuple[str, int]] = []

    def start(self) -> None:
        self.seen.append(("start", self.launched))

    def stop(self) -> None:
        self.seen.append(("stop", self.launched))

    @property
    def launched(self) -> int:
        return len(self.runner.plans)


@pytest.mark.parametrize(("text", "steps"), [("1:1", (1, 1)), ("10:20", (10, 20)), ("7:2147483647", (7, 2**31 - 1))])
def test_steps_are_two_numbers(text: str, steps: tuple[int, int]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    "text", ["", ":", "5", "5:", ":5", "0:5", "6:5", "-1:5", "1:2:3", "a:b", "1:2147483648", "1.0:2", " 1:2", "١:²"]
)
def test_anything_else_is_named(text: str) -> None:
    with pytest.raises(UserError, match="--profile-steps must be two numbers of steps like 100:200"):
        parse_steps(text)


@pytest.mark.parametrize("depth", [1, 2])
def test_capture_begins_before_a_steps_launch_and_ends_when_one_is_done(depth: int) -> None:
    calls = Calls()
    calls.runner.max_plans = 100
    config = EngineConfig(model="fake")
    engine = Engine(
        calls.runner, calls.runner.facts, config, depth=depth, profiler=Profiler("3:6", calls.start, calls.stop)
    )
    engine.add(
        Generate(request_id=1, frontend=0, prompt_ids=pack_ids([1]), sampling=SamplingParams(max_tokens=12), arrival=0)
    )
    while engine.has_work:
        engine.step()
    # Two steps were launched before; the last captured one is done when `depth - 1` later ones are on their way.
    assert calls.seen == [("start", 2), ("stop", 6 + depth - 1)]


def test_without_a_device_there_is_nothing_to_profile() -> None:
    with pytest.raises(NothingToProfile, match="no CUDA device"):
        Profiler().start()
    with pytest.raises(NothingToProfile, match="nsys profile --trace=nvtx"):
        Profiler().stop()
    with pytest.raises(NothingToProfile, match="--profile-steps 1:2: there is no CUDA device"):
        Profiler("1:2")


def test_wrong_steps_are_told_before_a_model_is_loaded() -> None:
    with pytest.raises(UserError, match="--profile-steps"):  # and not that there is no such model
        build_engine(EngineConfig(model="/nonexistent", profile_steps="9:3"))


def test_the_loop_answers_whoever_asked_and_nobody_for_a_forged_index() -> None:
    calls = Calls()
    config = EngineConfig(model="fake")
    for profiler, fails in ((Profiler(None, calls.start, calls.stop), False), (Profiler(), True)):
        engine = Engine(calls.runner, calls.runner.facts, config, profiler=profiler)
        inbox: MemoryChannel[EngineMessage] = MemoryChannel(EngineMessage)
        frontends: list[MemoryChannel[FrontendMessage]] = [MemoryChannel(FrontendMessage) for _ in range(2)]
        inbox.send(Profile(call_id=5, frontend=1, on=True))
        inbox.send(Profile(call_id=6, frontend=1, on=False))
        inbox.send(Profile(call_id=7, frontend=30_000, on=True))
        inbox.send(Shutdown())
        run(engine, inbox, MemoryChannel(DetokenizerMessage), frontends)
        answers = [message for message in frontends[1].drain() if isinstance(message, Profiled)]
        assert [(answer.call_id, answer.error is not None) for answer in answers] == [(5, fails), (6, fails)]
        assert not [message for message in frontends[0].drain() if isinstance(message, Profiled)]
    assert [name for name, _ in calls.seen] == ["start", "stop"]


def test_an_error_of_the_driver_is_the_callers_alone() -> None:
    def broken() -> None:
        raise RuntimeError("cudaErrorProfilerDisabled")

    calls = Calls()
    engine = Engine(
        calls.runner, calls.runner.facts, EngineConfig(model="fake"), profiler=Profiler(None, broken, broken)
    )
    answer = engine.profile(Profile(call_id=1, frontend=0, on=True))
    assert answer.error is not None
    assert "cudaErrorProfilerDisabled" in answer.error.message

"""The engine on a fake device: what goes in, what comes out, and that every request ends once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from engine_core.engine import MAX_FAILED_STEPS, Engine
from engine_core.tombstones import Tombstones
from ipc.codec import encode, make_decoder, pack_ids, unpack_ids, unpack_request_ids
from ipc.config import EngineConfig
from ipc.messages import DetokenizerMessage, Finished, FrontendMessage, Generate, Opened, StepOutput
from ipc.recorder.events import COMMIT, FINISHED
from ipc.recorder.reader import read_ring
from ipc.recorder.ring import RingRecorder
from ipc.sampling import SamplingParams
from tests.fakes import EOS, FakeRunner, expected_tokens, make_facts

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
both_depths = pytest.mark.parametrize("depth", [1, 2])


class Clock:
    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        self.now += 10
        return self.now


def make_engine(depth: int = 1, runner: FakeRunner | None = None, **config: Any) -> Engine:
    facts = make_facts()
    runner = FakeRunner(facts) if runner is None else runner
    return Engine(runner, facts, EngineConfig(model="fake", **config), depth=depth, clock=Clock())


def generate(request_id: int, prompt: list[int] = PROMPT, **sampling: Any) -> Generate:
    params = SamplingParams(**{"seed": 8, "max_tokens": 8, "ignore_eos": True} | sampling)
    return Generate(request_id=request_id, frontend=3, prompt_ids=pack_ids(prompt), sampling=params, arrival=500)


class Seen:
    """Everything an engine put out."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.opened: dict[int, Opened] = {}
        self.finished: dict[int, Finished] = {}
        self.outputs: list[StepOutput] = []

    def take(self, output: StepOutput) -> None:
        self.outputs.append(output)
        for opened in output.opened:
            assert opened.request_id not in self.opened
            self.opened[opened.request_id] = opened
        for request_id, token in zip(unpack_request_ids(output.request_ids), unpack_ids(output.token_ids), strict=True):
            assert request_id not in self.finished
            self.tokens.setdefault(request_id, []).append(token)
        for finished in output.finished:
            assert finished.request_id not in self.finished
            self.finished[finished.request_id] = finished


def run(engine: Engine, *messages: Generate) -> Seen:
    for message in messages:
        engine.add(message)
    seen = Seen()
    while engine.has_work:
        seen.take(engine.step())
    return seen


@both_depths
def test_tokens_are_those_of_the_request_alone(depth: int) -> None:
    messages = [generate(i, PROMPT[: i + 1], seed=i) for i in range(6)]
    seen = run(make_engine(depth, max_num_batched_tokens=5), *messages)
    for message in messages:
        expected = expected_tokens(unpack_ids(message.prompt_ids), message.sampling, message.request_id, 128)
        assert seen.tokens[message.request_id] == expected
        end = seen.finished[message.request_id]
        assert (end.reason, end.frontend, end.num_output_tokens, end.stop_token) == ("length", 3, 8, None)


@both_depths
def test_opened_comes_with_the_first_token_and_counts_what_was_cached(depth: int) -> None:
    engine = make_engine(depth)
    first = run(engine, generate(1))
    seen = run(engine, generate(2))
    assert first.outputs[0].opened[0].num_cached_tokens == 0
    (opened,) = seen.outputs[0].opened
    assert (opened.request_id, opened.frontend, opened.num_prompt_tokens, opened.num_cached_tokens) == (2, 3, 8, 4)
    assert opened.queued > 0
    assert unpack_request_ids(seen.outputs[0].request_ids) == [2]
    assert seen.finished[2].num_cached_tokens == 4
    assert engine.stats().prefix_hits == 4
    assert engine.stats().prefix_queries == 16


@both_depths
def test_every_kind_of_stop(depth: int) -> None:
    free = run(make_engine(depth), generate(1, max_tokens=100)).tokens[1]
    third = free[2]
    assert third not in (*free[:2], EOS)
    seen = run(
        make_engine(depth),
        generate(1, max_tokens=100, stop_token_ids=(third,)),
        generate(2, max_tokens=100, stop_token_ids=(third,), min_tokens=2),
        generate(3, max_tokens=100, stop_token_ids=(third,), min_tokens=3),
        generate(4, max_tokens=3, stop_token_ids=(third,)),
        generate(5, max_tokens=2, stop_token_ids=(third,)),
        generate(6, max_tokens=None),
    )
    assert seen.tokens[1] == seen.tokens[2] == seen.tokens[4] == free[:3]
    for request_id in (1, 2, 4):
        end = seen.finished[request_id]
        assert (end.reason, end.stop_token, end.stop_token_is_eos) == ("stop", third, False)
    assert len(seen.tokens[3]) > 3
    assert (seen.tokens[5], seen.finished[5].reason) == (free[:2], "length")
    assert (len(seen.tokens[6]), seen.finished[6].reason) == (120, "length")


def test_eos_is_the_models_or_the_requests_unless_ignored() -> None:
    free = run(make_engine(), generate(1, max_tokens=100)).tokens[1]
    theirs = free[2]
    position = free.index(EOS)
    message = generate(2, max_tokens=100, ignore_eos=False)
    own = Generate(
        request_id=3,
        frontend=0,
        prompt_ids=message.prompt_ids,
        sampling=message.sampling,
        arrival=0,
        eos_token_ids=(theirs,),
    )
    seen = run(make_engine(), message, own, generate(4, max_tokens=100, stop_token_ids=(EOS,)))
    assert seen.tokens[2] == seen.tokens[4] == free[: position + 1]
    assert seen.tokens[3] == free[:3]
    assert all(seen.finished[i].stop_token_is_eos for i in (2, 3, 4))


@both_depths
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_max_tokens_zero_opens_and_ends_without_a_token(depth: int, prompt_logprobs: int | None) -> None:
    seen = run(make_engine(depth, max_num_batched_tokens=3), generate(1, max_tokens=0, prompt_logprobs=prompt_logprobs))
    assert seen.tokens == {}
    assert seen.finished[1].reason == "length"
    last = seen.outputs[-1]
    assert [opened.request_id for opened in last.opened] == [1]
    assert [len(collected.values) for collected in last.prompt_logprobs] == ([8] if prompt_logprobs else [])


@both_depths
def test_prompt_logprobs_are_one_per_token_whatever_the_chunks(depth: int) -> None:
    whole = run(make_engine(depth), generate(1, prompt_logprobs=1))
    engine = make_engine(depth, max_num_batched_tokens=3)
    run(engine, generate(1))  # its blocks must not be used
    chunked = run(engine, generate(2, prompt_logprobs=1))
    (one,), (two,) = ([c for output in seen.outputs for c in output.prompt_logprobs] for seen in (whole, chunked))
    assert one.values == two.values
    assert unpack_ids(one.ids) == PROMPT
    assert one.values[0] is None
    assert len(one.values) == len(PROMPT)


def test_logprobs_point_at_their_rows() -> None:
    engine = make_engine()
    seen = run(engine, generate(1, seed=1), generate(2, seed=2, logprobs=0), generate(3, seed=3))
    for output in seen.outputs:
        ids, tokens = unpack_request_ids(output.request_ids), unpack_ids(output.token_ids)
        assert [ids[entry.row] for entry in output.logprobs] == [i for i in ids if i == 2]
        assert [-entry.value.logprob for entry in output.logprobs] == [tokens[entry.row] for entry in output.logprobs]


@both_depths
def test_a_row_of_nan_fails_alone_and_leaves_nothing_to_be_found(depth: int) -> None:
    runner = FakeRunner(make_facts(), nan_at={2: 5})
    engine = make_engine(depth, runner)
    seen = run(engine, generate(1, seed=1), generate(2, [7] * 9, seed=2), generate(3, seed=3))
    end = seen.finished[2]
    assert (end.reason, end.num_output_tokens) == ("error", 5)
    assert end.error is not None
    assert (end.error.status, "NaN" in end.error.message) == (500, True)
    assert [len(seen.tokens[i]) for i in (1, 2, 3)] == [8, 5, 8]
    assert run(engine, generate(4, [7] * 9)).finished[4].num_cached_tokens == 0


@both_depths
@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(
    depth: int, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = FakeRunner(make_facts())
    (runner.raise_in_launch if where == "launch" else runner.raise_in_wait).add(3)
    engine = make_engine(depth, runner, max_num_seqs=2)
    with caplog.at_level(logging.CRITICAL):
        seen = run(engine, *(generate(i, PROMPT[i:], seed=i) for i in range(4)))
    failed = [i for i, end in seen.finished.items() if end.reason == "error"]
    assert sorted(failed) == [0, 1]
    error = seen.finished[0].error
    assert error is not None
    assert (error.status, error.type) == (500, "server_error")
    assert "step 3" in error.message
    for i in (2, 3):
        assert seen.tokens[i] == expected_tokens(PROMPT[i:], generate(i).sampling, i, 128)
    engine.scheduler.check()
    assert engine.scheduler.kv.idle
    assert not engine.broken


@both_depths
def test_an_engine_that_only_fails_says_so_and_refuses_what_comes(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(make_facts(), raise_in_launch=set(range(100)))
    engine = make_engine(depth, runner, max_num_seqs=1)
    with caplog.at_level(logging.CRITICAL):
        seen = run(engine, *(generate(i) for i in range(8)))
    assert [seen.finished[i].reason for i in range(8)] == ["error"] * 8
    assert f"{MAX_FAILED_STEPS} steps failed in a row" in engine.broken
    late = run(engine, generate(9)).finished[9]
    assert late.error is not None
    assert late.error.status == 500


@both_depths
@pytest.mark.parametrize("steps_before", range(6))
def test_an_abort_ends_a_request_once_wherever_it_is(depth: int, steps_before: int) -> None:
    engine, seen = make_engine(depth, max_num_batched_tokens=4), Seen()
    engine.add(generate(1))
    engine.add(generate(2, [8] * 5))
    for _ in range(steps_before):
        seen.take(engine.step())
    engine.abort([1, 1])
    engine.abort([1])
    while engine.has_work:
        seen.take(engine.step())
    assert (seen.finished[1].reason, seen.finished[2].reason) == ("abort", "length")
    assert seen.finished[1].num_output_tokens == len(seen.tokens.get(1, []))
    assert engine.scheduler.kv.idle
    assert engine.stats().aborts == 1


def test_a_stop_string_is_a_normal_end() -> None:
    engine, seen = make_engine(), Seen()
    engine.add(generate(1))
    seen.take(engine.step())
    engine.abort([1], stop_string=True)
    while engine.has_work:
        seen.take(engine.step())
    assert (seen.finished[1].reason, seen.finished[1].num_output_tokens, engine.stats().aborts) == ("stop", 1, 0)


def test_an_abort_that_overtakes_its_request_still_ends_it() -> None:
    engine = make_engine()
    engine.abort([1])
    seen = run(engine, generate(1), generate(2))
    assert (seen.finished[1].reason, seen.finished[2].reason) == ("abort", "length")
    assert 1 not in seen.opened
    assert run(engine, generate(1)).finished[1].reason == "length"  # told once


def test_late_stop_strings_leave_no_tombstones() -> None:
    engine = make_engine()
    engine.abort(range(100), stop_string=True)
    assert len(engine._early_aborts) == 0


def test_tombstones_are_bounded_and_forget_the_oldest() -> None:
    stones = Tombstones(3)
    for request_id in (1, 2, 3, 1, 4):
        stones.add(request_id)
    assert len(stones) == 3
    assert [stones.take(request_id) for request_id in (2, 1, 3, 4, 4)] == [False, True, True, True, False]


def test_bad_requests_are_refused_with_the_reason() -> None:
    engine = make_engine()
    whole = generate(1)
    torn = Generate(request_id=1, frontend=3, prompt_ids=whole.prompt_ids[:-1], sampling=whole.sampling, arrival=0)
    seen = run(
        engine, torn, generate(2, []), generate(3, [1] * 128), generate(4, [50]), generate(5, stop_token_ids=(50,))
    )
    messages = [end.error.message for _, end in sorted(seen.finished.items()) if end.error and end.error.status == 400]
    assert all(end.reason == "rejected" for end in seen.finished.values())
    parts = ["int32", "empty", "128 tokens, but the prompt has 128", "0 and 49, got 50", "stop_token_ids must be below"]
    assert len(messages) == len(parts)
    assert all(part in message for part, message in zip(parts, messages, strict=True))
    assert seen.opened == {}


def test_a_request_id_in_use_does_not_disturb_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    engine.add(generate(1))
    engine.step()
    seen = run(engine, generate(1, [9]))
    assert seen.finished[1].num_prompt_tokens == len(PROMPT)
    assert "request id 1 is in use" in caplog.text


def test_seeds_are_the_requests_own_or_drawn_from_the_engines() -> None:
    def tokens(engine_seed: int, seed: int | None) -> list[int]:
        return run(make_engine(seed=engine_seed), generate(1, seed=seed)).tokens[1]

    assert tokens(1, 5) == tokens(2, 5)
    assert tokens(1, None) == tokens(1, None)
    assert tokens(1, None) != tokens(2, None)


def test_unseeded_requests_with_one_prompt_differ() -> None:
    seen = run(make_engine(), generate(1, seed=None), generate(2, seed=None))
    assert seen.tokens[1] != seen.tokens[2]


@both_depths
def test_salts_keep_prefixes_apart(depth: int) -> None:
    engine = make_engine(depth)
    cached = []
    for request_id, salt in enumerate(("a", "b", "", "a", "b")):
        plain = generate(request_id)
        salted = Generate(
            request_id=request_id,
            frontend=0,
            prompt_ids=plain.prompt_ids,
            sampling=plain.sampling,
            arrival=0,
            cache_salt=salt,
        )
        cached.append(run(engine, salted).finished[request_id].num_cached_tokens)
    assert cached == [0, 0, 0, 4, 4]


@both_depths
def test_idle_is_the_exact_baseline(depth: int) -> None:
    engine = make_engine(depth)
    before = engine.stats()
    run(engine, *(generate(i, [i] * (i + 1)) for i in range(10)))
    after = engine.stats()
    assert (after.running, after.waiting, after.step_seconds) == (0, 0, 0.0)
    assert after.kv_blocks_free + after.kv_blocks_cached == before.kv_blocks_free == after.kv_blocks_total
    assert (after.prompt_tokens, after.output_tokens) == (55, 80)


def test_a_step_with_nothing_to_do_is_empty() -> None:
    output = make_engine().step()
    assert (output.request_ids, output.opened, output.finished) == (b"", [], [])


def test_steps_may_be_more_than_32_bits_count(tmp_path: Path) -> None:
    """After two weeks of steps of half a millisecond: what the engine says and records must still be taken."""
    recorder = RingRecorder(tmp_path, "engine_core", 1 << 10)
    facts = make_facts()
    config = EngineConfig(model="fake")
    engine = Engine(FakeRunner(facts), facts, config, clock=Clock(), recorder=recorder)
    engine._step = engine.scheduler._planned = engine.scheduler._committed = 2**31 - 3
    seen = run(engine, generate(1), generate(2, [7]))
    steps = [output.step for output in seen.outputs]
    assert steps == list(range(2**31 - 2, 2**31 - 2 + len(steps)))
    assert steps[-1] > 2**31
    to_detokenizer, to_frontend = make_decoder(DetokenizerMessage), make_decoder(FrontendMessage)
    assert [to_detokenizer.decode(encode(output)) for output in seen.outputs] == seen.outputs
    assert to_frontend.decode(encode(engine.stats())).step == steps[-1]
    records = read_ring(recorder.path).records
    assert [record.code for record in records].count(FINISHED) == 2
    assert max(record.id for record in records if record.code == COMMIT) > 2**31

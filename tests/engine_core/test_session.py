"""A session over the real engine, scheduler, tokenizer and detokenizer, with a fake runner two steps ahead."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_core.collect import Collector, raise_refusal, stream_output
from engine_core.engine import Engine
from engine_core.outputs import EngineError
from engine_core.prompts import EncodedPrompt
from engine_core.session import Delta, Session
from engine_core.text_side import TextSide
from ipc.config import EngineConfig
from ipc.messages import Ended, Error, Usage
from ipc.sampling import SamplingParams
from tests.fakes import EOS, VOCAB_SIZE, FakeRunner, expected_tokens, make_facts

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextSide:
    """Token i is the word " wi"; the last one is the EOS."""
    tokenizer = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(VOCAB_SIZE)}, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("words")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return TextSide(str(folder))


def make_session(text: TextSide, depth: int = 2, **runner: object) -> Session:
    facts = make_facts()
    return Session(Engine(FakeRunner(facts, **runner), facts, EngineConfig(model="fake"), depth=depth), text)  # type: ignore[arg-type]


def words(ids: list[int]) -> str:
    return "".join(f" w{i}" for i in ids)


def run(
    session: Session, text: TextSide, sampling: SamplingParams, with_text: bool, ids: list[int] = PROMPT
) -> Collector:
    collector = Collector(EncodedPrompt(None, ids, with_text), sampling, text, with_text)
    session.open(ids, sampling, collector.add, with_text=with_text)
    while not collector.done:
        session.step()
    return collector


def assert_idle(session: Session) -> None:
    stats = session.engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("with_text", [True, False])
def test_every_choice_gets_the_tokens_of_its_own_seed(text: TextSide, depth: int, with_text: bool) -> None:
    session = make_session(text, depth)
    sampling = SamplingParams(n=3, seed=11, max_tokens=20, ignore_eos=True)
    output = run(session, text, sampling, with_text).output()
    for index, choice in enumerate(output.choices):
        expected = expected_tokens(PROMPT, sampling, 11 + index, 128)
        assert choice.token_ids == expected
        assert choice.text == words(expected)
        assert (choice.index, choice.finish_reason, choice.stop_reason) == (index, "length", None)
    assert output.usage.prompt_tokens == 5
    assert output.usage.completion_tokens == 60
    assert_idle(session)


@pytest.mark.parametrize("with_text", [True, False])
def test_an_eos_ends_the_answer_and_is_no_text(text: TextSide, with_text: bool) -> None:
    for seed in range(200):
        sampling = SamplingParams(seed=seed, max_tokens=30)
        expected = expected_tokens(PROMPT, sampling, seed, 128)
        if expected[-1] == EOS:
            break
    output = run(make_session(text), text, sampling, with_text).output()
    assert output.token_ids == expected
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    if with_text:
        assert output.text == words(expected[:-1])


def test_a_stop_string_cuts_text_tokens_and_engine_work(text: TextSide) -> None:
    session = make_session(text)
    plain = SamplingParams(seed=5, max_tokens=40, ignore_eos=True)
    expected = expected_tokens(PROMPT, plain, 5, 128)
    stop = f" w{expected[6]} w{expected[7]}"
    first = words(expected).index(stop)
    for include in (False, True):
        sampling = SamplingParams(
            seed=5, max_tokens=40, ignore_eos=True, stop=(stop, "never"), include_stop_str_in_output=include
        )
        output = run(session, text, sampling, True).output()
        assert output.text == words(expected)[: first + len(stop) * include]
        assert output.token_ids == expected[: len(output.token_ids)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.usage.completion_tokens == len(output.token_ids) <= 9
        session.abort_all()
        assert_idle(session)


def test_logprobs_have_one_entry_per_token_with_and_without_text(text: TextSide) -> None:
    sampling = SamplingParams(seed=2, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with_text, without = (run(make_session(text), text, sampling, kind).output() for kind in (True, False))
    assert with_text.logprobs is not None
    assert without.logprobs is not None
    assert [(item.token_id, item.logprob, item.rank) for item in with_text.logprobs] == [
        (item.token_id, item.logprob, item.rank) for item in without.logprobs
    ]
    assert [item.token_id for item in without.logprobs] == without.token_ids
    assert [item.text for item in with_text.logprobs] == [f" w{i}" for i in with_text.token_ids]
    for output in (with_text, without):
        assert output.prompt_logprobs is not None
        assert [item.token_id for item in output.prompt_logprobs] == PROMPT
        assert output.prompt_logprobs[0].logprob is None
        assert all(item.logprob is not None for item in output.prompt_logprobs[1:])


@pytest.mark.parametrize("with_text", [True, False])
def test_a_request_that_fails_in_a_step_fails_alone(text: TextSide, with_text: bool) -> None:
    session = make_session(text, nan_at={1: 3})
    sampling = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
    deltas: list[Delta] = []
    session.open(PROMPT, sampling, deltas.append, with_text=with_text)
    good = run(session, text, sampling, with_text).output()
    assert good.token_ids == expected_tokens(PROMPT, sampling, 1, 128)
    ended = deltas[-1].ended
    assert ended is not None
    assert ended.reason == "error"
    with pytest.raises(EngineError, match="NaN"):
        stream_output(deltas[-1])
    assert_idle(session)


@pytest.mark.parametrize("with_text", [True, False])
def test_a_refused_prompt_is_a_value_error(text: TextSide, with_text: bool) -> None:
    session = make_session(text)
    for ids, problem in (([1] * 500, "500"), ([VOCAB_SIZE], str(VOCAB_SIZE)), ([], "empty")):
        collector = run(session, text, SamplingParams(n=2), with_text, ids)
        with pytest.raises(ValueError, match=problem):
            collector.output()
    assert_idle(session)


def test_aborted_requests_are_silent_and_leave_nothing(text: TextSide) -> None:
    session = make_session(text)
    heard: list[Delta] = []
    sampling = SamplingParams(max_tokens=100, ignore_eos=True, n=2)
    for with_text in (True, False):
        first = session.open(PROMPT, sampling, heard.append, with_text=with_text)
        second = session.open(PROMPT, sampling, heard.append, with_text=with_text)
        for _ in range(4):
            session.step()
        session.abort(first)
        session.abort(first)
        count = len(heard)
        session.step()
        assert {delta.choice for delta in heard[count:]} == {0, 1}
        session.abort(second)
        count = len(heard)
        assert not session.has_work
        assert len(heard) == count
        assert_idle(session)


def test_a_refusal_by_a_broken_engine_is_no_fault_of_the_caller() -> None:
    usage = Usage(3, 0)
    with pytest.raises(ValueError, match="too long"):
        raise_refusal(Ended("rejected", usage, error=Error(400, "too long")))
    with pytest.raises(EngineError, match="3 steps failed"):
        raise_refusal(Ended("rejected", usage, error=Error(500, "3 steps failed", type="server_error")))

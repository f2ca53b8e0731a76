from __future__ import annotations

import random
from array import array
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from detokenizer_proc.actor import MAX_MERGED, mergeable
from detokenizer_proc.core import Detokenizer, Outcome
from ipc.messages import (
    Abort,
    Deltas,
    Detail,
    Error,
    Finished,
    Opened,
    PromptLogprobs,
    RowLogprobs,
    StepOutput,
    TextLogprob,
    TextSpec,
    TokenLogprobs,
)


def opened(request_id: int, frontend: int = 0, **spec: Any) -> Opened:
    return Opened(request_id, frontend, 7, 3, 0, msgspec.msgpack.encode(TextSpec(**spec)))


def finished(request_id: int, reason: Any = "stop", frontend: int = 0, **fields: Any) -> Finished:
    return Finished(request_id, frontend, reason, 7, 5, 3, **fields)


def step(rows: list[tuple[int, int]], **fields: Any) -> StepOutput:
    ids = array("q", [row[0] for row in rows]).tobytes()
    return StepOutput(step=1, request_ids=ids, token_ids=array("i", [row[1] for row in rows]).tobytes(), **fields)


def texts(deltas: Deltas) -> dict[int, str]:
    ids = memoryview(deltas.request_ids).cast("q").tolist()
    assert len(set(ids)) == len(ids), "one row per request"
    return dict(zip(ids, deltas.texts, strict=True))


def detail(outcome: Outcome, request_id: int, frontend: int = 0) -> Detail:
    deltas = outcome.deltas[frontend]
    row = memoryview(deltas.request_ids).cast("q").tolist().index(request_id)
    (found,) = [item for item in deltas.details if item.row == row]
    return found


def ended(outcome: Outcome, request_id: int, frontend: int = 0) -> Any:
    end = detail(outcome, request_id, frontend).ended
    assert end is not None
    return end


def test_many_streams_give_their_one_shot_decodes(byte_level: Tokenizer, rng: random.Random) -> None:
    """Random requests of three frontends, joined in any way, each ended once."""
    detokenizer = Detokenizer(byte_level)
    size = byte_level.get_vocab_size()
    outputs = {request: [rng.randrange(size) for _ in range(rng.randrange(1, 50))] for request in range(60)}
    joined: dict[int, str] = defaultdict(str)
    counts: dict[int, int] = defaultdict(int)
    ends: dict[int, int] = defaultdict(int)
    waiting, done = list(outputs), dict.fromkeys(outputs, 0)
    running: list[int] = []
    while waiting or running:
        new = [waiting.pop() for _ in range(min(len(waiting), rng.randrange(4)))]
        running += new
        rows: list[tuple[int, int]] = []
        finishes: list[Finished] = []
        for request in list(running):
            if request not in new and rng.random() < 0.2:
                continue
            rows.append((request, outputs[request][done[request]]))
            done[request] += 1
            if done[request] == len(outputs[request]):
                running.remove(request)
                finishes.append(finished(request, "length", request % 3))
        outcome = detokenizer.handle(step(rows, opened=[opened(r, r % 3) for r in new], finished=finishes))
        assert outcome.abort is None
        for frontend, deltas in outcome.deltas.items():
            for (request, text), count in zip(texts(deltas).items(), deltas.num_tokens, strict=True):
                assert request % 3 == frontend
                joined[request] += text
                counts[request] += count
            for item in deltas.details:
                if item.ended is not None:
                    ends[list(texts(deltas))[item.row]] += 1
    for request, ids in outputs.items():
        assert joined[request] == byte_level.decode(ids)
        assert counts[request] == len(ids)
        assert ends[request] == 1
    assert len(detokenizer) == 0


def test_stop_string_ends_the_request_once(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    ids = byte_level.encode("hello world, hello").ids
    outcome = detokenizer.handle(step([], opened=[opened(1, stop=("o w",))]))
    text = ""
    for token in ids:
        outcome = detokenizer.handle(step([(1, token)]))
        text += texts(outcome.deltas[0])[1]
        if outcome.abort:
            break
    assert text == "hell"
    end = ended(outcome, 1)
    assert (end.reason, end.stop_reason) == ("stop", "o w")
    assert (end.usage.prompt_tokens, end.usage.cached_tokens) == (7, 3)
    assert 0 < end.usage.completion_tokens < len(ids)
    assert outcome.abort == Abort(request_ids=[1], stop_string=True)
    # The engine goes on for a step or two, then says it has stopped: nothing of it comes out.
    assert detokenizer.handle(step([(1, ids[0])])) == ({}, None)
    assert detokenizer.handle(step([(1, ids[0])], finished=[finished(1, "abort")])) == ({}, None)
    assert not detokenizer._awaited


def test_stop_string_in_the_step_of_the_engines_own_end(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    (token,) = byte_level.encode("hello").ids
    outcome = detokenizer.handle(
        step([(1, token)], opened=[opened(1, stop=("ell",))], finished=[finished(1, "length")])
    )
    assert outcome.abort is None  # the engine is done with it
    assert texts(outcome.deltas[0]) == {1: "h"}
    assert ended(outcome, 1).stop_reason == "ell"
    assert not detokenizer._awaited


def test_stop_string_completed_by_the_flush(byte_level: Tokenizer) -> None:
    """ "b" is complete, but "ab…z" might still start before it; the end of the answer settles it."""
    detokenizer = Detokenizer(byte_level)
    rows = [(1, token) for token in byte_level.encode("xab").ids]
    outcome = detokenizer.handle(step(rows, opened=[opened(1, stop=("abz", "b"))], finished=[finished(1, "length")]))
    assert texts(outcome.deltas[0]) == {1: "xa"}
    assert (ended(outcome, 1).reason, ended(outcome, 1).stop_reason) == ("stop", "b")


def test_include_stop_string_and_min_tokens(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    (token,) = byte_level.encode(" world").ids
    spec: dict[str, Any] = {"stop": ("wor",), "include_stop_str_in_output": True, "min_tokens": 3}
    outcome = detokenizer.handle(step([(1, token)] * 2, opened=[opened(1, **spec)]))
    assert texts(outcome.deltas[0]) == {1: " world world"}
    outcome = detokenizer.handle(step([(1, token)]))
    assert texts(outcome.deltas[0]) == {1: " wor"}
    assert ended(outcome, 1).usage.completion_tokens == 3


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hellohello")])
def test_text_of_a_stop_token_is_left_out(byte_level: Tokenizer, include: bool, text: str) -> None:
    detokenizer = Detokenizer(byte_level)
    (token,) = byte_level.encode("hello").ids
    outcome = detokenizer.handle(
        step(
            [(1, token), (1, token)],
            opened=[opened(1, include_stop_str_in_output=include)],
            finished=[finished(1, stop_token=token)],
        )
    )
    assert texts(outcome.deltas[0]) == {1: text}
    assert outcome.deltas[0].num_tokens == [2]
    assert ended(outcome, 1).stop_reason == token


def test_eos_gives_no_stop_reason_and_no_text(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    eos = byte_level.encode("<|im_end|>").ids[0]
    end = finished(1, stop_token=eos, stop_token_is_eos=True)
    outcome = detokenizer.handle(step([(1, eos)], opened=[opened(1, skip_special_tokens=False)], finished=[end]))
    assert texts(outcome.deltas[0]) == {1: ""}
    assert (ended(outcome, 1).reason, ended(outcome, 1).stop_reason) == ("stop", None)


def test_unfinished_character_is_flushed(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    first = byte_level.encode("🙃").ids[0]
    outcome = detokenizer.handle(step([(1, first)], opened=[opened(1)]))
    assert texts(outcome.deltas[0]) == {1: ""}
    outcome = detokenizer.handle(step([], finished=[finished(1, "length")]))
    assert texts(outcome.deltas[0]) == {1: byte_level.decode([first])}
    assert outcome.deltas[0].num_tokens == [0]


def test_end_without_a_beginning_passes_through(byte_level: Tokenizer) -> None:
    error = Error(400, "prompt too long", param="prompt")
    end = finished(9, "rejected", frontend=2, error=error)
    outcome = Detokenizer(byte_level).handle(step([], finished=[end]))
    assert list(outcome.deltas) == [2]
    assert (ended(outcome, 9, 2).reason, ended(outcome, 9, 2).error) == ("rejected", error)


def test_echo_comes_first(byte_level: Tokenizer) -> None:
    (token,) = byte_level.encode("hello").ids
    outcome = Detokenizer(byte_level).handle(step([(1, token)], opened=[opened(1, echo="my prompt, ")]))
    assert texts(outcome.deltas[0]) == {1: "my prompt, hello"}
    first = detail(outcome, 1).opened
    assert first == Opened(1, 0, 7, 3, 0, b"")


def test_echo_alone(byte_level: Tokenizer) -> None:
    """max_tokens 0: opened and finished with no row."""
    outcome = Detokenizer(byte_level).handle(
        step([], opened=[opened(1, echo="prompt")], finished=[finished(1, "length")])
    )
    assert texts(outcome.deltas[0]) == {1: "prompt"}
    assert ended(outcome, 1).reason == "length"


def test_rows_of_unknown_requests_are_ignored(byte_level: Tokenizer) -> None:
    assert Detokenizer(byte_level).handle(step([(5, 1)])) == ({}, None)


@pytest.mark.parametrize("bad", ["id", "spec", "logprobs"])
def test_bad_data_fails_one_request_only(byte_level: Tokenizer, bad: str) -> None:
    detokenizer = Detokenizer(byte_level)
    (token,) = byte_level.encode("hello").ids
    broken = Opened(1, 0, 7, 3, 0, b"\xff" if bad == "spec" else b"")
    value = TokenLogprobs(-1.0, 1, top_ids=b"\0" * 8, top_logprobs=b"\0" * (4 if bad == "logprobs" else 8))
    outcome = detokenizer.handle(
        step(
            [(1, -5 if bad == "id" else token), (2, token)],
            opened=[broken, opened(2)],
            logprobs=[RowLogprobs(0, value)],
        )
    )
    end = ended(outcome, 1)
    assert (end.reason, end.error.status) == ("error", 500)
    assert outcome.abort == Abort(request_ids=[1], stop_string=True)
    assert texts(outcome.deltas[0])[2] == "hello"
    outcome = detokenizer.handle(step([(1, token), (2, token)], finished=[finished(1, "abort")]))
    assert texts(outcome.deltas[0]) == {2: "hello"}


def test_logprobs_have_text_and_bytes(byte_level: Tokenizer) -> None:
    part, whole = byte_level.encode("🙃").ids[0], byte_level.encode("hello").ids[0]
    value = TokenLogprobs(
        -0.5, 1, top_ids=array("i", [part, whole]).tobytes(), top_logprobs=array("f", [-0.5, -1.5]).tobytes()
    )
    outcome = Detokenizer(byte_level).handle(
        step(
            [(1, part)],
            opened=[opened(1)],
            logprobs=[RowLogprobs(0, value)],
            prompt_logprobs=[PromptLogprobs(1, array("i", [whole, part]).tobytes(), [None, value])],
        )
    )
    (got,) = detail(outcome, 1).logprobs
    assert (got.token_id, got.logprob, got.rank) == (part, -0.5, 1)
    assert "🙃".encode().startswith(got.data)
    assert got.text == got.data.decode("utf-8", "replace")
    assert got.top == [(part, got.text, got.data, -0.5), (whole, "hello", b"hello", -1.5)]
    first, second = detail(outcome, 1).prompt_logprobs
    assert first == TextLogprob(whole, "hello", b"hello", None)
    assert second == got


def test_steps_together_mean_what_they_mean_one_by_one(smollm2: Tokenizer, rng: random.Random) -> None:
    """Text, counts, ends and aborts, whatever is joined."""
    spec = [{}, {"stop": ("e",)}, {"stop": ("zz",), "min_tokens": 5}, {"echo": "echo "}]
    outputs = []
    live = dict.fromkeys(range(8))
    for number in range(40):
        new = [opened(i, i % 2, **spec[i % 4]) for i in live] if number == 0 else []
        over = [i for i in live if number > 20 and rng.random() < 0.1]
        rows = [(i, rng.randrange(smollm2.get_vocab_size())) for i in live]
        outputs.append(step(rows, opened=new, finished=[finished(i, "length", i % 2) for i in over]))
        for i in over:
            del live[i]
    alone, together = Detokenizer(smollm2), Detokenizer(smollm2)
    expected = collected([alone.handle(output) for output in outputs])
    joined = []
    while outputs:
        size = rng.randrange(1, 10)
        joined.append(together.handle_all(outputs[:size]))
        outputs = outputs[size:]
    assert collected(joined) == expected
    assert len(alone) == len(together) == len(live) - sum(1 for i in live if i in expected[2])


def collected(outcomes: list[Outcome]) -> tuple[dict[int, str], dict[int, int], dict[int, Any], int]:
    """(text, tokens, end) by request, and how many were opened."""
    joined: dict[int, str] = defaultdict(str)
    counts: dict[int, int] = defaultdict(int)
    ends: dict[int, Any] = {}
    opens = 0
    for outcome in outcomes:
        for deltas in outcome.deltas.values():
            ids = memoryview(deltas.request_ids).cast("q").tolist()
            for request_id, text, count in zip(ids, deltas.texts, deltas.num_tokens, strict=True):
                joined[request_id] += text
                counts[request_id] += count
            for item in deltas.details:
                opens += item.opened is not None
                if item.ended is not None:
                    assert ids[item.row] not in ends, "one end"
                    ends[ids[item.row]] = item.ended
    return joined, counts, ends, opens


def test_each_of_several_answers_for_its_own_requests(byte_level: Tokenizer) -> None:
    (token,) = byte_level.encode("hello").ids
    several = [Detokenizer(byte_level, index, 3) for index in range(3)]
    ids = list(range(100, 109))
    outputs = [
        step([(i, token) for i in ids], opened=[opened(i, stop=("ll",) if i == 101 else ()) for i in ids]),
        step([(i, token) for i in ids], finished=[finished(i, "length") for i in ids]),
        step([], finished=[finished(1, "rejected", error=Error(400, "too long"))]),  # never opened
    ]
    seen: dict[int, int] = defaultdict(int)
    for index, detokenizer in enumerate(several):
        for output in outputs:
            outcome = detokenizer.handle(output)
            for deltas in outcome.deltas.values():
                mine = memoryview(deltas.request_ids).cast("q").tolist()
                assert all(i % 3 == index for i in mine)
                for item in deltas.details:
                    seen[mine[item.row]] += item.ended is not None
            assert outcome.abort is None or outcome.abort.request_ids == [101]
        assert len(detokenizer) == 0
    assert seen == dict.fromkeys([*ids, 1], 1)


def test_steps_with_log_probabilities_are_not_joined() -> None:
    plain, large = step([(1, 1)]), step([(1, 1)], logprobs=[RowLogprobs(0, TokenLogprobs(-1.0, 1))])
    assert list(mergeable([])) == []
    assert list(mergeable([plain, plain, large, plain])) == [[plain, plain], [large], [plain]]
    assert [len(run) for run in mergeable([plain] * (2 * MAX_MERGED + 1))] == [MAX_MERGED, MAX_MERGED, 1]

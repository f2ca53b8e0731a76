from __future__ import annotations

import itertools
import random

import pytest

from frontend.trace.idle import causes, flatten, gaps, idle_pieces
from frontend.trace.summary import summarize
from frontend.trace.timeline import Span, build
from ipc.recorder import events
from tests.frontend.trace.recorded import ENGINE, FRONTEND, TOKENIZER, US, Tape, busy_server, one_request


def found(tape: Tape) -> dict[str, float]:
    """Microseconds by cause."""
    timeline = build(tape.recordings())
    return {cause: time / US for cause, time in causes(idle_pieces(timeline.engines[0], timeline.requests)).items()}


def alive(tape: Tape, begin: float, end: float) -> None:
    """A request is in the engine all that time."""
    tape.mark(ENGINE, events.RECEIVED, begin, 9, 20)
    tape.mark(ENGINE, events.FINISHED, end, 9, 1, 3)


def test_each_cause_gets_its_own_time() -> None:
    tape = Tape()
    alive(tape, 0, 10_000)
    tape.span(ENGINE, events.GPU, 100, 1000, 1)
    tape.span(ENGINE, events.COMMIT, 1000, 1070, 1)
    tape.span(ENGINE, events.PUBLISH, 1070, 1100, 1)
    tape.span(ENGINE, events.INTAKE, 1110, 1150)
    tape.span(ENGINE, events.SCHEDULE, 1150, 1400, 2)
    tape.span(ENGINE, events.LAUNCH, 1400, 1500, 2)
    tape.span(ENGINE, events.GC, 1420, 1480)
    tape.span(ENGINE, events.COLLECT, 1500, 2600, 2)
    tape.span(ENGINE, events.GPU, 1520, 2500, 2)
    assert found(tape) == {
        "schedule": 250, "commit": 70, "gc": 60, "launch": 40, "intake": 40, "publish": 30, "device": 20, "engine": 10,
    }  # fmt: skip


def test_waiting_for_input_is_put_down_to_who_had_it() -> None:
    tape = Tape()
    alive(tape, 0, 10_000)
    tape.span(ENGINE, events.GPU, 100, 1000, 1)
    tape.span(ENGINE, events.WAIT, 1000, 2000)
    tape.span(ENGINE, events.GPU, 2000, 3000, 2)
    tape.span(FRONTEND, events.PARSE, 1100, 1200, 70)
    tape.mark(FRONTEND, events.NAMED, 1200, 70, 1, 2, 1)
    tape.span(TOKENIZER, events.ENCODE, 1250, 1900, 70, 20, 1)
    tape.mark(ENGINE, events.RECEIVED, 1980, 70, 20)
    assert found(tape) == {"encode": 650, "hand-over": 250, "parse": 100}


def test_no_requests_are_nobodys_fault() -> None:
    tape = Tape()
    first_end = one_request(tape, 1, at=0.0, tokens=2)
    tape.span(ENGINE, events.WAIT, first_end, first_end + 1_000_000)
    one_request(tape, 2, at=first_end + 1_000_000, tokens=2, first_step=3)
    pieces = found(tape)
    assert pieces["no requests"] > 999_000
    engine = summarize(build(tape.recordings())).engines[0]
    assert engine.no_requests / US == pieces["no requests"]
    assert "no requests" not in engine.idle
    # the second request's way to the engine, and what the engine did between the steps
    assert engine.busy + engine.idle_total + engine.no_requests == engine.span
    assert engine.busy == 4 * 500 * US
    assert engine.steps == 4


@pytest.mark.parametrize(
    "how", ["refused", "left before it was encoded", "left when it was encoded", "left the engine"]
)
def test_a_request_that_came_to_nothing_is_not_alive_for_ever(how: str) -> None:
    tape = Tape()
    tape.span(ENGINE, events.GPU, 100, 1000, 1)
    tape.span(ENGINE, events.WAIT, 1000, 90_000)
    tape.span(ENGINE, events.GPU, 90_000, 91_000, 2)
    tape.span(FRONTEND, events.PARSE, 2000, 2100, 70)
    tape.mark(FRONTEND, events.NAMED, 2100, 70, 1, 2, 1)
    if how != "left before it was encoded":
        tape.span(TOKENIZER, events.ENCODE, 2200, 2300, 70, 0 if how == "refused" else 20, 1)
    if how == "left the engine":  # which had no time to say so
        tape.mark(ENGINE, events.RECEIVED, 2350, 70, 20)
    tape.mark(FRONTEND, events.LEFT, 2400, 70)
    pieces = found(tape)
    assert pieces["no requests"] == 89_000 - 400
    assert pieces.get("hand-over", 0) <= 400


def test_overlapped_steps_leave_no_gap() -> None:
    """The next step is planned and launched while this one runs: nothing is anyone's fault."""
    tape = Tape()
    alive(tape, 0, 10_000)
    for number in range(1, 9):
        at = 100 + 500 * number
        tape.span(ENGINE, events.SCHEDULE, at - 450, at - 400, number)
        tape.span(ENGINE, events.LAUNCH, at - 400, at - 300, number)
        tape.span(ENGINE, events.GPU, at, at + 498, number)
        tape.span(ENGINE, events.COLLECT, at - 300, at + 4, number - 1)
    assert found(tape) == {"device": 14}


@pytest.mark.parametrize("seed", range(5))
def test_pieces_cover_every_gap_once(seed: int) -> None:
    timeline = build(busy_server(seed))
    engine = timeline.engines[0]
    pieces = sorted(idle_pieces(engine, timeline.requests))
    assert all(piece.end > piece.begin for piece in pieces)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(pieces))
    assert sum(piece.end - piece.begin for piece in pieces) == sum(end - begin for begin, end in gaps(engine.device))


@pytest.mark.parametrize("seed", range(20))
def test_flattened_spans_belong_to_the_innermost(seed: int) -> None:
    draw = random.Random(seed)
    spans: list[Span] = []

    def nest(begin: int, end: int, depth: int) -> None:
        at = begin
        while at < end and depth < 4:
            low = draw.randrange(at, end + 1)
            high = draw.randrange(low, end + 1)
            if high > low:
                spans.append(Span(low, high, draw.choice([22, 23, 26, 61]), depth, 0, 0, 0))
                nest(low, high, depth + 1)
            at = high + 1

    nest(0, 200, 0)
    pieces = flatten(spans)
    for moment in range(201):
        inner = [s for s in spans if s.begin <= moment < s.end]
        here = [piece for piece in pieces if piece.begin <= moment < piece.end]
        assert len(here) == bool(inner)
        if inner:
            assert here[0].cause == max(inner, key=lambda span: span.id).name


def test_a_device_that_never_ran_was_not_idle() -> None:
    tape = Tape()
    tape.span(ENGINE, events.SCHEDULE, 0, 10, 1)
    timeline = build(tape.recordings())
    assert idle_pieces(timeline.engines[0], timeline.requests) == []
    assert summarize(timeline).engines[0].steps == 0

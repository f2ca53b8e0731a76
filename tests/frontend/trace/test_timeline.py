from __future__ import annotations

from dataclasses import replace

import pytest

from frontend.trace.timeline import STAGES, build, percentile
from ipc.recorder import events
from tests.frontend.trace.recorded import DETOKENIZER, ENGINE, FRONTEND, START, US, Tape, busy_server, one_request


@pytest.mark.parametrize("first_step", [1, 2**31 - 2, 2**40])
def test_a_requests_stages_add_up_to_its_whole_time(first_step: int) -> None:
    tape = Tape()
    end = one_request(tape, 77, at=0.0, tokens=3, first_step=first_step)
    (request,) = build(tape.recordings()).requests
    assert request.complete
    assert (request.id, request.prompt_tokens, request.output_tokens) == (77, 20, 3)
    stages = request.stages()
    assert tuple(stages) == STAGES
    assert sum(stages.values()) == request.total == end * US
    us = {name: time / US for name, time in stages.items()}
    # 430 scheduled; 970 first token computed; steps take 570; decoded 90 after the device; written at the end
    assert us == {
        "parse": 100, "tokenize": 250, "queue": 80, "prefill": 545, "decode": 1140, "detokenize": 85, "write": 80,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_so_do_those_of_any_request(seed: int) -> None:
    requests = build(busy_server(seed)).requests
    assert len(requests) >= 12
    for request in requests:
        assert request.complete
        assert sum(request.stages().values()) == request.total > 0
        assert min(request.stages().values()) >= 0


def test_every_choice_of_a_request_is_followed() -> None:
    tape = Tape()
    one_request(tape, 50, at=0.0, choices=3)
    requests = build(tape.recordings()).requests
    assert [request.id for request in requests] == [50, 51, 52]
    assert {request.name for request in requests} == {(50, 7)}
    assert all(request.complete for request in requests)


def test_a_request_that_a_stop_string_ends_has_an_empty_end() -> None:
    """The engine hears of it later than the client."""
    tape = Tape()
    end = one_request(tape, 5, at=0.0)
    recordings = tape.recordings()
    for recording in recordings:
        recording.records[:] = [
            record._replace(begin=record.begin + 5000 * US) if record.code == events.FINISHED else record
            for record in recording.records
        ]
    (request,) = build(recordings).requests
    assert sum(request.stages().values()) == request.total == end * US
    assert request.stages()["write"] == 0


def test_a_request_seen_in_part_is_not_complete() -> None:
    for missing in (events.PARSE, events.ENCODE, events.FIRST_TOKEN, events.FINISHED, events.WRITE):
        tape = Tape()
        one_request(tape, 5, at=0.0)
        recordings = tape.recordings()
        for recording in recordings:
            recording.records[:] = [record for record in recording.records if record.code != missing]
        requests = build(recordings).requests
        assert [request.complete for request in requests] == [False]
        assert (requests[0].stages(), requests[0].total) == ({}, 0)


def test_a_window_leaves_out_what_lies_outside() -> None:
    tape = Tape()
    for number in range(1, 11):
        tape.step(number, at=1000.0 * number)
    timeline = build(tape.recordings(), START + 3000 * US, START + 5000 * US)
    assert [step.id for step in timeline.engines[0].device] == [3, 4]
    assert (timeline.begin, timeline.end) == (START + 3000 * US, START + 5000 * US)


def test_what_one_ring_has_lost_is_not_shown_of_the_others() -> None:
    tape = Tape()
    for number in range(1, 11):
        tape.step(number, at=1000.0 * number)
    recordings = tape.recordings()
    at = next(index for index, recording in enumerate(recordings) if recording.name == DETOKENIZER)
    recordings[at] = replace(recordings[at], records=recordings[at].records[6:], lost=6)
    timeline = build(recordings)
    assert timeline.engines[0].device[0].id == 8
    assert timeline.begin >= START + 7000 * US


def test_the_warm_up_and_other_processes_are_told_apart() -> None:
    tape = Tape()
    tape.span(ENGINE, events.GPU, 0, 10, 0)
    tape.step(1, 100.0)
    tape.span(FRONTEND, events.DELIVER, 0, 10)
    timeline = build(tape.recordings())
    assert [process.name for process in timeline.engines] == [ENGINE]
    assert [step.id for step in timeline.engines[0].device] == [1]
    assert not timeline.engines[0].computes_itself
    cpu = Tape()
    cpu.span(ENGINE, events.GPU, 10, 90, 1, 5, 1, 1)
    cpu.span(ENGINE, events.LAUNCH, 5, 95, 1)
    assert build(cpu.recordings()).engines[0].computes_itself


def test_nothing_makes_an_empty_timeline() -> None:
    timeline = build([])
    assert (timeline.requests, timeline.processes, timeline.begin, timeline.end) == ([], [], 0, 0)
    assert percentile([], 0.5) == 0.0
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(range(100), 0.99) == 99

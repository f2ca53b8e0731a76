from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from frontend.trace.chrome import chrome_trace
from frontend.trace.timeline import Timeline, build
from ipc.recorder import events
from tests.frontend.trace import trace_format
from tests.frontend.trace.recorded import FRONTEND, PIDS, START, US, Tape, busy_server, one_request


def trace_of(timeline: Timeline, only: set[int] | None = None) -> list[dict[str, Any]]:
    """As a reader of the file sees it, checked."""
    trace = json.loads(msgspec.json.encode(chrome_trace(timeline, only)))
    trace_format.check(trace, (timeline.end - timeline.begin) / 1000)
    found: list[dict[str, Any]] = trace["traceEvents"]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_any_recording_makes_a_good_trace(seed: int) -> None:
    recordings = busy_server(seed)
    trace_of(build(recordings))
    whole = build(recordings)
    length = whole.end - whole.begin
    for begin, end in ((0.2, 0.7), (0.5, 0.51), (0.99, 2.0)):
        part = build(recordings, whole.begin + round(begin * length), whole.begin + round(end * length))
        trace_of(part)


def test_a_request_is_followed_through_all_processes() -> None:
    tape = Tape()
    one_request(tape, 0x77, at=0.0, tokens=3)
    found = trace_of(build(tape.recordings()))
    slices = {(e["pid"], e["ts"]): e["name"] for e in found if e["ph"] == "X"}
    flow = [slices[e["pid"], e["ts"]] for e in found if e["ph"] in "stf" and e["id"] == "77"]
    assert flow == ["parse", "encode", "schedule", "publish", "decode", "write", "decode", "write"]
    assert {e["pid"] for e in found if e["ph"] in "stf"} == set(PIDS.values())
    lifetimes = [(e["name"], e["ph"]) for e in found if e["ph"] in "be"]
    assert lifetimes == [(name, phase) for name in ("queue", "prefill", "decode") for phase in "be"]


def test_one_track_for_each_process_and_device() -> None:
    tape = Tape()
    one_request(tape, 1, at=0.0)
    found = trace_of(build(tape.recordings()))
    names = {e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {
        "frontend (101)", "tokenizer_proc (102)", "engine_core (103)", "detokenizer_proc (104)", "GPU of engine_core",
    }  # fmt: skip
    gpu = [e for e in found if e["name"] == "gpu step"]
    assert [e["args"]["step"] for e in gpu] == [1, 2, 3]
    assert {e["dur"] for e in gpu} == {500.0}


def test_counters_of_each_step() -> None:
    tape = Tape()
    one_request(tape, 1, at=0.0)
    found = [e for e in trace_of(build(tape.recordings())) if e["ph"] == "C"]
    assert [e["args"] for e in found if e["name"] == "requests"] == [{"running": 4, "waiting": 0}] * 3
    assert [e["args"] for e in found if e["name"] == "batch tokens"] == [{"tokens": 4}] * 3
    assert [e["args"] for e in found if e["name"] == "KV blocks used"] == [{"blocks": 12}] * 3


def test_spans_that_overlap_get_threads_of_their_own() -> None:
    tape = Tape()
    for index in range(5):
        tape.span(FRONTEND, events.WRITE, 10 * index, 10 * index + 35, index)
    found = [e for e in trace_of(build(tape.recordings())) if e["ph"] == "X"]
    assert {e["tid"] for e in found} == {1, 2, 3, 4}


def test_flows_of_one_request_alone() -> None:
    tape = Tape()
    one_request(tape, one_request(tape, 1, at=0.0) and 2, at=5000.0, first_step=4)
    timeline = build(tape.recordings())
    assert {e["id"] for e in trace_of(timeline) if e["ph"] in "stfbe"} == {"1", "2"}
    assert {e["id"] for e in trace_of(timeline, {2}) if e["ph"] in "stfbe"} == {"2"}


def test_times_can_be_brought_back_to_the_clocks() -> None:
    tape = Tape()
    tape.step(1, at=40.0)
    trace = chrome_trace(build(tape.recordings()))
    assert trace["otherData"] == {
        "monotonic_ns_at_0": START + 40 * US,
        "realtime_ns_at_0": START + 40 * US + 10**18,
    }

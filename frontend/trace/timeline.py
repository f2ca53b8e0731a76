"""The recordings of a run as one timeline: spans by process, steps, and each request's way through the processes.

Which process does what is told by its records, not by its name, so there may be any number of each kind. All times are
CLOCK_MONOTONIC ns.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ipc.recorder import events
from ipc.recorder.events import KINDS
from ipc.recorder.reader import Recording

# Lifetimes of requests, not something a thread does.
NOT_ON_A_TRACK = frozenset({events.FIRST_TOKEN})


class Span(NamedTuple):
    begin: int
    end: int
    code: int
    id: int
    a: int
    b: int
    c: int

    @property
    def name(self) -> str:
        return KINDS[self.code].name

    @property
    def duration(self) -> int:
        return self.end - self.begin


@dataclass(slots=True)
class Process:
    """What one process did. `spans` by begin, outer ones first; `device` are the steps on its GPU."""

    name: str
    pid: int
    spans: list[Span] = field(default_factory=list)
    marks: list[Span] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)
    lost: int = 0
    torn: int = 0

    @property
    def is_engine(self) -> bool:
        return any(span.code in (events.SCHEDULE, events.GPU) for span in self.spans) or bool(self.device)

    @property
    def computes_itself(self) -> bool:
        """The device is this process's CPU."""
        return any(step.c for step in self.device)

    def of(self, code: int) -> list[Span]:
        return [span for span in self.spans if span.code == code]


STAGES = ("parse", "tokenize", "queue", "prefill", "decode", "detokenize", "write")


@dataclass(slots=True)
class RequestLife:
    """When one request passed where; 0 is what was not recorded."""

    id: int
    name: tuple[int, int] | None = None  # see `events.name_words`
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    path: list[tuple[int, Span]] = field(default_factory=list)  # (pid, span) where it was, by time
    parsed: Span | None = None
    encoded: Span | None = None
    received: int = 0
    scheduled: int = 0
    first_token: int = 0
    finished: int = 0
    left: int = 0  # it ended without the engine, or before the engine heard of that
    decoded: int = 0
    written: int = 0

    @property
    def begin(self) -> int:
        return self.parsed.begin if self.parsed else self.encoded.begin if self.encoded else self.received

    @property
    def end(self) -> int:
        """When it was nobody's work any more; 0 if that was not recorded."""
        return self.finished or self.left

    @property
    def complete(self) -> bool:
        """Seen from its arrival to the end of its answer."""
        return bool(self.parsed and self.encoded and self.first_token and self.finished and self.written)

    @property
    def total(self) -> int:
        """From the first byte parsed to the last byte written."""
        return self.written - self.begin if self.complete else 0

    def stages(self) -> dict[str, int]:
        """Nanoseconds of each of `STAGES`, which follow on one another; their sum is `total`.

        Waiting for a process counts as time in its stage. A request that a stop string ends is finished by the
        detokenizer before the engine hears of it: its last stages may be empty.
        """
        if not self.complete or self.parsed is None or self.encoded is None:
            return {}
        ends = (self.parsed.end, self.encoded.end, self.scheduled, self.first_token, self.finished, self.decoded)
        stages: dict[str, int] = {}
        at = self.begin
        for name, end in zip(STAGES, (*ends, self.written), strict=True):
            until = min(max(end, at), self.written)
            stages[name] = until - at
            at = until
        return stages


@dataclass(slots=True)
class Timeline:
    processes: list[Process]
    requests: list[RequestLife]  # by their begin
    begin: int
    end: int
    realtime_offset: int = 0  # CLOCK_REALTIME - CLOCK_MONOTONIC

    @property
    def engines(self) -> list[Process]:
        return [process for process in self.processes if process.is_engine]


def build(recordings: Sequence[Recording], begin: int | None = None, end: int | None = None) -> Timeline:
    """The timeline of what overlaps [begin, end]; by default, of all that is there for every process."""
    if begin is None:
        begin = max((ring.records[0].begin for ring in recordings if ring.lost and ring.records), default=0)
    processes = [_process(recording, begin, end) for recording in recordings]
    spans = [span for process in processes for span in (*process.spans, *process.device)]
    first = min((span.begin for span in spans), default=0)
    last = max((span.end for span in spans), default=begin)
    offset = recordings[0].realtime_ns - recordings[0].monotonic_ns if recordings else 0
    return Timeline(processes, _requests(processes), max(first, begin), last if end is None else min(last, end), offset)


def _process(recording: Recording, begin: int, end: int | None) -> Process:
    process = Process(recording.name, recording.pid, lost=recording.lost, torn=recording.torn)
    for record in recording.records:
        if record.end < begin or (end is not None and record.begin > end):
            continue
        span = Span(record.begin, record.end, record.code, record.id, record.a, record.b, record.c)
        if KINDS[record.code].mark:
            process.marks.append(span)
        elif record.code == events.GPU:
            if record.id:  # not of the warm-up
                process.device.append(span)
        else:
            process.spans.append(span)
    process.spans.sort(key=lambda span: (span.begin, -span.end))
    process.device.sort()
    return process


def _requests(processes: Sequence[Process]) -> list[RequestLife]:
    lives: dict[int, RequestLife] = {}

    def life(request_id: int) -> RequestLife:
        return lives.setdefault(request_id, RequestLife(request_id))

    # first id of an HTTP request -> ids of all its choices
    families: dict[int, range] = {}
    for process in processes:
        for mark in process.marks:
            if mark.code == events.NAMED:
                families[mark.id] = range(mark.id, mark.id + max(1, mark.c))
                for request_id in families[mark.id]:
                    life(request_id).name = mark.a, mark.b
            elif mark.code == events.RECEIVED:
                life(mark.id).received, life(mark.id).prompt_tokens = mark.begin, mark.a
            elif mark.code == events.FINISHED:
                life(mark.id).finished, life(mark.id).output_tokens = mark.begin, mark.b
            elif mark.code == events.LEFT:
                life(mark.id).left = mark.begin
    outputs = _outputs(processes)
    for process in processes:
        for span in process.spans:
            if span.code == events.PARSE:
                for request_id in families.get(span.id, ()):
                    life(request_id).parsed = span
                    life(request_id).path.append((process.pid, span))
            elif span.code == events.ENCODE:
                for request_id in range(span.id, span.id + max(1, span.b)):
                    life(request_id).encoded = span
                    life(request_id).path.append((process.pid, span))
            elif span.code == events.FIRST_TOKEN:
                _first_token(life(span.id), process, span, outputs)
    _ends(lives, processes, outputs)
    _writes(lives, families, processes)
    for found in lives.values():
        found.path.sort(key=lambda place: place[1].begin)
    return sorted(lives.values(), key=lambda found: (found.begin, found.id))


_Outputs = dict[int, dict[int, tuple[int, Span]]]  # code -> output number -> (pid, its span)


def _outputs(processes: Sequence[Process]) -> _Outputs:
    found: _Outputs = {events.PUBLISH: {}, events.DECODE: {}}
    for process in processes:
        for span in process.spans:
            if span.code in found:
                found[span.code][span.id & events.STEP_MASK] = process.pid, span
    return found


def _first_token(request: RequestLife, engine: Process, span: Span, outputs: _Outputs) -> None:
    request.scheduled, request.first_token = span.begin, span.end
    request.prompt_tokens, request.cached_tokens = span.b, span.c
    at = bisect.bisect_right(engine.spans, span.begin, key=lambda other: other.begin)
    near = (other for other in reversed(engine.spans[max(0, at - 4) : at]) if other.code == events.SCHEDULE)
    if (schedule := next(near, None)) is not None and schedule.end >= span.begin:
        request.path.append((engine.pid, schedule))
    for code in (events.PUBLISH, events.DECODE):
        if span.a in outputs[code]:
            request.path.append(outputs[code][span.a])


def _ends(lives: dict[int, RequestLife], processes: Sequence[Process], outputs: _Outputs) -> None:
    for process in processes:
        for mark in process.marks:
            if mark.code == events.FINISHED and mark.a in outputs[events.DECODE]:
                place = outputs[events.DECODE][mark.a]
                lives[mark.id].decoded = place[1].end
                if place not in lives[mark.id].path:
                    lives[mark.id].path.append(place)


def _writes(lives: dict[int, RequestLife], families: dict[int, range], processes: Sequence[Process]) -> None:
    """The first piece of each answer, and the one with its end: the first that ends after it was decoded."""
    writes: dict[int, list[tuple[int, Span]]] = defaultdict(list)
    for process in processes:
        for span in process.spans:
            if span.code == events.WRITE:
                writes[span.id].append((process.pid, span))
    for first_id, pieces in writes.items():
        for request_id in families.get(first_id, ()):
            request = lives[request_id]
            opening = next((place for place in pieces if place[1].end >= request.first_token > 0), None)
            closing = next((place for place in pieces if place[1].end >= request.decoded > 0), pieces[-1])
            for place in (opening, closing):
                if place is not None and place not in request.path:
                    request.path.append(place)
            if request.finished:
                request.written = closing[1].end


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of the values do not exceed; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

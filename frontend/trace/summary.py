"""The figures of a timeline: step times, how busy the device was, who left it idle, where requests spent their time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from frontend.trace.idle import NO_REQUESTS, Piece, causes, idle_pieces
from frontend.trace.timeline import STAGES, Process, RequestLife, Span, Timeline, percentile
from ipc.recorder import events


@dataclass(frozen=True, slots=True)
class Stat:
    """Times of one kind, in microseconds."""

    name: str
    count: int
    p50: float
    p99: float
    total: float

    @classmethod
    def of(cls, name: str, nanoseconds: Iterable[int]) -> Stat:
        times = [value / 1000 for value in nanoseconds]
        return cls(name, len(times), percentile(times, 0.5), percentile(times, 0.99), sum(times))


@dataclass(slots=True)
class EngineSummary:
    """One engine and its device. Times in ns, from its first step in the timeline to the end of its last."""

    process: Process
    device: str  # "GPU", or "compute" where the engine's CPU is the device
    steps: int = 0
    span: int = 0
    busy: int = 0
    idle: dict[str, int] = field(default_factory=dict)  # cause -> ns, without NO_REQUESTS
    no_requests: int = 0
    pieces: list[Piece] = field(default_factory=list)
    stats: list[Stat] = field(default_factory=list)

    @property
    def idle_total(self) -> int:
        return sum(self.idle.values())

    def share(self, nanoseconds: int) -> float:
        """Of the time in which there were requests."""
        worked = self.span - self.no_requests
        return nanoseconds / worked if worked > 0 else 0.0


@dataclass(slots=True)
class Summary:
    engines: list[EngineSummary]
    others: list[tuple[str, list[Stat]]]  # process -> its spans
    requests: list[RequestLife]  # those seen from end to end
    unfinished: int
    stages: list[Stat]


def summarize(timeline: Timeline) -> Summary:
    complete = [request for request in timeline.requests if request.complete]
    others = [
        (process.name, _stats(process)) for process in timeline.processes if not process.is_engine and process.spans
    ]
    times = [request.stages() for request in complete]
    stages = [Stat.of(name, [stage[name] for stage in times]) for name in STAGES] if complete else []
    if complete:
        stages.append(Stat.of("total", [request.total for request in complete]))
    engines = [_engine(process, timeline.requests) for process in timeline.engines]
    return Summary(engines, others, complete, len(timeline.requests) - len(complete), stages)


def _engine(process: Process, requests: list[RequestLife]) -> EngineSummary:
    device = "compute" if process.computes_itself else "GPU"
    summary = EngineSummary(process, device)
    steps = process.device
    if not steps:
        return summary
    summary.steps = len(steps)
    summary.span = max(step.end for step in steps) - steps[0].begin
    summary.pieces = idle_pieces(process, requests)
    found = causes(summary.pieces)
    summary.no_requests = found.pop(NO_REQUESTS, 0)
    summary.idle = found
    summary.busy = summary.span - summary.idle_total - summary.no_requests
    summary.stats = [
        Stat.of("step, begin to begin", _periods(steps, summary.pieces)),
        Stat.of(f"{device} step", [step.duration for step in steps]),
        Stat.of("idle before a step", _idle_before(steps, summary.pieces)),
        *_stats(process),
    ]
    return summary


def _stats(process: Process) -> list[Stat]:
    by_name: dict[str, list[int]] = {}
    for span in process.spans:
        if span.code not in (events.WAIT, events.FIRST_TOKEN):
            by_name.setdefault(span.name, []).append(span.duration)
    return [Stat.of(name, times) for name, times in by_name.items()]


def _periods(steps: list[Span], pieces: list[Piece]) -> list[int]:
    """From one step's begin to the next one's, where there was work in between all the time."""
    rested = sorted((piece.begin, piece.end) for piece in pieces if piece.cause == NO_REQUESTS)
    periods, at = [], 0
    for step, following in itertools.pairwise(steps):
        while at < len(rested) and rested[at][1] <= step.begin:
            at += 1
        if at == len(rested) or rested[at][0] >= following.begin:
            periods.append(following.begin - step.begin)
    return periods


def _idle_before(steps: list[Span], pieces: list[Piece]) -> list[int]:
    """Idle time in front of each step but the first, without the time in which there were no requests."""
    idle, at = [], 0
    worked = [piece for piece in pieces if piece.cause != NO_REQUESTS]
    for step in steps[1:]:
        total = 0
        while at < len(worked) and worked[at].end <= step.begin:
            total += worked[at].end - worked[at].begin
            at += 1
        idle.append(total)
    return idle

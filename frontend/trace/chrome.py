"""A timeline in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One track per process, and one per device; spans are complete events (X), a request's way through the processes is a
flow (s, t, f), its waiting, prefill and decode are async spans (b, e), the rest is counters (C). Times are microseconds
from the timeline's begin; `otherData` says what that is in CLOCK_MONOTONIC and in CLOCK_REALTIME.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from frontend.trace.timeline import NOT_ON_A_TRACK, Process, RequestLife, Span, Timeline
from ipc.recorder import events
from ipc.recorder.events import KINDS

Event = dict[str, Any]

DEVICE_PID = 10_000_000  # above any process's: devices are tracks of their own
MAIN = 1


def chrome_trace(timeline: Timeline, only: set[int] | None = None) -> dict[str, Any]:
    """`only`: the requests whose flows are drawn; by default all."""
    writer = _Writer(timeline)
    found = [*writer.tracks(), *writer.flows(only), *writer.lifetimes(only), *writer.counters()]
    return {
        "traceEvents": found,
        "displayTimeUnit": "ns",
        "otherData": {
            "monotonic_ns_at_0": timeline.begin,
            "realtime_ns_at_0": timeline.begin + timeline.realtime_offset,
        },
    }


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._threads: dict[tuple[int, Span], int] = {}  # (pid, span) -> tid

    def tracks(self) -> Iterator[Event]:
        for index, process in enumerate(self._timeline.processes):
            yield from _named(process.pid, f"{process.name} ({process.pid})", 10 * index)
            spans = [span for span in process.spans if span.code not in NOT_ON_A_TRACK]
            for tid, span in lanes(self._visible(spans)):
                self._threads[process.pid, span] = tid
                yield self._complete(span, process.pid, tid)
            if process.device:
                pid, name = device_track(index, process)
                yield from _named(pid, name, 10 * index + 1)
                for tid, span in lanes(self._visible(process.device)):
                    yield self._complete(span, pid, tid)

    def flows(self, only: set[int] | None) -> Iterator[Event]:
        """A request from span to span. One that is seen in a single place has no arrow."""
        for request in self._timeline.requests:
            places = [(place[0], self._threads[place], place[1]) for place in request.path if place in self._threads]
            if len(places) < 2 or (only is not None and request.id not in only):
                continue
            for index, (pid, tid, span) in enumerate(places):
                phase = "s" if index == 0 else "f" if index == len(places) - 1 else "t"
                yield {
                    "name": "request", "cat": "request", "id": f"{request.id:x}", "ph": phase,
                    "ts": self._us(max(span.begin, self._timeline.begin)), "pid": pid, "tid": tid, "bp": "e",
                }  # fmt: skip

    def lifetimes(self, only: set[int] | None) -> Iterator[Event]:
        pid = next((process.pid for process in self._timeline.engines), 0)
        for request in self._timeline.requests:
            if only is not None and request.id not in only:
                continue
            stretches = (
                ("queue", request.received, request.scheduled),
                ("prefill", request.scheduled, request.first_token),
                ("decode", request.first_token, request.finished),
            )
            for name, begin, end in stretches:
                begin, end = max(begin, self._timeline.begin), min(end, self._timeline.end)
                if begin and end >= begin and 0 not in (request.received, request.scheduled):
                    shared = {"name": name, "cat": "request", "id": f"{request.id:x}", "pid": pid, "tid": MAIN}
                    yield shared | {"ph": "b", "ts": self._us(begin), "args": _described(request)}
                    yield shared | {"ph": "e", "ts": self._us(end)}

    def counters(self) -> Iterator[Event]:
        for process in self._timeline.engines:
            for span in self._visible(process.spans):
                shared = {"ph": "C", "pid": process.pid, "tid": MAIN, "ts": self._us(span.begin)}
                if span.code == events.COMMIT:
                    yield shared | {"name": "requests", "args": {"running": span.a, "waiting": span.b}}
                    yield shared | {"name": "KV blocks used", "args": {"blocks": span.c}}
                elif span.code == events.SCHEDULE and span.id:
                    yield shared | {"name": "batch tokens", "args": {"tokens": span.a}}

    def _visible(self, spans: Iterable[Span]) -> list[Span]:
        """Cut to the timeline."""
        begin, end = self._timeline.begin, self._timeline.end
        return [
            span if span.begin >= begin and span.end <= end else span._replace(
                begin=max(span.begin, begin), end=min(span.end, end)
            )
            for span in spans
            if span.end >= begin and span.begin <= end
        ]  # fmt: skip

    def _complete(self, span: Span, pid: int, tid: int) -> Event:
        kind = KINDS[span.code]
        args = dict(zip(kind.values, (span.a, span.b, span.c), strict=False))
        if kind.id:
            args = {kind.id: span.id} | args
        return {
            "name": kind.name, "cat": "span", "ph": "X", "ts": self._us(span.begin),
            "dur": (span.end - span.begin) / 1000, "pid": pid, "tid": tid, "args": args,
        }  # fmt: skip

    def _us(self, nanoseconds: int) -> float:
        return (nanoseconds - self._timeline.begin) / 1000


def lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Threads for spans, so that on each they nest: an event loop writes to several connections at a time."""
    stacks: list[list[int]] = []  # per thread, the ends of the spans that are open
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        for tid, stack in enumerate(stacks, MAIN):
            while stack and stack[-1] <= span.begin:
                stack.pop()
            if not stack or stack[-1] >= span.end:
                stack.append(span.end)
                yield tid, span
                break
        else:
            stacks.append([span.end])
            yield len(stacks), span


def device_track(index: int, process: Process) -> tuple[int, str]:
    """(pid, name) of the track of this process's device."""
    kind = "compute" if process.computes_itself else "GPU"
    return DEVICE_PID + index, f"{kind} of {process.name}"


def _named(pid: int, name: str, order: int) -> Iterator[Event]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": order}}


def _described(request: RequestLife) -> dict[str, int]:
    return {
        "request": request.id,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": request.output_tokens,
    }

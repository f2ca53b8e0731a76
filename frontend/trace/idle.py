"""Who left the device idle. Each nanosecond between two steps is put down to one cause:

no requests        there was no work in the whole server: nobody's fault, and counted apart
parse, encode      the engine had nothing to do while a request was still in the frontend's or tokenizer's hands
hand-over          ... or on its way between two processes
schedule, launch, commit, publish, intake, prepare, gc
                   what the engine's thread did meanwhile; `commit` applies a step's tokens, `intake` takes messages in
device             the next step was launched, or awaited: the device had it and had not begun
engine             the engine's thread did something that is not recorded, or was not running
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from frontend.trace.timeline import NOT_ON_A_TRACK, Process, RequestLife, Span
from ipc.recorder import events
from ipc.recorder.events import KINDS

NO_REQUESTS, HAND_OVER, DEVICE, ENGINE = "no requests", "hand-over", "device", "engine"


class Piece(NamedTuple):
    """A stretch of time and what it is put down to."""

    begin: int
    end: int
    cause: str


def gaps(steps: Sequence[Span]) -> list[tuple[int, int]]:
    """The times between steps on a device, sorted by begin, in which it ran none."""
    found = []
    until = steps[0].end if steps else 0
    for step in steps:
        if step.begin > until:
            found.append((until, step.begin))
        until = max(until, step.end)
    return found


def idle_pieces(engine: Process, requests: Sequence[RequestLife]) -> list[Piece]:
    """All idle time of the engine's device between its first step and its last, cut by cause."""
    if not engine.device:
        return []
    idle = gaps(engine.device)
    last = engine.device[-1].end
    lives = _union((r.begin, max(r.begin, r.end or last)) for r in requests if r.begin)
    alive = [Piece(begin, end, "") for begin, end in lives]
    doing = flatten(span for span in engine.spans if span.code not in NOT_ON_A_TRACK)
    upstream = _upstream(requests)
    pieces: list[Piece] = []
    for begin, end in idle:
        busy = _clip(alive, begin, end)
        for piece in _fill(busy, begin, end, NO_REQUESTS):
            if piece.cause == NO_REQUESTS:
                pieces.append(piece)
                continue
            for part in _fill(_clip(doing, piece.begin, piece.end), piece.begin, piece.end, ENGINE):
                if part.cause == KINDS[events.WAIT].name:
                    pieces += _fill(_clip(upstream, part.begin, part.end), part.begin, part.end, HAND_OVER)
                else:
                    pieces.append(part)
    return pieces


def causes(pieces: Iterable[Piece]) -> dict[str, int]:
    """Nanoseconds by cause, the largest first."""
    total: Counter[str] = Counter()
    for piece in pieces:
        total[piece.cause] += piece.end - piece.begin
    return dict(total.most_common())


def flatten(spans: Iterable[Span]) -> list[Piece]:
    """Nested spans as pieces that follow on one another: each moment belongs to the innermost span."""
    pieces: list[Piece] = []
    stack: list[Span] = []
    at = 0

    def emit(until: int) -> None:
        nonlocal at
        if stack and until > at:
            cause = DEVICE if stack[-1].code == events.COLLECT else stack[-1].name
            pieces.append(Piece(at, until, cause))
        at = max(at, until)

    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while stack and stack[-1].end <= span.begin:
            emit(stack[-1].end)
            stack.pop()
        emit(span.begin)
        at = max(at, span.begin)
        stack.append(span)
    while stack:
        emit(stack[-1].end)
        stack.pop()
    return pieces


def _upstream(requests: Sequence[RequestLife]) -> list[Piece]:
    """What holds up the next request that the engine will get: pieces for the frontend's and the tokenizer's part."""
    pieces: list[Piece] = []
    at = 0
    for request in sorted((r for r in requests if r.received), key=lambda request: request.received):
        for span, cause in ((request.parsed, "parse"), (request.encoded, "encode")):
            if span is not None:
                begin, end = max(at, span.begin), min(span.end, request.received)
                if end > begin:
                    pieces.append(Piece(begin, end, cause))
        at = request.received
    return pieces


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _clip(pieces: Sequence[Piece], begin: int, end: int) -> list[Piece]:
    """The parts of `pieces`, which do not overlap and are sorted, within [begin, end]."""
    first = bisect.bisect_right(pieces, begin, key=lambda piece: piece.end)
    found = []
    for index in range(first, len(pieces)):
        piece = pieces[index]
        if piece.begin >= end:
            break
        found.append(Piece(max(begin, piece.begin), min(end, piece.end), piece.cause))
    return found


def _fill(pieces: Iterable[Piece], begin: int, end: int, cause: str) -> list[Piece]:
    """`pieces`, and `cause` for what they leave of [begin, end]."""
    filled: list[Piece] = []
    at = begin
    for piece in pieces:
        if piece.begin > at:
            filled.append(Piece(at, piece.begin, cause))
        filled.append(piece)
        at = piece.end
    if end > at:
        filled.append(Piece(at, end, cause))
    return filled

"""When each step began and ended on the GPU, in the host's time, from CUDA events and without waiting for any.

Two events are recorded per step; they are read once its tokens have arrived, when both are complete. Between two events
the device tells nanoseconds of its own clock, so each step is placed after the one before it, and the chain is held
between what the host knows: no step begins before its launch, none ends after its tokens were seen. What is left is an
error of how late the host saw them (some ten microseconds), the same for neighbouring steps: durations and gaps are the
device's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from ipc.recorder.events import GPU
from ipc.recorder.ring import Recorder

WINDOW = 256  # steps after which the chain is moved to what the host saw: the two clocks drift apart
FAR_NS = 1_000_000_000  # events further apart are too coarse to place a step: they tell milliseconds as float32


class TimedEvent(Protocol):
    """A `torch.cuda.Event(enable_timing=True)`."""

    def record(self, stream: Any) -> None: ...

    def elapsed_time(self, end_event: Self) -> float: ...


class DeviceSpans:
    """Does nothing if nobody records.

    `ends`: one for each step that may be on its way, recorded behind the last of its work by who launches it.
    """

    def __init__(
        self,
        recorder: Recorder,
        ends: Sequence[TimedEvent],
        make_event: Callable[[], TimedEvent],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder, self._clock = recorder, clock
        self._ends = ends
        self._begins = [make_event() for _ in ends] if recorder.keeps else []
        self._launched = [0] * len(ends)
        self._last: TimedEvent | None = None  # the end of the latest step that was read, and when that was
        self._last_ns = 0
        self._slack = FAR_NS  # least time between the end of a step and the host's seeing it, in this window
        self._steps = 0

    def begin(self, turn: int, stream: Any) -> None:
        """`stream`, of the device, is about to run the step `turn`."""
        if self._begins:
            self._launched[turn] = self._clock()
            self._begins[turn].record(stream)

    def read(self, turn: int, waited: bool, step: int, num_tokens: int, num_rows: int) -> tuple[int, int] | None:
        """When the step began and ended, None if nobody records. It is complete, the oldest that was not read.

        `waited`: it was not complete when the host came to look.
        """
        if not self._begins:
            return None
        now, launched = self._clock(), self._launched[turn]
        begin, end = self._begins[turn], self._ends[turn]
        began = launched
        if self._last is not None and launched - self._last_ns < FAR_NS:
            began = max(launched, self._last_ns + round(self._last.elapsed_time(begin) * 1e6))
        ended = began + round(begin.elapsed_time(end) * 1e6)
        if ended > now:
            began, ended = began - (ended - now), now
        self._recorder.span(GPU, began, ended, step, num_tokens, num_rows)
        self._last, self._last_ns = end, ended
        if waited:
            self._slack = min(self._slack, now - ended)
        self._steps += 1
        if self._steps % WINDOW == 0:
            self._last_ns += self._slack if self._slack < FAR_NS else 0
            self._slack = FAR_NS
        return began, ended

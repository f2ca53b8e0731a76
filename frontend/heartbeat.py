"""Whether the engine makes progress, judged from its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable

from ipc.messages import EngineStats


class Heartbeat:
    """Progress is a step that the last heartbeat did not know, or having nothing to do. Beating is not enough: an
    engine that hangs in one step may still be heard, and one that is not heard makes no progress we know of."""

    def __init__(self, stall_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._step = -1
        self._progress_at = clock()

    def start(self) -> None:
        """The engine is ready: the time counts from now on."""
        self._progress_at = self._clock()

    def beat(self, stats: EngineStats) -> None:
        idle = stats.running == 0 and stats.waiting == 0
        if idle or stats.step != self._step:
            self._progress_at = self._clock()
        self._step = stats.step

    def stalled(self) -> float | None:
        """Seconds without progress if they are too many."""
        still = self._clock() - self._progress_at
        return still if still > self._stall_seconds else None

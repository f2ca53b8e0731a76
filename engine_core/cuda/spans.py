"""When each step began and ended on the GPU, in the host's time, without waiting for it.

The first and the last kernel of a step write down the device's clock (`triton_step`), and the two times come to the
host with the step's tokens. What the device's clock lacks to the host's is not known, but lies between two bounds: no
step begins before its launch, none ends after its tokens were seen. Once the host has waited for a step, the second one
is tight, and the tightest of late counts, which leaves an error of how late the host saw a step (some ten
microseconds), the same for neighbouring steps: durations and gaps are the device's own. A host that never has to wait
knows launches alone, some hundred microseconds before a step begins. Timed CUDA events would tell the same, but two of
them cost the GPU some 7 us a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ipc.recorder.events import GPU
from ipc.recorder.ring import Recorder

WINDOW_NS = 250_000_000  # after which a bound is forgotten: the two clocks drift apart by up to some 10 us meanwhile
REST_NS = 1_000_000_000  # without a step, after which all is forgotten


class DeviceSpans:
    """Does nothing if nobody records. `turns`: how many steps may be on their way."""

    def __init__(self, recorder: Recorder, turns: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._recorder, self._clock = recorder, clock
        self.keeps = recorder.keeps
        self._launched = [0] * turns
        self._behind: int | None = None  # what the device's clock lacks to the host's
        self._bound: int | None = None  # the tightest upper one of this window, once the host has waited for a step
        self._window_ns = 0  # when this window began
        self._last_ns = 0  # the end of the latest step that was read

    def launch(self, turn: int) -> None:
        """The step `turn` is about to be launched."""
        if self.keeps:
            self._launched[turn] = self._clock()

    def read(
        self, turn: int, waited: bool, begin: int, end: int, step: int, num_tokens: int, num_rows: int
    ) -> tuple[int, int] | None:
        """When the step began and ended, None if nobody records. It is complete, the oldest that was not read.

        `waited`: it was not complete when the host came to look; `begin` and `end`: ns of the device's clock.
        """
        if not self.keeps:
            return None
        now, launched = self._clock(), self._launched[turn]
        least, most = launched - begin, now - end
        if self._behind is None or launched - self._last_ns > REST_NS:
            self._behind, self._bound = least, None
        if waited and self._bound is None:
            self._behind, self._bound, self._window_ns = most, most, now
        elif waited and self._bound is not None:
            self._bound = min(self._bound, most)
            if now - self._window_ns > WINDOW_NS:
                self._behind, self._bound, self._window_ns = self._bound, most, now
        self._behind = min(max(self._behind, least), most)
        began, ended = begin + self._behind, end + self._behind
        self._recorder.span(GPU, began, ended, step, num_tokens, num_rows)
        self._last_ns = ended
        return began, ended

"""Where the device's time goes, counted always: busy, or idle for what the host was at meanwhile; and what steps move
and compute at least.

    host    |SCHEDULE|LAUNCH|   COLLECT: waits for step 1   |  INPUT  |SCHEDULE|LAUNCH|  COLLECT ...
    device                  |------- step 1 -------|        :         :        :      |------- step 2
    idle                                           |collect |  input  |schedule|launch|

The host is at one thing at a time and says so when it begins. The gap before a step is divided when the step's span is
known, so nothing is computed between launching and waiting. A few microseconds a step; no torch.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from enum import StrEnum

from engine_core.costs import ModelCosts
from engine_core.plan import StepPlan
from ipc.buckets import STEP_SECONDS, STEP_TOKENS
from ipc.messages import DeviceUsage


class Host(StrEnum):
    """What the engine's loop is at."""

    SCHEDULE = "schedule"  # planning a step
    LAUNCH = "launch"  # preparing its inputs, starting it
    COLLECT = "collect"  # fetching its results, committing and publishing them
    INPUT = "input"  # taking in requests and aborts
    NOTHING = "nothing"  # there is no request to work on


MOST_MARKS = 4096


class Usage:
    """Totals since the start. `costs`: None if they are not known; then bytes and operations stay 0.

    `clock` gives CLOCK_MONOTONIC nanoseconds.
    """

    def __init__(self, costs: ModelCosts | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._costs, self._clock = costs, clock
        self._busy = 0
        self._idle = dict.fromkeys(Host, 0)
        self._until = clock()  # all before it is divided
        # (when, what the host began to do); the first was before `_until`. Bounded for those who seldom step.
        self._marks = deque([(self._until, Host.NOTHING)], maxlen=MOST_MARKS)
        self._launches: deque[int] = deque()  # when the steps in flight were launched
        self._bytes = self._flops = 0.0
        self._times, self._tokens = [0] * (len(STEP_SECONDS) + 1), [0] * (len(STEP_TOKENS) + 1)
        self._time_sum = self._token_sum = 0

    def doing(self, cause: Host) -> None:
        """The host begins with `cause`."""
        self._marks.append((self._clock(), cause))

    def launched(self) -> None:
        """A step is on its way."""
        self._launches.append(self._clock())

    def landed(self, span: tuple[int, int] | None) -> None:
        """The oldest step on its way is complete. `span`: when the device began and ended it.

        None: not known. Then it is taken to have run from the end of its launch until now, or after the step before
        it; so gaps between steps that were in flight together are not seen.
        """
        launched = self._launches.popleft()
        began, ended = span or (launched, self._clock())
        began = max(began, self._until)
        self._divide(began)
        if ended > began:
            self._busy += ended - began
            self._until = ended

    def abandoned(self) -> None:
        """Nothing is on its way any more, and what became of it is not known."""
        self._launches.clear()

    def count(self, plan: StepPlan, elapsed_ns: int) -> None:
        """A step is done: what it was, and the time since the one before it or since its start, if that was later."""
        self._times[bisect_left(STEP_SECONDS, elapsed_ns / 1e9)] += 1
        self._tokens[bisect_left(STEP_TOKENS, plan.num_tokens)] += 1
        self._time_sum += elapsed_ns
        self._token_sum += plan.num_tokens
        if self._costs is None:
            return
        rows, decodes = plan.rows, plan.num_decodes
        chunks = [(row.start, row.stop) for row in rows[decodes:]]
        sampled = decodes + sum([row.samples for row in rows[decodes:]])
        work = self._costs.step([row.start + 1 for row in rows[:decodes]], chunks, sampled)
        self._bytes += work.bytes
        self._flops += work.flops

    def totals(self) -> DeviceUsage:
        if not self._launches:
            self._divide(self._clock())
        return DeviceUsage(
            busy_seconds=self._busy / 1e9,
            idle_seconds={cause.value: nanoseconds / 1e9 for cause, nanoseconds in self._idle.items()},
            bytes=self._bytes,
            flops=self._flops,
            step_seconds=self._time_sum / 1e9,
            step_tokens=self._token_sum,
            steps_by_seconds=list(self._times),
            steps_by_tokens=list(self._tokens),
        )

    def _divide(self, until: int) -> None:
        """Charge the time from `_until` to `until`, in which the device was idle, to what the host was at."""
        marks, at, idle = self._marks, self._until, self._idle
        while len(marks) > 1 and marks[1][0] <= until:
            _, cause = marks.popleft()
            if marks[0][0] > at:
                idle[cause] += marks[0][0] - at
                at = marks[0][0]
        if until > at:
            idle[marks[0][1]] += until - at
            at = until
        self._until = at

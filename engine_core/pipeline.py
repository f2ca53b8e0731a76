"""Steps on their way through the device: launched ahead, awaited in order. Knows of plans, not of requests."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from engine_core.plan import InFlight, Runner, StepPlan, StepTokens
from engine_core.profiler import Profiler
from engine_core.usage import Host, Usage
from ipc.recorder.events import COLLECT, LAUNCH, SCHEDULE
from ipc.recorder.ring import Recorder


class StepFailed(Exception):
    """The runner raised `error`. `plans` are lost, the oldest first: what the steps launched since have read cannot be
    told."""

    def __init__(self, error: Exception, plans: list[StepPlan]) -> None:
        super().__init__(str(error))
        self.error, self.plans = error, plans


class Pipeline:
    """`depth` is how many steps may be in flight: with 2, step N+1 is planned and launched before N is awaited."""

    def __init__(
        self,
        runner: Runner,
        schedule: Callable[[], StepPlan],
        depth: int,
        recorder: Recorder,
        profiler: Profiler,
        usage: Usage,
    ) -> None:
        self.runner = runner
        self._schedule = schedule
        self._depth = depth
        self._recorder, self._profiler, self._usage = recorder, profiler, usage
        self._in_flight: deque[tuple[StepPlan, InFlight]] = deque()

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._in_flight)

    def step(self) -> tuple[StepPlan, StepTokens] | None:
        """Fill the pipeline and await its oldest step. None: there was nothing to do. Raises `StepFailed`."""
        usage = self._usage
        while len(self._in_flight) < self._depth:
            usage.doing(Host.SCHEDULE)
            began = self._recorder.begin(SCHEDULE)
            plan = self._schedule()
            self._recorder.end(SCHEDULE, began, plan.step, plan.num_tokens, len(plan.rows), plan.num_decodes)
            if not plan.rows:
                break
            usage.doing(Host.LAUNCH)
            self._in_flight.append((plan, self._launch(plan)))
            usage.launched()
        usage.doing(Host.COLLECT)
        if not self._in_flight:
            return None
        plan, in_flight = self._in_flight.popleft()
        began = self._recorder.begin(COLLECT)
        try:
            tokens = in_flight.wait()
        except Exception as error:
            raise StepFailed(error, [plan, *self._give_up()]) from error
        finally:
            self._recorder.end(COLLECT, began, plan.step)
        usage.landed(tokens.span)
        return plan, tokens

    def _launch(self, plan: StepPlan) -> InFlight:
        self._profiler.before(plan.step)
        began = self._recorder.begin(LAUNCH)
        try:
            return self.runner.launch(plan)
        except Exception as error:
            return _FailedLaunch(error)  # told in its turn, after the steps before it
        finally:
            self._recorder.end(LAUNCH, began, plan.step)

    def _give_up(self) -> list[StepPlan]:
        plans = []
        for plan, in_flight in self._in_flight:
            plans.append(plan)
            with contextlib.suppress(Exception):
                in_flight.wait()  # its blocks must not be given to others while the device still writes to them
        self._in_flight.clear()
        self._usage.abandoned()
        return plans


class _FailedLaunch:
    """In the place of a step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepTokens:
        raise self._error

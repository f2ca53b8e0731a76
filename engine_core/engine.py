"""The engine: requests in, one `StepOutput` per step out. Synchronous, single-threaded, no processes, no tensors.

Every request given to `add` ends in exactly one `Finished`, in the output of a later `step`.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable

import numpy as np

from engine_core.errors import UserError
from engine_core.limits import Limits
from engine_core.outcome import Committed, Ending
from engine_core.pipeline import Pipeline, StepFailed
from engine_core.plan import ModelFacts, Runner, StepPlan, StepTokens
from engine_core.profiler import Profiler
from engine_core.request import Request, Status
from engine_core.scheduler import Scheduler
from engine_core.tombstones import Tombstones
from engine_core.usage import Host, Usage
from ipc.codec import pack_ids, pack_request_ids
from ipc.config import EngineConfig
from ipc.messages import (
    EngineStats,
    Error,
    Finished,
    FinishReason,
    Generate,
    Opened,
    Profile,
    Profiled,
    RequestState,
    StepOutput,
)
from ipc.recorder.events import COMMIT, FINISHED, FIRST_TOKEN, PREPARE, RECEIVED, STEP_MASK
from ipc.recorder.ring import Recorder

logger = logging.getLogger(__name__)

# After this many failed steps in a row the device or the model is broken, not the requests.
MAX_FAILED_STEPS = 3
IDLE_AFTER_NS = 1_000_000_000  # without a step


class Engine:
    """`depth` is how many steps may be in flight (see `Pipeline`).

    `clock` gives CLOCK_MONOTONIC nanoseconds.
    """

    def __init__(
        self,
        runner: Runner,
        facts: ModelFacts,
        config: EngineConfig,
        *,
        depth: int = 1,
        clock: Callable[[], int] = time.monotonic_ns,
        recorder: Recorder | None = None,
        profiler: Profiler | None = None,
        usage: Usage | None = None,
    ) -> None:
        self.facts = facts
        self.usage = usage or Usage(clock=clock)
        self.recorder = recorder or Recorder()
        self._profiler = profiler or Profiler()
        self.scheduler = Scheduler(Limits.of(config, facts), runner.release, clock)
        self._pipeline = Pipeline(runner, self.scheduler.schedule, depth, self.recorder, self._profiler, self.usage)
        self._clock = clock
        self.broken = ""  # why the engine cannot go on
        self._requests: dict[int, Request] = {}
        self._finished: list[Finished] = []  # ended since the last step
        self._early_aborts = Tombstones()
        self._seeds = random.Random(config.seed)
        self._step = self._aborts = self._failed_steps = 0
        self._step_seconds = 0.0
        self._last_step = clock()
        self._resting = True  # there was nothing to do after the last step

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(len(self._pipeline) or self._finished or self.scheduler.has_work)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, message: Generate) -> None:
        """Take a request in. What is wrong with it is told by its `Finished`, never by an exception."""
        self.recorder.mark(RECEIVED, message.request_id, len(message.prompt_ids) // 4)
        if message.request_id in self._requests:
            logger.error("request id %d is in use: the newcomer is dropped", message.request_id)
            return
        if self._early_aborts.take(message.request_id):
            self._refuse(message, "abort")
            return
        refusal = self._refusal(message)
        if refusal is None:
            request = self._make_request(message)
            refusal = self.scheduler.add(request)
        if refusal is None:
            self._requests[request.request_id] = request
        else:
            self._refuse(message, "rejected", refusal)

    def abort(self, request_ids: Iterable[int], *, stop_string: bool = False) -> None:
        """End these requests. One that has not come yet will be ended when it does; one that has ended is left alone.

        `stop_string`: their text is complete, so this is a normal end.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._aborts += not stop_string
                self._end(self.scheduler.end(request, "stop" if stop_string else "abort"))
            elif not stop_string:  # a stop string is found in a token, so that request has come and gone
                self._early_aborts.add(request_id)

    def abort_all(self) -> None:
        self.abort(list(self._requests))

    def step(self) -> StepOutput:
        """Decide, launch, commit the oldest step in flight.

        A step whose runner raises ends its requests with an error and leaves the others alone. After
        `MAX_FAILED_STEPS` such steps in a row all requests are ended, and `broken` says why.
        """
        began = self._clock() if self._resting else self._last_step
        plan, tokens = self._run()
        committing = self.recorder.begin(COMMIT)
        output = self._output(self.scheduler.commit(plan, tokens) if plan.rows else Committed())
        scheduler = self.scheduler
        self.recorder.end(
            COMMIT, committing, plan.step, scheduler.num_running, len(scheduler.waiting), scheduler.kv.pool.num_in_use
        )
        self._profiler.after(plan.step)
        self._last_step = self._clock()
        self._step_seconds = (self._last_step - began) / 1e9
        if plan.rows:
            self.usage.count(plan, self._last_step - began)
        self._resting = not self.has_work
        if self._resting:
            self.usage.doing(Host.NOTHING)
        return output

    def idle(self) -> bool:
        """Let the runner do a piece of what can wait. False: nothing is left, or there was a step a moment ago and the
        next request may be near."""
        if self.has_work or self.broken or self._clock() - self._last_step < IDLE_AFTER_NS:
            return False
        began = self.recorder.begin(PREPARE)
        prepared = self._pipeline.runner.idle()
        self.recorder.end(PREPARE, began)
        return prepared

    def profile(self, message: Profile) -> Profiled:
        """Start or stop a profiler's capture, between two steps."""
        try:
            (self._profiler.start if message.on else self._profiler.stop)()
        except Exception as error:  # of the driver, too
            return Profiled(call_id=message.call_id, error=Error(400, str(error), code="not_supported"))
        return Profiled(call_id=message.call_id)

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        pool = scheduler.kv.pool
        return EngineStats(
            step=self._step,
            running=scheduler.num_running,
            waiting=len(scheduler.waiting),
            kv_blocks_total=pool.total,
            kv_blocks_free=pool.num_free,
            kv_blocks_cached=pool.num_cached,
            prompt_tokens=scheduler.prompt_tokens,
            output_tokens=scheduler.output_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            aborts=self._aborts,
            step_seconds=self._step_seconds if self.has_work else 0.0,
            usage=self.usage.totals(),
        )

    def requests(self, limit: int) -> list[RequestState]:
        """The oldest ones and how they are getting on."""
        now = self._clock()
        return [_state(request, now) for request in itertools.islice(self._requests.values(), limit)]

    # --- inside a step --------------------------------------------------------------------------------------------

    def _run(self) -> tuple[StepPlan, StepTokens]:
        """The oldest step. A plan without rows: there was nothing to do, or it failed."""
        try:
            done = self._pipeline.step()
        except StepFailed as failure:
            self._abandon(failure)
            done = None
        else:
            if done is not None:
                self._failed_steps = 0
        return done or (StepPlan(()), StepTokens([]))

    def _abandon(self, failure: StepFailed) -> None:
        """Which row is to blame cannot be told: all of the lost plans end here."""
        error = failure.error
        logger.error("a step failed, %d more in flight are given up", len(failure.plans) - 1, exc_info=error)
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        reason = f"the engine failed: {kind}{error}"
        what = Error(status=500, message=reason, type="server_error")
        for lost in failure.plans:
            for ending in self.scheduler.abandon(lost, what):
                self._end(ending)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self.broken = f"{self._failed_steps} steps failed in a row, the last one so: {reason}"
            for request in list(self._requests.values()):
                self._end(self.scheduler.end(request, "error", what))

    def _make_request(self, message: Generate) -> Request:
        seed = message.sampling.seed
        return Request(
            request_id=message.request_id,
            ids=np.frombuffer(message.prompt_ids, "<i4"),
            sampling=message.sampling,
            eos_token_ids=self.facts.eos_token_ids.union(message.eos_token_ids),
            frontend=message.frontend,
            priority=message.priority,
            arrival=message.arrival,
            cache_salt=message.cache_salt,
            text=message.text,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
        )

    def _refusal(self, message: Generate) -> Error | None:
        """What can be told without a look at the ids, of which there may be millions."""
        if self.broken:
            return Error(status=500, message=self.broken, type="server_error")
        if len(message.prompt_ids) % 4:
            return Error(status=400, message="the prompt's token ids are not whole int32 values", param="prompt")
        return self.scheduler.limits.refusal_of_length(len(message.prompt_ids) // 4, message.sampling.max_tokens)

    def _refuse(self, message: Generate, reason: FinishReason, error: Error | None = None) -> None:
        self._finished.append(
            Finished(
                request_id=message.request_id,
                frontend=message.frontend,
                reason=reason,
                num_prompt_tokens=len(message.prompt_ids) // 4,
                num_output_tokens=0,
                error=error,
            )
        )

    def _end(self, ending: Ending) -> None:
        request = ending.request
        del self._requests[request.request_id]
        self._finished.append(
            Finished(
                request_id=request.request_id,
                frontend=request.frontend,
                reason=ending.reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=len(request.output_ids),
                num_cached_tokens=request.num_cached_tokens,
                stop_token=ending.stop_token,
                stop_token_is_eos=ending.stop_token in request.eos_token_ids,
                error=ending.error,
            )
        )

    def _output(self, done: Committed) -> StepOutput:
        for ending in done.ended:
            self._end(ending)
        finished, self._finished = self._finished, []
        self._step += 1
        step = self._step & STEP_MASK
        for request in done.opened:
            times = request.first_scheduled, self._clock()
            counts = request.num_prompt_tokens, request.num_cached_tokens
            self.recorder.span(FIRST_TOKEN, *times, request.request_id, step, *counts)
        for end in finished:
            self.recorder.mark(FINISHED, end.request_id, step, end.num_output_tokens)
        return StepOutput(
            step=self._step,
            request_ids=pack_request_ids([request.request_id for request in done.requests]),
            token_ids=pack_ids(done.token_ids),
            opened=[_opened(request) for request in done.opened],
            logprobs=done.logprobs,
            prompt_logprobs=[request.prompt_logprobs for request in done.opened if request.prompt_logprobs],
            finished=finished,
        )


def _state(request: Request, now: int) -> RequestState:
    running = request.status is Status.RUNNING
    return RequestState(
        request_id=request.request_id,
        state=("decode" if request.output_ids else "prefill") if running else "waiting",
        age=max(0, now - request.arrival),
        prompt_tokens=request.num_prompt_tokens,
        computed_tokens=request.num_computed_tokens,
        output_tokens=len(request.output_ids),
    )


def _opened(request: Request) -> Opened:
    return Opened(
        request_id=request.request_id,
        frontend=request.frontend,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        queued=max(0, request.first_scheduled - request.arrival),
        text=request.text,
    )

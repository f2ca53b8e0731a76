"""Decides what each step computes, and takes in what it produced. Knows nothing of tensors, text or processes.

There is no prefill and no decode phase. A request has `num_tokens` and `num_computed_tokens`, and every step closes the
difference as far as four limits allow: `max_num_seqs`, `max_num_batched_tokens`, the context length, and KV blocks.

    schedule    1. running requests at a block's end get another block; if there is none, the last in order gives way
                2. one token each for those that only lack their newest (decode)
                3. chunks for those that lack more (prefill), out of what is left of the token budget
                4. waiting requests, in order, if all their tokens fit into the pool
    commit      tokens are appended, full blocks become findable, ended requests give back what they hold

Several plans may be in flight: `schedule` works on what will be true when they are done, and blocks and slots that a
plan in flight uses are given out again only after its commit. Plans are committed in the order they were made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine_core.kv_manager import KvManager
from engine_core.limits import Limits
from engine_core.outcome import (
    Committed,
    Ending,
    collect_prompt_logprobs,
    ending_after,
    row_logprobs,
)
from engine_core.plan import ScheduledRow, StepPlan, StepTokens
from engine_core.request import Request, Status
from engine_core.returns import Returns
from engine_core.slots import Slots
from engine_core.waiting import WaitingQueue
from ipc.codec import pack_ids
from ipc.messages import Error, FinishReason, PromptLogprobs

# A request that does not fit now lets this many pass; then those behind it wait until it runs.
MAX_BYPASSES = 64
# How many requests that do not fit are looked at per step: bounds the time of a step, not what may run.
MAX_MISFITS = 8
# A decoding request's full blocks are made findable when this many have come together, or when it leaves: four at once
# cost half as much as one by one.
REGISTER_TOGETHER = 4


class Scheduler:
    """`release` is called with a request just before its slot can go to another."""

    def __init__(
        self,
        limits: Limits,
        release: Callable[[Request], None] = lambda _: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.limits = limits
        self.kv = KvManager(limits)
        self.waiting = WaitingQueue()
        self.prompt_tokens = self.output_tokens = 0  # totals: admitted prompts, committed outputs
        self.prefix_queries = self.prefix_hits = self.preemptions = 0
        self._decoding: list[Request] = []  # running, and only their newest token is not computed
        self._prefilling: list[Request] = []  # running, with more to compute
        self._slots = Slots(limits.max_num_seqs)
        self._clock = clock
        self._reserve = self.kv.pool.total // 100  # blocks that admission leaves to those who already run
        self._num_added = 0
        self._planned = self._committed = 0  # steps
        self._returns = Returns(self.kv.pool, self._slots, release)

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self._decoding or self._prefilling or len(self.waiting))

    # --- requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request) -> Error | None:
        """Queue `request`, or say why it can never run."""
        error = self.limits.refusal(request)
        if error is not None:
            return error
        sampling = request.sampling
        request.max_output_tokens = self.limits.max_output_tokens(request)
        request.stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            request.stop_ids |= request.eos_token_ids
        if sampling.prompt_logprobs is not None:
            ids = pack_ids(request.prompt_ids.tolist())
            request.prompt_logprobs = PromptLogprobs(request_id=request.request_id, ids=ids, values=[None])
        self._num_added += 1
        request.order = self._num_added + ((request.priority << 40) if self.limits.priority else 0)
        self.waiting.add(request)
        return None

    def end(self, request: Request, reason: FinishReason, error: Error | None = None) -> Ending:
        """End a request that is not finished, whatever it is doing. Its tokens still in flight will be discarded."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            if reason != "error":
                self._register_outputs(request)
            self._leave(request)
            self._vacate(request)
        request.status = Status.FINISHED
        return Ending(request, reason, error=error)

    # --- decide ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step. It has no rows if nothing can run before a plan in flight is committed, or nothing at all."""
        step, rows = self._planned + 1, list[ScheduledRow]()
        preempted = self._grow()
        made_room = self._make_room() if self.limits.priority and not preempted else []
        budget = self._plan_decodes(rows, step)
        num_decodes = len(rows)
        for request in sorted(self._prefilling, key=lambda request: request.order):
            if not budget:
                break
            budget -= self._plan_chunk(request, budget, rows, step)
        if budget and not preempted and len(self.waiting):
            budget = self._admit(budget, rows, step)
        if rows:
            self._planned = step
        num_tokens = self.limits.max_num_batched_tokens - budget
        return StepPlan(tuple(rows), tuple(preempted + made_room), num_tokens, num_decodes, step)

    def _grow(self) -> list[Request]:
        """Another block for each decoding request whose blocks are full. Returns who was preempted for it."""
        preempted: list[Request] = []
        full = [request for request in self._decoding if request.num_computed_tokens >= request.horizon]
        full.sort(key=lambda request: request.order)
        for request in full:
            if request.status is not Status.RUNNING or request.num_output_tokens >= request.max_output_tokens:
                continue  # preempted just now, or its last token is in flight
            if request.num_computed_tokens >= request.register_at + REGISTER_TOGETHER * self.limits.block_size:
                self._register_outputs(request)
            # Blocks still held for a plan in flight come back with its commit: wait for them, and preempt nobody.
            while not self.kv.pool.num_available and not self._returns:
                victim = max(self._decoding + self._prefilling, key=lambda running: running.order)
                if victim is request:
                    break  # it waits, with what it has, for those before it
                self._preempt(victim)
                preempted.append(victim)
            self.kv.grow(request)
        return preempted

    def _make_room(self) -> list[Request]:
        """Preempt who is less important than the first in the queue, if that lets it start."""
        first = next((request for request in self.waiting if request.last_plan <= self._committed), None)
        found = self.kv.find_prefix(first) if first is not None else None
        if first is None or found is None or self._returns:
            return []
        running = sorted(self._decoding + self._prefilling, key=lambda request: request.order)
        victims: list[Request] = []
        num_blocks = 0
        while not self.kv.fits(first, found, self._reserve - num_blocks) or self._slots.num_free + len(victims) == 0:
            if not running or running[-1].priority <= first.priority:
                return []
            victims.append(running.pop())
            num_blocks += self.kv.num_own_blocks(victims[-1])
        for victim in victims:
            self._preempt(victim)
        return victims

    def _plan_decodes(self, rows: list[ScheduledRow], step: int) -> int:
        """One row for each decoding request that can go on. Returns the token budget left."""
        budget, decoding = self.limits.max_num_batched_tokens, self._decoding
        if len(decoding) > budget:
            decoding = sorted(decoding, key=lambda request: request.order)[:budget]
        for request in decoding:
            start = request.num_computed_tokens
            if start < request.horizon:
                rows.append(ScheduledRow(request, start, 1, True))
                request.num_computed_tokens = start + 1
                request.num_pending += 1
                request.last_plan = step
        return budget - len(rows)

    def _plan_chunk(self, request: Request, budget: int, rows: list[ScheduledRow], step: int) -> int:
        """A row with as many of the request's uncomputed tokens as the budget allows. Returns how many."""
        start = request.num_computed_tokens
        stop = min(start + budget, request.num_tokens)
        last = stop == request.num_tokens
        samples = last and request.max_output_tokens > 0
        rows.append(ScheduledRow(request, start, stop - start, samples))
        request.num_computed_tokens = stop
        request.last_plan = request.last_chunk = step
        self.kv.announce(request, start, stop, step)
        if last:
            request.num_pending += samples
            self._prefilling.remove(request)
            self._decoding.append(request)
        return stop - start

    def _admit(self, budget: int, rows: list[ScheduledRow], step: int) -> int:
        """Start waiting requests, best first. Returns the token budget left.

        One that does not fit is passed by, so that it holds nobody up, but only `MAX_BYPASSES` times, so that it is not
        held up for ever either: after that the pool drains until it fits.
        """
        admitted: list[Request] = []
        misfits: list[Request] = []
        for request in self.waiting:
            if not budget or not self._slots.num_free or len(misfits) > MAX_MISFITS:
                break
            if request.last_plan > self._committed:
                continue  # preempted while in flight: its newest token is on its way
            found = self.kv.find_prefix(request)
            if found is None:
                continue
            if not self.kv.fits(request, found, self._reserve if self.num_running else 0):
                if request.num_bypassed >= MAX_BYPASSES:
                    break
                misfits.append(request)
                continue
            self._start(request, found)
            admitted.append(request)
            budget -= self._plan_chunk(request, budget, rows, step)
            for misfit in misfits:
                misfit.num_bypassed += 1
        for request in admitted:
            self.waiting.remove(request)
        return budget

    def _start(self, request: Request, found: list[int]) -> None:
        self.kv.take(request, found)
        request.slot = self._slots.take()
        request.status = Status.RUNNING
        request.num_bypassed = 0
        self._prefilling.append(request)
        if not request.first_scheduled:
            request.first_scheduled = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
            self.prompt_tokens += request.num_prompt_tokens
            if self.limits.prefix_caching:
                self.prefix_queries += request.num_prompt_tokens
                self.prefix_hits += request.num_cached_tokens

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; it will be computed again from what the prefix cache still has."""
        self._register_outputs(request)
        self._leave(request)
        self._vacate(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        self.waiting.add(request)
        self.preemptions += 1

    # --- commit ---------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: StepTokens) -> Committed:
        """Apply what the oldest plan in flight produced."""
        self._committed = plan.step
        done = Committed()
        if tokens.failed:
            self._end_failed(plan, tokens, done)
        if tokens.prompt_logprobs:
            collect_prompt_logprobs(plan, tokens)
        self._commit_decodes(plan.rows[: plan.num_decodes], tokens.token_ids[: plan.num_decodes], done)
        self._commit_chunks(plan.rows[plan.num_decodes :], tokens.token_ids[plan.num_decodes :], done)
        if tokens.logprobs:
            done.logprobs = row_logprobs(plan, tokens, done.requests)
        self.output_tokens += len(done.token_ids)
        if done.ended:
            self._decoding = [request for request in self._decoding if request.status is Status.RUNNING]
        self._settle(plan.step)
        return done

    def _commit_decodes(self, rows: Sequence[ScheduledRow], token_ids: list[int], done: Committed) -> None:
        finished, discarded = Status.FINISHED, set()
        for row, token in zip(rows, token_ids, strict=True):
            request = row.request
            if request.status is finished:
                discarded.add(row)
                continue
            request.num_pending -= 1
            output_ids = request.output_ids
            output_ids.append(token)
            if token in request.stop_ids or len(output_ids) >= request.max_output_tokens:
                self._stop(row, token, done)
        if discarded:
            kept = [(row, token) for row, token in zip(rows, token_ids, strict=True) if row not in discarded]
            rows, token_ids = [row for row, _ in kept], [token for _, token in kept]
        done.requests = [row.request for row in rows]
        done.token_ids = token_ids

    def _commit_chunks(self, rows: Sequence[ScheduledRow], token_ids: list[int], done: Committed) -> None:
        sampled = iter(token_ids)
        for row in rows:
            request = row.request
            token = next(sampled) if row.samples else -1
            if request.status is Status.FINISHED:
                continue
            if request.status is Status.RUNNING:
                self.kv.register(request, row.stop)
            if row.samples:
                request.num_pending -= 1
                request.output_ids.append(token)
                done.requests.append(request)
                done.token_ids.append(token)
                if len(request.output_ids) == 1:
                    done.opened.append(request)
                self._stop(row, token, done)
            elif not request.max_output_tokens and row.stop == request.num_prompt_tokens:
                done.opened.append(request)
                done.ended.append(self._finish(Ending(request, "length")))

    def abandon(self, plan: StepPlan, error: Error) -> list[Ending]:
        """The oldest plan in flight came to nothing: everyone in it ends with `error`."""
        self._committed = plan.step
        unfinished = [row.request for row in plan.rows if row.request.status is not Status.FINISHED]
        endings = [self.end(request, "error", error) for request in unfinished]
        self._settle(plan.step)
        return endings

    def _end_failed(self, plan: StepPlan, tokens: StepTokens, done: Committed) -> None:
        sampling = [row.request for row in plan.rows if row.samples]
        for index, reason in tokens.failed.items():
            request = sampling[index]
            if request.status is Status.FINISHED:
                continue
            self.kv.forget(request)  # whatever went wrong may be in its KV
            error = Error(status=500, message=f"the request failed: {reason}", type="server_error")
            done.ended.append(self.end(request, "error", error))

    def _stop(self, row: ScheduledRow, token: int, done: Committed) -> None:
        ending = ending_after(row.request, token)
        if ending is not None:
            if row.request.status is Status.RUNNING:
                self.kv.register(row.request, row.stop)
            done.ended.append(self._finish(ending))

    def _finish(self, ending: Ending) -> Ending:
        """As `end`, but leaves the request in `_decoding`, from which `commit` takes all of a step's ends at once."""
        request = ending.request
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._vacate(request)
        request.status = Status.FINISHED
        return ending

    # --------------------------------------------------------------------------------------------------------------

    def _register_outputs(self, request: Request) -> None:
        """Let others find what is computed for sure."""
        if request.last_chunk <= self._committed:  # then only decode rows are in flight, of tokens after these
            newest = request.num_prompt_tokens + len(request.output_ids) - 1
            self.kv.register(request, min(request.num_computed_tokens, newest))

    def _leave(self, request: Request) -> None:
        (self._decoding if request in self._decoding else self._prefilling).remove(request)

    def _vacate(self, request: Request) -> None:
        self._returns.vacate(request, self._committed)

    def _settle(self, step: int) -> None:
        self._returns.settle(step)
        self.kv.settle(step)

    def check(self) -> None:
        """Raise AssertionError unless all blocks and slots are accounted for, each by its one owner."""
        running = self._decoding + self._prefilling
        held = list(self._returns)
        self.kv.pool.check([request.block_ids for request in running] + [blocks for _, blocks in held])
        slots = [request.slot for request in running] + [request.slot for request, _ in held]
        if len(set(slots)) != len(slots) or len(slots) + self._slots.num_free != self.limits.max_num_seqs:
            raise AssertionError(f"slots {slots} in use and {self._slots.num_free} free")
        if any(request.block_ids or request.status is not Status.WAITING for request in self.waiting):
            raise AssertionError("a waiting request holds blocks or is not marked as waiting")
        if any(request.status is not Status.RUNNING for request in running):
            raise AssertionError("a request among the running is not marked as running")

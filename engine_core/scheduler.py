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

import sys
import time
from collections.abc import Callable

from engine_core.kv_blocks import BlockPool
from engine_core.limits import Limits
from engine_core.outcome import (
    Committed,
    Ending,
    collect_prompt_logprobs,
    ending_after,
    row_logprobs,
    wants_prompt_logprobs,
)
from engine_core.plan import ScheduledRow, StepPlan, StepTokens
from engine_core.prefix_cache import BlockHasher, PrefixCache
from engine_core.request import Request, Status
from engine_core.slots import Slots
from engine_core.waiting import WaitingQueue
from ipc.codec import pack_ids
from ipc.messages import Error, FinishReason, PromptLogprobs

# A request that does not fit now lets this many pass; then those behind it wait until it runs.
MAX_BYPASSES = 64
# How many requests that do not fit are looked at per step: bounds the time of a step, not what may run.
MAX_MISFITS = 8


class Scheduler:
    """`release` is called with a request just before its slot can go to another."""

    def __init__(
        self,
        limits: Limits,
        release: Callable[[Request], None] = lambda _: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.limits = limits
        self.cache = PrefixCache()
        self.pool = BlockPool(limits.num_blocks, self.cache)
        self.waiting = WaitingQueue()
        self.prompt_tokens = self.output_tokens = 0  # totals: admitted prompts, committed outputs
        self.prefix_queries = self.prefix_hits = self.preemptions = 0
        self._decoding: list[Request] = []  # running, and only their newest token is not computed
        self._prefilling: list[Request] = []  # running, with more to compute
        self._slots = Slots(limits.max_num_seqs)
        self._hasher = BlockHasher(limits.block_size)
        self._release = release
        self._clock = clock
        self._reserve = self.pool.total // 100  # blocks that admission leaves to those who already run
        self._num_added = 0
        self._planned = self._committed = 0  # steps
        self._held: dict[int, list[tuple[Request, list[int]]]] = {}  # step -> what its commit gives back
        self._prefix_in_flight: dict[bytes, int] = {}  # hash of a block being computed -> the step that ends it

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
            ids = pack_ids(request.prompt_ids)
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
            self._leave(request)
            self._vacate(request)
        request.status = Status.FINISHED
        return Ending(request, reason, error=error)

    # --- decide ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step. It has no rows if nothing can run before a plan in flight is committed, or nothing at all."""
        step, rows = self._planned + 1, list[ScheduledRow]()
        preempted = self._grow()
        budget = self._plan_decodes(rows, step)
        for request in sorted(self._prefilling, key=lambda request: request.order):
            if not budget:
                break
            budget -= self._plan_chunk(request, budget, rows, step)
        if budget and not preempted and len(self.waiting):
            budget = self._admit(budget, rows, step)
        if rows:
            self._planned = step
        return StepPlan(tuple(rows), tuple(preempted), self.limits.max_num_batched_tokens - budget, step)

    def _grow(self) -> list[Request]:
        """Another block for each decoding request whose blocks are full. Returns who was preempted for it."""
        preempted: list[Request] = []
        full = [request for request in self._decoding if request.num_computed_tokens >= request.horizon]
        full.sort(key=lambda request: request.order)
        for request in full:
            if request.status is not Status.RUNNING or request.num_output_tokens >= request.max_output_tokens:
                continue  # preempted just now, or its last token is in flight
            # Blocks still held for a plan in flight come back with its commit: wait for them, and preempt nobody.
            while not self.pool.num_available and not self._held:
                victim = max(self._decoding + self._prefilling, key=lambda running: running.order)
                if victim is request:
                    break  # it waits, with what it has, for those before it
                self._preempt(victim)
                preempted.append(victim)
            if self.pool.num_available:
                request.block_ids += self.pool.allocate(1)
                self._set_horizon(request)
        return preempted

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
        request.last_plan = step
        if self.limits.prefix_caching:
            self._hasher.extend(request, stop)
            size = self.limits.block_size
            self._prefix_in_flight.update(dict.fromkeys(request.block_hashes[start // size : stop // size], step))
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
            found = self._find_prefix(request)
            if found is None:
                continue
            if not self._fits(request, found):
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

    def _find_prefix(self, request: Request) -> list[int] | None:
        """Cached blocks to start from. None: a step in flight computes more of them, so better wait for it."""
        if not self.limits.prefix_caching or wants_prompt_logprobs(request):
            return []
        found = self.cache.match(request, self._hasher)
        missing = request.block_hashes[len(found) : (request.num_tokens - 1) // self.limits.block_size]
        return None if missing and missing[0] in self._prefix_in_flight else found

    def _fits(self, request: Request, found: list[int]) -> bool:
        """Whether all its tokens do: a request that starts will not need another block before it decodes."""
        needed = self.limits.blocks_for(request.num_tokens) - len(found) + self.pool.num_idle(found)
        return needed <= self.pool.num_available - (self._reserve if self.num_running else 0)

    def _start(self, request: Request, found: list[int]) -> None:
        self.pool.acquire(found)
        request.block_ids = found + self.pool.allocate(self.limits.blocks_for(request.num_tokens) - len(found))
        request.num_computed_tokens = len(found) * self.limits.block_size
        request.register_at = request.num_computed_tokens + self.limits.block_size
        if not self.limits.prefix_caching:
            request.register_at = sys.maxsize
        request.slot = self._slots.take()
        request.status = Status.RUNNING
        request.num_bypassed = 0
        self._set_horizon(request)
        self._prefilling.append(request)
        if not request.first_scheduled:
            request.first_scheduled = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
            self.prompt_tokens += request.num_prompt_tokens
            if self.limits.prefix_caching:
                self.prefix_queries += request.num_prompt_tokens
                self.prefix_hits += request.num_cached_tokens

    def _set_horizon(self, request: Request) -> None:
        # The last token a request may have is sampled, never computed.
        last = request.num_prompt_tokens + request.max_output_tokens - 1
        request.horizon = min(len(request.block_ids) * self.limits.block_size, last)

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; it will be computed again from what the prefix cache still has."""
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
        sampled = iter(tokens.token_ids)
        for row in plan.rows:
            request = row.request
            token = next(sampled) if row.samples else -1
            if request.status is not Status.RUNNING:
                if request.status is Status.FINISHED:
                    continue
            elif row.start + row.count >= request.register_at:
                self._register(request, row.stop)
            if row.samples:
                request.num_pending -= 1
                output_ids = request.output_ids
                output_ids.append(token)
                done.requests.append(request)
                done.token_ids.append(token)
                if len(output_ids) == 1:
                    done.opened.append(request)
                if token in request.stop_ids or len(output_ids) >= request.max_output_tokens:
                    self._stop(request, token, done)
            elif not request.max_output_tokens and row.stop == request.num_prompt_tokens:
                done.opened.append(request)
                done.ended.append(self._finish(Ending(request, "length")))
        if tokens.logprobs:
            done.logprobs = row_logprobs(plan, tokens, done.requests)
        self.output_tokens += len(done.token_ids)
        if done.ended:
            self._decoding = [request for request in self._decoding if request.status is Status.RUNNING]
        self._settle(plan.step)
        return done

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
            # Whatever went wrong may be in its KV: nobody else is to find that.
            known = (self.cache.find(block_hash) for block_hash in request.block_hashes)
            self.pool.forget([block for block in known if block is not None])
            error = Error(status=500, message=f"the request failed: {reason}", type="server_error")
            done.ended.append(self.end(request, "error", error))

    def _stop(self, request: Request, token: int, done: Committed) -> None:
        ending = ending_after(request, token)
        if ending is not None:
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

    def _register(self, request: Request, num_computed: int) -> None:
        """Let others find the full blocks among the first `num_computed` tokens, whose KV is in the pool."""
        size = self.limits.block_size
        self._hasher.extend(request, num_computed)
        for index in range(request.register_at // size - 1, num_computed // size):
            self.cache.insert(request.block_hashes[index], request.block_ids[index])
        request.register_at = (num_computed // size + 1) * size

    # --- blocks and slots change hands ----------------------------------------------------------------------------

    def _leave(self, request: Request) -> None:
        (self._decoding if request in self._decoding else self._prefilling).remove(request)

    def _vacate(self, request: Request) -> None:
        """Take blocks and slot from a request: now, or when the last plan in flight that uses them is committed."""
        blocks, request.block_ids = request.block_ids, []
        if request.last_plan > self._committed:
            self._held.setdefault(request.last_plan, []).append((request, blocks))
        else:
            self._give_back(request, blocks)

    def _give_back(self, request: Request, blocks: list[int]) -> None:
        self._release(request)
        self._slots.give_back(request.slot)
        request.slot = -1
        self.pool.release(blocks)

    def _settle(self, step: int) -> None:
        """Step `step` and all before it are done."""
        for request, blocks in self._held.pop(step, ()):
            self._give_back(request, blocks)
        if self._prefix_in_flight:
            self._prefix_in_flight = {key: end for key, end in self._prefix_in_flight.items() if end > step}

    def check(self) -> None:
        """Raise AssertionError unless all blocks and slots are accounted for, each by its one owner."""
        running = self._decoding + self._prefilling
        held = [entry for entries in self._held.values() for entry in entries]
        self.pool.check([request.block_ids for request in running] + [blocks for _, blocks in held])
        slots = [request.slot for request in running] + [request.slot for request, _ in held]
        if len(set(slots)) != len(slots) or len(slots) + self._slots.num_free != self.limits.max_num_seqs:
            raise AssertionError(f"slots {slots} in use and {self._slots.num_free} free")
        if any(request.block_ids or request.status is not Status.WAITING for request in self.waiting):
            raise AssertionError("a waiting request holds blocks or is not marked as waiting")
        if any(request.status is not Status.RUNNING for request in running):
            raise AssertionError("a request among the running is not marked as running")

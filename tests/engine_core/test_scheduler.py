"""The scheduler alone: plans are values, so no runner is needed; tokens are given by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine_core.limits import Limits
from engine_core.outcome import Committed
from engine_core.plan import StepPlan, StepTokens
from engine_core.request import Request, Status
from engine_core.scheduler import MAX_BYPASSES, Scheduler
from ipc.messages import Error
from ipc.sampling import SamplingParams

LIMITS = Limits(
    max_num_seqs=8, max_num_batched_tokens=32, max_model_len=200, vocab_size=1000, block_size=4, num_blocks=65
)
TOKEN = 7


class Driver:
    """A scheduler whose every sampled token is `TOKEN`."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.released: list[tuple[int, int]] = []
        self.scheduler = Scheduler(limits, lambda request: self.released.append((request.request_id, request.slot)))
        self.requests: dict[int, Request] = {}

    def add(self, prompt: int | list[int], max_tokens: int | None = 10, priority: int = 0, **sampling: Any) -> Request:
        number = len(self.requests) + 1
        ids = prompt if isinstance(prompt, list) else [(number * 50 + i % 50) % 1000 for i in range(prompt)]
        request = Request(number, ids, SamplingParams(max_tokens=max_tokens, **sampling), priority=priority)
        assert self.scheduler.add(request) is None
        self.requests[number] = request
        return request

    def commit(self, plan: StepPlan, token: int = TOKEN) -> Committed:
        done = self.scheduler.commit(plan, StepTokens([token] * sum(row.samples for row in plan.rows)))
        self.scheduler.check()
        return done

    def step(self, token: int = TOKEN) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan.rows:
            self.commit(plan, token)
        return plan

    def run(self, most: int = 1000) -> int:
        for count in range(most):
            if not self.scheduler.has_work:
                return count
            assert self.step().rows, "nothing planned although there is work"
        raise AssertionError(f"not done after {most} steps")


def rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(row.request.request_id, row.start, row.count, row.samples) for row in plan.rows]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    driver = Driver()
    driver.add(5)
    assert rows(driver.step()) == [(1, 0, 5, True)]
    driver.add(70)
    assert rows(driver.step()) == [(1, 5, 1, True), (2, 0, 31, False)]
    assert rows(driver.step()) == [(1, 6, 1, True), (2, 31, 31, False)]
    plan = driver.step()
    assert rows(plan) == [(1, 7, 1, True), (2, 62, 8, True)]
    assert (plan.num_tokens, plan.num_decodes) == (9, 1)
    assert rows(driver.step()) == [(1, 8, 1, True), (2, 70, 1, True)]


def test_a_prefill_never_takes_a_decodes_place() -> None:
    driver = Driver(replace(LIMITS, max_num_batched_tokens=3))
    first = driver.add(30)
    driver.step()
    second, third = driver.add(1), driver.add(1)
    for _ in range(9):
        driver.step()
    assert first.num_output_tokens >= 1
    driver.run()
    assert {len(request.output_ids) for request in (first, second, third)} == {10}


def test_more_decodes_than_the_budget_are_served_in_order() -> None:
    driver = Driver(replace(LIMITS, max_num_batched_tokens=2))
    requests = [driver.add(1) for _ in range(4)]
    driver.run()
    assert all(len(request.output_ids) == 10 for request in requests)


def test_the_number_of_running_requests_is_bounded_and_slots_are_reused() -> None:
    driver = Driver(replace(LIMITS, max_num_seqs=2))
    a, b, c = driver.add(4, max_tokens=2), driver.add(4, max_tokens=4), driver.add(4)
    driver.step()
    assert ({a.slot, b.slot}, c.slot) == ({0, 1}, -1)
    freed = a.slot
    driver.step()
    assert a.status is Status.FINISHED
    assert driver.released == [(1, freed)]
    driver.step()
    assert c.slot == freed


def test_the_context_length_bounds_a_request_without_max_tokens() -> None:
    driver = Driver(replace(LIMITS, max_model_len=20))
    request = driver.add(15, max_tokens=None)
    other = driver.add(15, max_tokens=100)
    driver.run()
    assert len(request.output_ids) == len(other.output_ids) == 5


def test_a_pool_smaller_than_the_context_bounds_it_too() -> None:
    driver = Driver(replace(LIMITS, num_blocks=5))  # 16 tokens
    request = driver.add(10, max_tokens=None)
    driver.run()
    assert len(request.output_ids) == 6


@pytest.mark.parametrize(
    ("limits", "length", "max_tokens", "message"),
    [
        (LIMITS, 0, 1, "empty"),
        (LIMITS, 201, 1, "maximum context length is 200 tokens, but the prompt has 201 tokens"),
        (LIMITS, 200, None, "maximum context length is 200 tokens, but the prompt has 200 tokens and no room is left"),
        (LIMITS, 200, 0, None),
        (LIMITS, 201, 0, "200 tokens, but the prompt has 201 tokens"),
        (LIMITS, 199, None, None),
        (replace(LIMITS, num_blocks=5), 17, 1, "KV cache holds 16 tokens, but the prompt has 17 tokens"),
        (replace(LIMITS, num_blocks=5), 15, 1, None),
    ],
)
def test_what_can_never_fit_is_refused_with_both_lengths(
    limits: Limits, length: int, max_tokens: int | None, message: str | None
) -> None:
    driver = Driver(limits)
    request = Request(1, [1] * length, SamplingParams(max_tokens=max_tokens))
    error = driver.scheduler.add(request)
    if message is None:
        assert error is None
        driver.run()
        assert request.status is Status.FINISHED
    else:
        assert error is not None
        assert error.status == 400
        assert error.param == "prompt"
        assert message in error.message
        assert not driver.scheduler.has_work


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1])
def test_token_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    error = Driver().scheduler.add(Request(1, [5, bad, 6], SamplingParams()))
    assert error is not None
    assert error.message == f"prompt token ids must be between 0 and 999, got {bad}"
    biased = Driver().scheduler.add(Request(1, [5], SamplingParams(logit_bias={1000: 1.0})))
    assert biased is not None
    assert biased.param == "logit_bias"


def test_a_common_prefix_is_computed_once_even_when_requests_come_together() -> None:
    driver = Driver()
    prompt = list(range(30))
    for last in (90, 91, 92):
        driver.add([*prompt, last])
    assert rows(driver.step()) == [(1, 0, 31, True)]
    assert rows(driver.step()) == [(1, 31, 1, True), (2, 28, 3, True), (3, 28, 3, True)]
    assert [driver.requests[i].num_cached_tokens for i in (1, 2, 3)] == [0, 28, 28]
    assert driver.requests[2].block_ids[:7] == driver.requests[1].block_ids[:7]
    assert (driver.scheduler.prefix_queries, driver.scheduler.prefix_hits) == (93, 56)


def test_waiting_for_a_prefix_ends_when_its_computation_is_aborted() -> None:
    driver = Driver()
    driver.add(list(range(30)), max_tokens=1)
    plan = driver.scheduler.schedule()
    driver.add([*range(30), 99])
    assert not driver.scheduler.schedule().rows
    driver.scheduler.end(driver.requests[1], "abort")
    driver.commit(plan)
    assert rows(driver.step()) == [(2, 0, 31, True)]


def test_a_full_hit_computes_the_last_block_again() -> None:
    driver = Driver()
    driver.add(list(range(32)), max_tokens=1)
    driver.run()
    driver.add(list(range(32)))
    assert rows(driver.step()) == [(2, 28, 4, True)]


def test_outputs_become_findable_when_the_request_ends() -> None:
    driver = Driver()
    first = driver.add(list(range(5)), max_tokens=12)
    driver.run()
    driver.add([*range(5), *first.output_ids, 1])
    # The last token was never computed: 16 of 17 positions are in full blocks.
    assert rows(driver.step()) == [(2, 16, 2, True)]


def test_an_answer_ended_by_a_stop_string_is_findable_too() -> None:
    driver = Driver()
    first = driver.add(list(range(5)), max_tokens=40)
    for _ in range(12):
        driver.step()
    driver.scheduler.end(first, "stop")
    driver.add([*range(5), *first.output_ids, 1])
    assert rows(driver.step()) == [(2, 16, 2, True)]


def test_a_prompt_aborted_half_way_leaves_only_what_is_computed() -> None:
    driver = Driver()
    first = driver.add(list(range(70)))
    driver.step()
    driver.scheduler.end(first, "abort")
    driver.add(list(range(70)))
    assert rows(driver.step()) == [(2, 32, 32, False)]


def test_requests_for_prompt_logprobs_compute_every_position() -> None:
    driver = Driver()
    driver.add(list(range(12)), max_tokens=1)
    driver.run()
    driver.add(list(range(12)), prompt_logprobs=1)
    assert rows(driver.step()) == [(2, 0, 12, True)]
    driver.add(list(range(12)))
    assert rows(driver.step())[-1] == (3, 8, 4, True)


def test_without_prefix_caching_nothing_is_found_and_nothing_stays() -> None:
    driver = Driver(replace(LIMITS, prefix_caching=False))
    driver.add(list(range(12)), max_tokens=1)
    driver.run()
    assert driver.scheduler.kv.pool.num_cached == 0
    driver.add(list(range(12)))
    assert rows(driver.step()) == [(2, 0, 12, True)]


def test_the_last_in_order_is_preempted_and_computed_again() -> None:
    driver = Driver(replace(LIMITS, num_blocks=6, prefix_caching=False))  # 20 tokens
    first, second = driver.add(8, max_tokens=12), driver.add(8, max_tokens=12)
    preempted: list[Request] = []
    while driver.scheduler.has_work:
        preempted += driver.step().preempted
    assert preempted == [second]
    assert driver.scheduler.preemptions == 1
    assert [len(request.output_ids) for request in (first, second)] == [12, 12]


def test_preemption_finds_its_own_prefix_again() -> None:
    driver = Driver(replace(LIMITS, num_blocks=8))  # 28 tokens
    first, second = driver.add(8, max_tokens=16), driver.add(12, max_tokens=8)
    while not driver.scheduler.preemptions:
        driver.step()
    plan = driver.step()
    while all(row.request is not second for row in plan.rows):
        plan = driver.step()
    row = next(row for row in plan.rows if row.request is second)
    assert row.start > 0
    assert second.num_cached_tokens == 0  # told of the first admission only
    driver.run()
    assert (len(first.output_ids), len(second.output_ids)) == (16, 8)


def test_one_large_request_does_not_hold_up_small_ones() -> None:
    driver = Driver(replace(LIMITS, num_blocks=26))  # 100 tokens
    driver.add(40, max_tokens=20)
    for _ in range(3):
        driver.step()
    large, small = driver.add(90, max_tokens=2), driver.add(4, max_tokens=2)
    driver.step()
    assert large.status is Status.WAITING
    assert small.status is not Status.WAITING


def test_a_large_request_is_not_passed_by_for_ever() -> None:
    driver = Driver(replace(LIMITS, num_blocks=26, max_num_seqs=4))
    driver.add(40, max_tokens=3)
    driver.step()
    large = driver.add(90, max_tokens=2)
    passed = 0
    while large.status is not Status.FINISHED:
        while len(driver.scheduler.waiting) < 4:  # small ones without end
            passed += 1
            driver.add(4, max_tokens=3 + passed % 3)
        driver.step()
        assert passed < 3 * MAX_BYPASSES, "starved"
    assert passed > MAX_BYPASSES  # and it held nobody up until then


def test_priority_orders_the_queue_and_makes_room() -> None:
    driver = Driver(replace(LIMITS, priority=True, max_num_seqs=2))
    low, later, high = driver.add(4, priority=5), driver.add(4, priority=5), driver.add(4, priority=-5)
    driver.step()
    assert [request.status for request in (low, later, high)] == [Status.RUNNING, Status.WAITING, Status.RUNNING]
    urgent = driver.add(4, priority=-9)
    plan = driver.step()
    assert plan.preempted == (low,)
    assert urgent.status is Status.RUNNING
    equal = driver.add(4, priority=-5)
    assert driver.step().preempted == ()
    assert equal.status is Status.WAITING
    driver.run()
    assert all(len(request.output_ids) == 10 for request in driver.requests.values())


def test_priority_preempts_nobody_when_that_would_not_make_enough_room() -> None:
    driver = Driver(replace(LIMITS, priority=True, num_blocks=21))  # 80 tokens
    driver.add(60, priority=0, max_tokens=2)
    driver.add(8, priority=9)
    driver.step()
    driver.add(70, priority=0, max_tokens=1)
    assert driver.step().preempted == ()


def test_fcfs_ignores_priority() -> None:
    driver = Driver(replace(LIMITS, max_num_seqs=1))
    driver.add(4, priority=5)
    driver.step()
    second, third = driver.add(4, priority=5), driver.add(4, priority=-5)
    while second.status is Status.WAITING:
        driver.step()
    assert third.status is Status.WAITING


# --- two plans in flight --------------------------------------------------------------------------------------------


def test_the_next_step_is_planned_on_a_token_that_is_not_known_yet() -> None:
    driver = Driver()
    request = driver.add(5, max_tokens=3)
    first = driver.scheduler.schedule()
    second = driver.scheduler.schedule()
    assert rows(second) == [(1, 5, 1, True)]
    assert (request.num_pending, request.num_tokens, request.output_ids) == (2, 7, [])
    driver.commit(first)
    third = driver.scheduler.schedule()
    assert rows(third) == [(1, 6, 1, True)]
    # Its third token is in flight and will be the last: nothing is planned that would be thrown away.
    assert not driver.scheduler.schedule().rows
    driver.commit(second)
    assert driver.commit(third).ended[0].reason == "length"
    assert request.output_ids == [TOKEN] * 3


def test_the_extra_token_of_a_finished_request_is_discarded_and_its_blocks_are_held_until_then() -> None:
    driver = Driver()
    request = driver.add(5, stop_token_ids=[TOKEN])
    pool = driver.scheduler.kv.pool
    first, second = driver.scheduler.schedule(), driver.scheduler.schedule()
    done = driver.commit(first)
    assert done.ended[0].stop_token == TOKEN
    assert pool.num_in_use == 2
    assert driver.released == []
    done = driver.commit(second)
    assert (done.requests, done.token_ids, done.ended) == ([], [], [])
    assert request.output_ids == [TOKEN]
    assert pool.num_in_use == 0
    assert driver.released == [(1, 0)]


def test_an_abort_in_flight_frees_once_and_late() -> None:
    driver = Driver()
    request = driver.add(5)
    first, second = driver.scheduler.schedule(), driver.scheduler.schedule()
    driver.scheduler.end(request, "abort")
    newcomer = driver.add(5)
    third = driver.scheduler.schedule()
    assert newcomer.slot != 0
    for plan in (first, second, third):
        driver.commit(plan)
    assert driver.released == [(1, 0)]
    driver.run()
    assert driver.scheduler.kv.pool.num_in_use == 0


def test_a_preempted_request_takes_its_token_in_flight_along_and_waits_for_it() -> None:
    driver = Driver(replace(LIMITS, num_blocks=6, prefix_caching=False))  # 20 tokens
    first, second = driver.add(7, max_tokens=11), driver.add(9, max_tokens=11)
    plans = [driver.scheduler.schedule(), driver.scheduler.schedule()]
    while not driver.scheduler.preemptions:
        driver.commit(plans.pop(0))
        plans.append(driver.scheduler.schedule())
    assert second.status is Status.WAITING
    assert second.num_pending > 0
    assert second.block_ids == []
    known = len(second.output_ids)
    for plan in plans:
        if plan.rows:
            driver.commit(plan)
    assert second.num_pending == 0
    assert len(second.output_ids) > known
    driver.run()
    assert (len(first.output_ids), len(second.output_ids)) == (11, 11)


def test_a_preempted_request_whose_step_is_lost_ends_with_it() -> None:
    driver = Driver(replace(LIMITS, num_blocks=6, prefix_caching=False))
    first, second = driver.add(7, max_tokens=11), driver.add(9, max_tokens=11)
    plans = [driver.scheduler.schedule(), driver.scheduler.schedule()]
    while not driver.scheduler.preemptions:
        driver.commit(plans.pop(0))
        plans.append(driver.scheduler.schedule())
    assert second.status is Status.WAITING
    lost = next(plan for plan in plans if any(row.request is second for row in plan.rows))
    endings = driver.scheduler.abandon(lost, Error(status=500, message="lost"))
    assert {ending.request for ending in endings} == {first, second}
    driver.scheduler.check()
    assert not driver.scheduler.has_work
    assert driver.scheduler.kv.idle
    assert sorted(driver.released) == [(1, 0), (2, 1)]


def test_nobody_is_admitted_into_what_a_preemption_has_just_freed() -> None:
    driver = Driver(replace(LIMITS, num_blocks=6, max_num_seqs=3, prefix_caching=False))  # 20 tokens
    driver.add(7, max_tokens=11)
    second = driver.add(9, max_tokens=11)
    driver.step()
    third = driver.add(4, max_tokens=1)
    while not driver.scheduler.preemptions:
        plan = driver.step()
    assert plan.preempted == (second,)
    assert third.status is Status.WAITING
    assert rows(plan) == [(1, 8, 1, True)]

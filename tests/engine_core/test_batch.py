"""The batch kept from one decode step to the next, against one made afresh."""

from __future__ import annotations

import random
import secrets
from dataclasses import fields

import numpy as np
import pytest
import torch

from engine_core.batch import Batches, ForwardBatch, make_batch
from engine_core.limits import Limits
from engine_core.plan import ScheduledRow, StepPlan, StepTokens
from engine_core.request import Request, Status
from engine_core.scheduler import Scheduler
from ipc.sampling import SamplingParams

CPU = torch.device("cpu")
SLOTS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def rng() -> random.Random:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    return random.Random(seed)


def assert_equal(actual: ForwardBatch, expected: ForwardBatch) -> None:
    for field in fields(ForwardBatch):
        ours, fresh = (np.asarray(getattr(batch, field.name)) for batch in (actual, expected))
        if field.name == "block_tables":
            fresh = np.pad(fresh, ((0, 0), (0, ours.shape[1] - fresh.shape[1])))
        np.testing.assert_array_equal(ours, fresh, err_msg=field.name)
        assert ours.dtype == fresh.dtype


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_plans_of_a_scheduler(block_size: int, prefix_caching: bool, rng: random.Random) -> None:
    """Requests come, end, are aborted and preempted; prompts come in chunks."""
    limits = Limits(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=24,
        max_model_len=100,
        num_blocks=1 + 120 // block_size,
        block_size=block_size,
        vocab_size=1000,
        prefix_caching=prefix_caching,
    )
    scheduler, pending = Scheduler(limits), np.zeros(SLOTS, np.int64)
    batches = Batches(block_size, pending)
    running: list[Request] = []
    last: ForwardBatch | None = None
    kept = 0
    for step in range(1500):
        if rng.random() < (0.3 if step % 300 < 100 else 0.02):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 50))]
            sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 50), ignore_eos=True)
            request = Request(step, prompt, sampling)
            assert scheduler.add(request) is None
            running.append(request)
        if running and rng.random() < 0.02:
            scheduler.end(running.pop(rng.randrange(len(running))), "abort")
        plan = scheduler.schedule()
        if not plan.rows:
            continue
        batch = batches.of(plan)
        assert_equal(batch, make_batch(plan, block_size, CPU, pending))
        kept += batch is last
        last = batch
        tokens = [rng.randrange(1000) for row in plan.rows if row.samples]
        for row, token in zip([row for row in plan.rows if row.samples], tokens, strict=True):
            pending[row.request.slot] = token
        scheduler.commit(plan, StepTokens(tokens))
        running = [request for request in running if request.status is not Status.FINISHED]
    assert scheduler.preemptions
    assert kept > 100


def plan_of(*rows: tuple[Request, int]) -> StepPlan:
    return StepPlan(tuple(ScheduledRow(*row, 1, True) for row in rows), num_tokens=len(rows), num_decodes=len(rows))


def test_only_the_next_token_of_the_same_rows_keeps_a_batch() -> None:
    a, b = (Request(i, [1] * 4, GREEDY, block_ids=[3 + i, 8 + i], slot=i) for i in range(2))
    chunk = StepPlan((ScheduledRow(a, 6, 1, True),), num_tokens=1)
    batches = Batches(8, np.arange(2))
    before: ForwardBatch | None = None
    for plan, kept in (
        (plan_of((a, 4), (b, 4)), False),
        (plan_of((a, 5), (b, 5)), True),
        (plan_of((b, 6), (a, 6)), False),  # in another order
        (plan_of((b, 7)), False),
        (plan_of((a, 5)), False),
        (plan_of((a, 5)), False),  # again
        (chunk, False),
        (plan_of((a, 7)), False),  # after a chunk
        (plan_of((a, 8)), True),  # in another block
        (plan_of((a, 9)), True),
        (plan_of((a, 10), (b, 1)), False),
        (plan_of((a, 11), (b, 2)), True),
    ):
        batch = batches.of(plan)
        assert (batch is before) == kept
        assert_equal(batch, make_batch(plan, 8, CPU, np.arange(2)))
        before = batch


def test_a_row_outgrows_the_tensor_of_block_tables(rng: random.Random) -> None:
    blocks = rng.sample(range(1, 1000), 100)
    request = Request(1, [1], GREEDY, block_ids=blocks, slot=0)
    batches = Batches(2, np.zeros(1, np.int64))
    seen = []
    for position in range(1, 200):
        batch = batches.of(plan_of((request, position)))
        assert_equal(batch, make_batch(plan_of((request, position)), 2, CPU, np.zeros(1, np.int64)))
        if not seen or batch is not seen[-1]:
            seen.append(batch)
    assert 1 < len(seen) < 20

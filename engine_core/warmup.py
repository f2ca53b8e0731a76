"""The steps a runner makes before it is asked to: the largest it may ever be asked for, and the first of a request."""

from __future__ import annotations

from engine_core.attention.base import AttentionSpec
from engine_core.limits import max_batched_tokens
from engine_core.plan import Runner, ScheduledRow, StepPlan
from engine_core.request import Request
from ipc.config import EngineConfig
from ipc.sampling import SamplingParams

GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
EVERYTHING = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=0)  # all that sampling can do


def largest_step(config: EngineConfig, max_tokens: int, block_size: int, max_model_len: int) -> StepPlan:
    """As many rows and tokens as the settings allow, all of them in block 0, and every row samples in
    every way."""
    rows: list[ScheduledRow] = []
    num_rows = min(config.max_num_seqs, max_tokens)
    spare = max_tokens - num_rows
    for slot in range(num_rows):
        count = 1 + min(spare, max_model_len - 1)
        spare -= count - 1
        blocks = [0] * -(-count // block_size)
        request = Request(-1 - slot, [0] * count, EVERYTHING, block_ids=blocks, slot=slot)
        rows.append(ScheduledRow(request, 0, count, True))
    return StepPlan(tuple(rows), num_tokens=sum(row.count for row in rows))


def run_largest_step(runner: Runner, config: EngineConfig, spec: AttentionSpec, max_model_len: int) -> None:
    """Take the memory of the largest step, so that what is free afterwards is free for good."""
    max_tokens = max_batched_tokens(config, spec.device.type)
    plan = largest_step(config, max_tokens, spec.block_size, max_model_len)
    runner.launch(plan).wait()
    for row in plan.rows:
        runner.release(row.request)


def warm_up(runner: Runner, config: EngineConfig, spec: AttentionSpec, num_blocks: int) -> None:
    """A short prompt and a decode step: kernels compile, graphs are captured (there are two of each, with and without a
    draw) and the weights are touched before the first request does it."""
    room = (num_blocks - 1) * spec.block_size
    longest = 32 if spec.device.type == "cuda" else 4  # the CPU's kernels come compiled
    count = max(1, min(max_batched_tokens(config, spec.device.type), longest, room - 1))
    for sampling in (GREEDY, DRAWN) if spec.device.type == "cuda" else (GREEDY,):
        request = Request(-1, [0] * count, sampling, block_ids=list(range(1, num_blocks)), slot=0)
        tokens = runner.launch(StepPlan((ScheduledRow(request, 0, count, True),), num_tokens=count)).wait()
        request.output_ids += tokens.token_ids
        if count < room:
            runner.launch(StepPlan((ScheduledRow(request, count, 1, True),), num_tokens=1, num_decodes=1)).wait()
        runner.release(request)

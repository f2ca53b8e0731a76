"""Host time of a step that the engine spends outside the model: schedule, commit, and the message about it.

    python -m bench.scheduler [--requests 256] [--steps 2000] [--depth 1]

Times are CPU time of this thread. No model runs: the tokens are given. Requests decode in a pool that is large enough,
so the numbers hold block allocation, hashing and registration of full blocks, and stop checks, but no preemption.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import deque
from typing import Any

from engine_core.engine import Engine
from engine_core.loop import publish
from engine_core.plan import ModelFacts, StepPlan, StepTokens
from engine_core.request import Request
from ipc.channel import Broadcast, Receiver, Sender
from ipc.codec import pack_ids, pack_request_ids
from ipc.config import EngineConfig
from ipc.messages import DetokenizerMessage, Generate, StepOutput
from ipc.recorder.ring import Recorder
from ipc.sampling import SamplingParams

PROMPT = 64


class InstantRunner:
    """Samples token 7 everywhere, in no time."""

    def __init__(self) -> None:
        self.tokens = StepTokens([])

    def launch(self, plan: StepPlan) -> InstantRunner:
        self.tokens = StepTokens([7] * sum(row.samples for row in plan.rows))
        return self

    def wait(self) -> StepTokens:
        return self.tokens

    def release(self, request: Request) -> None:
        pass


def build(
    num_requests: int, num_steps: int, runner: InstantRunner | None = None, recorder: Recorder | None = None
) -> Engine:
    length = PROMPT + num_steps + 64
    facts = ModelFacts(
        max_model_len=length,
        vocab_size=50_000,
        num_blocks=num_requests * (length // 16 + 1) + 1,
        block_size=16,
        eos_token_ids=frozenset((2,)),
        architecture="none",
        device="cpu",
        dtype="float32",
        weights="none",
        attention="torch",
        kv_bytes_per_token=0,
    )
    config = EngineConfig(model="none", max_num_seqs=num_requests, max_num_batched_tokens=8192)
    engine = Engine(runner or InstantRunner(), facts, config, recorder=recorder)
    for index in range(num_requests):
        ids = pack_ids(1000 + (index * 7 + position) % 40_000 for position in range(PROMPT + index % 16))
        engine.add(
            Generate(
                request_id=index, frontend=0, prompt_ids=ids, sampling=SamplingParams(), arrival=time.monotonic_ns()
            )
        )
    while engine.scheduler.waiting or engine.stats().output_tokens < num_requests:
        engine.step()
    return engine


def report(name: str, nanoseconds: list[int], num_requests: int) -> None:
    times = sorted(value / 1000 for value in nanoseconds)
    p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
    print(
        f"{name:<28} p50 {p50:7.1f} us   p99 {p99:7.1f} us   min {times[0]:7.1f} us   {p50 / num_requests:.3f} us/row"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--depth", type=int, default=1, choices=(1, 2))
    args = parser.parse_args()

    scheduler = build(args.requests, args.steps).scheduler
    tokens = StepTokens([7] * args.requests)
    clock = time.thread_time_ns  # CPU time: other work on the machine disturbs it less
    plans: deque[StepPlan] = deque(scheduler.schedule() for _ in range(args.depth - 1))
    schedule, commit = [], []
    for _ in range(args.steps - 8):
        start = clock()
        plans.append(scheduler.schedule())
        middle = clock()
        scheduler.commit(plans.popleft(), tokens)
        commit.append(clock() - middle)
        schedule.append(middle - start)
    report("schedule", schedule, args.requests)
    report("commit", commit, args.requests)
    report("schedule + commit", [a + b for a, b in zip(schedule, commit, strict=True)], args.requests)

    engine = build(args.requests, args.steps)
    steps = []
    for _ in range(args.steps - 8):
        start = clock()
        engine.step()
        steps.append(clock() - start)
    report("engine.step without a model", steps, args.requests)
    for detokenizers in (1, 2, 4):
        report(
            f"publish to {detokenizers} detokenizers",
            publishing(args.requests, args.steps, detokenizers),
            args.requests,
        )


def publishing(num_requests: int, num_steps: int, detokenizers: int) -> list[int]:
    """Nanoseconds from a step's requests and tokens to its message on its way, for each of `num_steps` steps."""
    ids, tokens = list(range(num_requests)), [7] * num_requests
    with tempfile.TemporaryDirectory(prefix="gb-", dir="/tmp") as folder, contextlib.ExitStack() as stack:
        addresses = [f"ipc://{folder}/{index}" for index in range(detokenizers)]
        inboxes = [stack.enter_context(Receiver[Any](address, DetokenizerMessage)) for address in addresses]
        outbox = Broadcast([stack.enter_context(Sender(address)) for address in addresses])
        times = []
        for number in range(num_steps):
            start = time.thread_time_ns()
            message = StepOutput(step=number, request_ids=pack_request_ids(ids), token_ids=pack_ids(tokens))
            publish(message, outbox)
            times.append(time.thread_time_ns() - start)
            for inbox in inboxes:
                inbox.wait()
                inbox.drain()
        return times


if __name__ == "__main__":
    main()

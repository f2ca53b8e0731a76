"""What a step costs the engine's thread beside the GPU, on any machine: the device is replaced by nothing.

    python -m bench.host_step [--steps 300]

Requests with prompts of 1,000 random tokens come at a steady rate to an engine with two steps in flight, whose pool is
in use or cached throughout. All of the host's work is done, for the shape of SmolLM2-135M: messages taken in, plans,
inputs, staging, commits. Tensors lie on the CPU, pinned memory and events are nothing, and so is the replay of a graph.

Times are the medians of CPU time of this thread, in microseconds. What CUDA adds to each call is not in them, so the
last column counts the calls: operations on tensors that are no views, and allocations of pinned memory.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.shapes import SHAPES
from engine_core.attention.base import AttentionSpec
from engine_core.cuda import runner as cuda_runner
from engine_core.cuda.mixed import MixedLayout
from engine_core.cuda.results import TURNS
from engine_core.cuda.runner import CudaRunner
from engine_core.engine import Engine
from engine_core.layers.embedding import DenseEmbedding
from engine_core.layers.linear import DenseLinear
from engine_core.models.config import from_hf
from engine_core.models.llama import LlamaForCausalLM
from engine_core.plan import ModelFacts
from engine_core.scheduler import Scheduler
from ipc.codec import encode, make_decoder
from ipc.config import EngineConfig
from ipc.messages import EngineMessage, Generate
from ipc.sampling import SamplingParams

PROMPT, BLOCK = 1000, 16
WARM_UP = 40
# `enter` is a part of `upload`, `launch` all that the runner does, from `upload` to `fetch`, and `step` all there is.
PHASES = ("intake", "schedule", "upload", "enter", "size", "inputs", "stage", "fetch", "launch", "commit", "step")
# name, new requests a step, output tokens of each, tokens a step may have; 0 new: all come at the start
LOADS = (
    ("2 prompts, 30 decode rows", 2, 16, 2048),
    ("8 prompts, 56 decode rows", 8, 8, 8192),
    ("decode, 1 row", 0, 1, 2048),
    ("decode, 64 rows", 0, 64, 2048),
    ("decode, 256 rows", 0, 256, 2048),
)


class Nothing:
    """An event or a stream of a device that does everything at once."""

    def __init__(self, *args: object, **options: object) -> None:
        """All alike."""

    def record(self, *args: object) -> None:
        """Has happened."""

    synchronize = wait_stream = wait_event = record

    def query(self) -> bool:
        return True


class Calls(TorchDispatchMode):
    """Counts what a device would have to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.name() not in ("aten::empty.memory_format", "aten::lift_fresh")
        return func(*args, **(kwargs or {}))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return tensor


class Phases:
    """CPU time by phase, of the step that runs."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)

    def add(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return function(*args, **options)
            finally:
                self.spent[phase] += time.thread_time_ns() - began

        return timed

    def wrap(self, phase: str, owner: Any, name: str) -> None:
        setattr(owner, name, self.add(phase, getattr(owner, name)))


@contextlib.contextmanager
def no_gpu(calls: Calls) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in ("Event", "Stream", "current_stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, Nothing))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", contextlib.nullcontext))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: calls.pin(tensor)))
        stack.enter_context(mock.patch.object(cuda_runner, "product_rate", return_value=1e15))
        yield


def make_engine(max_tokens: int, num_blocks: int, phases: Phases) -> Engine:
    """An engine whose runner does all but compute."""
    model = from_hf(SHAPES["smollm2-135m"])
    nothing = DenseLinear(torch.zeros(1, 1))
    stand_in = SimpleNamespace(
        config=model,
        layers=[],
        norm=None,
        lm_head=nothing,
        embedding=DenseEmbedding(torch.zeros(1, 1), torch.float32),
        rope=SimpleNamespace(angles=lambda positions, _: (torch.zeros(len(positions), 1, 1),) * 2),
    )
    config = EngineConfig(model="none", max_num_batched_tokens=max_tokens)
    heads, cpu = (model.num_heads, model.num_kv_heads, model.head_dim), torch.device("cpu")
    spec = AttentionSpec(model.num_layers, *heads, BLOCK, torch.bfloat16, cpu)
    runner = CudaRunner(cast(LlamaForCausalLM, stand_in), spec, config, model.max_position)
    replaced: Any = runner
    replaced.sampling.results._copies, replaced.sampling.results._copied = Nothing(), [Nothing()] * TURNS
    replaced.mixed_graphs._pays = lambda *_: True
    replaced.graphs.replay = lambda *_: None
    facts = ModelFacts(
        max_model_len=model.max_position,
        vocab_size=model.vocab_size,
        num_blocks=num_blocks,
        block_size=BLOCK,
        eos_token_ids=frozenset((2,)),
        architecture="none",
        device="cuda",
        dtype="bfloat16",
        weights="none",
        attention="none",
        kv_bytes_per_token=0,
    )
    engine = Engine(runner, facts, config, depth=2)
    phases.wrap("launch", runner, "launch")
    phases.wrap("upload", runner.state, "upload")
    phases.wrap("enter", runner.state, "_enter")
    phases.wrap("size", runner.mixed_graphs, "size_for")
    phases.wrap("inputs", runner.decode_graphs, "host_inputs")
    phases.wrap("stage", runner.staging, "send")
    phases.wrap("fetch", runner.sampling.results, "fetch")
    phases.wrap("commit", engine, "_output")
    return engine


def messages(count: int, new: int, outputs: int) -> list[bytes]:
    rng, sampling = np.random.default_rng(0), SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    return [
        encode(
            Generate(
                request_id=index,
                frontend=0,
                prompt_ids=rng.integers(3, 49_000, PROMPT - (0 if new else index % BLOCK), np.int32).tobytes(),
                sampling=sampling,
                arrival=1,
            )
        )
        for index in range(count)
    ]


def run(new: int, outputs: int, max_tokens: int, steps: int) -> tuple[dict[str, float], float]:
    """Median microseconds of a step by phase, and device calls of a step."""
    phases, calls = Phases(), Calls()
    rows = new * outputs if new else outputs
    blocks = rows * (PROMPT // BLOCK + 2 + (0 if new else (steps + 3 * WARM_UP + 600) // BLOCK))
    timed: list[tuple[Any, str, str]] = [
        (Scheduler, "schedule", "schedule"),
        (Scheduler, "commit", "commit"),
        (cuda_runner, "mixed_inputs", "inputs"),
        (MixedLayout, "padded", "inputs"),
    ]
    with no_gpu(calls), contextlib.ExitStack() as stack:
        for owner, name, phase in timed:
            stack.enter_context(mock.patch.object(owner, name, phases.add(phase, getattr(owner, name))))
        engine = make_engine(max_tokens, 2 * blocks if new else blocks + 100, phases)
        todo = messages(new * (steps + 2 * WARM_UP) if new else rows, new, outputs if new else 4096)
        decoder = make_decoder(EngineMessage)

        def intake(count: int) -> None:
            for message in todo[:count]:
                engine.add(decoder.decode(message))
            del todo[:count]

        intake = phases.add("intake", intake)
        if not new:
            intake(rows)
            while min(state.output_tokens for state in engine.requests(rows)) < 4:
                engine.step()
        times = []
        for index in range(steps + WARM_UP):
            phases.spent.clear()
            began = time.thread_time_ns()
            intake(new)
            engine.step()
            spent = {**phases.spent, "step": time.thread_time_ns() - began}
            if index >= WARM_UP:
                times.append(spent)
        with calls:
            calls.count = 0
            for _ in range(WARM_UP // 2):
                intake(new)
                engine.step()
    medians = {phase: statistics.median(spent.get(phase, 0) for spent in times) / 1000 for phase in times[0]}
    return medians, calls.count / (WARM_UP // 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':<26}" + "".join(f"{name:>9}" for name in PHASES) + "    calls")
    for name, new, outputs, max_tokens in LOADS:
        medians, count = run(new, outputs, max_tokens, args.steps)
        print(f"{name:<26}" + "".join(f"{medians.get(phase, 0):>9.1f}" for phase in PHASES) + f"{count:>9.1f}")


if __name__ == "__main__":
    main()

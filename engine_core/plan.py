"""The values that pass between scheduler, runner and loop. A plan says what a step computes; it holds no tensors.

plan = scheduler.schedule()         decide
in_flight = runner.launch(plan)     launch
scheduler.commit(plan, in_flight.wait())   commit
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engine_core.models.config import ModelConfig
from engine_core.request import Request
from ipc.messages import TokenLogprobs


# A msgspec struct because a step makes hundreds of these: a frozen dataclass takes ten times as long to build.
class ScheduledRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Positions [start, start + count) of one request."""

    request: Request
    start: int
    count: int
    samples: bool  # the last position is the request's newest token, so this step samples the next one

    @property
    def stop(self) -> int:
        return self.start + self.count


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    rows: tuple[ScheduledRow, ...]  # decode rows first
    preempted: tuple[Request, ...] = ()  # lost their blocks and slot before this step
    num_tokens: int = 0  # sum of row counts
    num_decodes: int = 0  # rows of one position that follow on a sampled token; the others are chunks of any size
    step: int = 0  # 1, 2, ... in the order of launch; a plan with no rows is not launched and has none of its own


class StepTokens(msgspec.Struct):
    """What the device sampled, aligned with the rows of the plan that have `samples` set, in their order."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = {}  # index into token_ids -> value
    failed: dict[int, str] = {}  # index into token_ids -> reason (NaN logits)
    # request id -> values of the prompt positions this step computed, in order. The value at position p is that of
    # the token at p + 1.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    span: tuple[int, int] | None = None  # CLOCK_MONOTONIC ns between which the device ran it; None: not known


class InFlight(Protocol):
    def wait(self) -> StepTokens:
        """Block until the step's tokens are on the host."""
        ...


class Runner(Protocol):
    """Turns plans into device work. Reads requests, never changes them."""

    def launch(self, plan: StepPlan) -> InFlight: ...

    def idle(self) -> bool:
        """Do a piece of what can wait, while no step is in flight. False: nothing is left."""
        ...

    def release(self, request: Request) -> None:
        """The request's slot is about to be reused: forget its sampling state."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine learns by loading a model; sent to the others in Ready."""

    max_model_len: int
    vocab_size: int
    num_blocks: int  # of the pool's tensors, block 0 included, which holds nothing and pads block tables
    block_size: int
    eos_token_ids: frozenset[int]
    architecture: str
    device: str
    dtype: str
    weights: str
    attention: str
    kv_bytes_per_token: int
    kv_dtype: str = ""
    threads: int | None = None  # that compute; None: not on a CPU
    seconds: dict[str, float] = field(default_factory=dict)  # start-up phase -> seconds
    model: ModelConfig | None = None
    weight_bytes: float = 0.0  # of one weight as the device holds it, on average; 0: not known


# Called with a phase ("loading weights") and a fraction done, or None where it cannot be measured.
ProgressCallback = Callable[[str, float | None], None]

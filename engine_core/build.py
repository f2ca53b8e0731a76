"""Composition root: settings to an engine that is ready to step."""

from __future__ import annotations

from collections.abc import Callable

from engine_core.costs import ModelCosts
from engine_core.engine import Engine
from engine_core.plan import ModelFacts, ProgressCallback
from engine_core.profiler import Profiler, parse_steps
from engine_core.runner import build_runner
from engine_core.usage import Usage
from ipc.config import EngineConfig
from ipc.recorder.ring import Recorder


def build_engine(
    config: EngineConfig, progress: ProgressCallback | None = None, recorder: Recorder | None = None
) -> Engine:
    """Load the model, allocate the KV pool, warm up. Takes seconds; `progress` hears of each phase.

    Raises `ipc.errors.UserError` for what the user can put right.
    """
    if config.profile_steps is not None:
        parse_steps(config.profile_steps)  # before minutes of loading
    recorder = recorder or Recorder()
    runner, facts = build_runner(config, progress, recorder)
    # On a GPU the next step is planned and launched while this one runs. The CPU is its own device: nothing to overlap.
    depth = 2 if facts.device == "cuda" and config.overlap else 1
    profiler = Profiler(config.profile_steps, *(_cuda_profiler() if facts.device == "cuda" else ()))
    usage = Usage(_costs(facts))
    return Engine(runner, facts, config, depth=depth, recorder=recorder, profiler=profiler, usage=usage)


def _cuda_profiler() -> tuple[Callable[[], None], Callable[[], None]]:
    from torch.cuda import profiler

    return profiler.start, profiler.stop


def _costs(facts: ModelFacts) -> ModelCosts | None:
    if facts.model is None or not facts.weight_bytes:
        return None
    elements = 2 * facts.model.num_layers * facts.model.num_kv_heads * facts.model.head_dim
    return ModelCosts(facts.model, facts.weight_bytes, facts.kv_bytes_per_token / elements)

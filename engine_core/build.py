"""Composition root: settings to an engine that is ready to step."""

from __future__ import annotations

from collections.abc import Callable

from engine_core.engine import Engine
from engine_core.plan import ProgressCallback
from engine_core.profiler import Profiler, parse_steps
from engine_core.runner import build_runner
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
    return Engine(runner, facts, config, depth=depth, recorder=recorder, profiler=profiler)


def _cuda_profiler() -> tuple[Callable[[], None], Callable[[], None]]:
    from torch.cuda import profiler

    return profiler.start, profiler.stop

"""`python -m engine_core CONFIG.json`"""

from __future__ import annotations

import gc
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from engine_core.build import build_engine
from engine_core.engine import Engine
from engine_core.loop import run
from engine_core.peaks import measure_peaks
from engine_core.plan import ModelFacts
from ipc.actor import shutdown_on_sigterm
from ipc.channel import Broadcast, Receiver, connect
from ipc.config import EngineOptions, EngineProcessConfig
from ipc.messages import EngineMessage
from ipc.runtime import Child, child_main

logger = logging.getLogger(__name__)


def main(config: EngineProcessConfig, child: Child) -> None:
    imported = seconds_alive()
    with child.phase("starting the engine"):
        engine = build_engine(config.engine, child.progress, child.recorder)
    peaks = _peaks(engine.facts, config.engine)
    # Each detokenizer gets every step and picks its rows: a step is encoded once, however many there are.
    detokenizers = Broadcast(connect(config.endpoints, "detokenizers").values())
    frontends = connect(config.endpoints, "frontends").values()
    gc.collect()
    gc.freeze()  # what is loaded stays: later collections need not look at it
    with Receiver[EngineMessage](config.endpoints.engine, EngineMessage) as inbox, shutdown_on_sigterm(inbox):
        child.ready(ready_facts(engine, imported) | {"peaks": peaks})
        run(engine, inbox, detokenizers, frontends)


def _peaks(facts: ModelFacts, options: EngineOptions) -> dict[str, float]:
    """Empty if they cannot be measured: then there are no shares to tell, which is no reason not to serve."""
    try:
        return measure_peaks(facts.device, facts.dtype, options)
    except RuntimeError as error:  # of memory, as a rule
        logger.warning("cannot measure what the device can do: %s", error)
        return {}


def seconds_alive() -> float:
    """Since this process began. Where the system tells, to some 10 ms: psutil knows the boot time in whole seconds."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return float(time.time() - psutil.Process().create_time())


def ready_facts(engine: Engine, imported: float) -> dict[str, Any]:
    """What the others and the user need to know, as plain JSON values. `imported`: seconds until `main` ran."""
    facts: dict[str, Any] = msgspec.to_builtins(engine.facts)
    del facts["model"]
    facts["load_seconds"] = {"import": imported, **facts.pop("seconds")}
    facts["eos_token_ids"] = sorted(engine.facts.eos_token_ids)
    facts["kv_tokens"] = engine.scheduler.limits.kv_tokens
    facts["max_model_len"] = engine.scheduler.limits.max_request_tokens
    return facts


if __name__ == "__main__":
    child_main("engine_core", EngineProcessConfig, main)

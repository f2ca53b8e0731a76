"""`python -m launch SETTINGS`: a launching process as the command line is one, telling on stdout what happens.

SETTINGS is JSON: {"fake": {"journal", "behaviours", "grace_s"}} or {"real": a LaunchConfig, "grace_s"}. A process that
needs longer than `grace_s` to stop is killed, which shows in stderr.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from typing import Any

import msgspec

from frontend.topology import LaunchConfig, ProcessFailed, process_specs, serve
from ipc.processes import Facts, ProcessSpec
from ipc.run_dir import RunDirectory


def tell(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> int:
    settings = json.loads(sys.argv[1])
    launch = msgspec.convert(settings.get("real", {"model": ""}), LaunchConfig)

    def build(run_dir: RunDirectory) -> list[ProcessSpec]:
        tell(event="run_dir", path=str(run_dir.path))
        if "fake" not in settings:
            real = process_specs(launch, run_dir)
            return [dataclasses.replace(spec, stop_grace_s=settings["grace_s"]) for spec in real]
        specs: list[ProcessSpec] = importlib.import_module("fake_child").fake_specs(run_dir, **settings["fake"])
        return specs

    def on_ready(facts: Facts) -> None:
        tell(
            event="ready",
            pids={name: ready.pid for name, ready in facts.items()},
            facts={name: ready.facts for name, ready in facts.items()},
            seconds={name: ready.seconds for name, ready in facts.items()},
        )

    try:
        serve(
            launch,
            on_progress=lambda news: tell(event="progress", name=news.name, phase=news.phase, fraction=news.fraction),
            on_ready=on_ready,
            build_specs=build,
        )
    except ProcessFailed as failure:
        tell(event="failed", name=failure.name, cause=failure.cause, lines=failure.lines)
        return 1
    tell(event="stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())

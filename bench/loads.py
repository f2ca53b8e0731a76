"""A closed loop of streams against a server, by one of two clients, and what its rows of the table are to reach."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from frontend.loadtest import workload
from frontend.loadtest.client import Target
from frontend.loadtest.report import percentile
from frontend.loadtest.run import measure

LIMIT_S = 60.0


class Row(NamedTuple):
    """So many streams at once, each asking again and again. Targets are None where there is none."""

    streams: int
    words: int
    tokens: int
    tokens_s: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None

    def __str__(self) -> str:
        return f"{self.streams} streams, {self.words} to {self.tokens}"

    def named(self) -> dict[str, int]:
        return {"streams": self.streams, "prompt_words": self.words, "max_tokens": self.tokens}

    def met(self, result: Result) -> dict[str, bool]:
        """By target."""
        met = {"failed": result.failed == 0}
        if self.tokens_s is not None:
            met["tokens_s"] = result.tokens_s >= self.tokens_s
        if self.ttft_p50_ms is not None:
            met["ttft_p50_ms"] = result.ttft_p50_ms <= self.ttft_p50_ms
        if self.ttft_p99_ms is not None:
            met["ttft_p99_ms"] = result.ttft_p99_ms <= self.ttft_p99_ms
        return met

    def verdict(self, result: Result) -> str:
        targets = {"tokens_s": self.tokens_s, "ttft_p50_ms": self.ttft_p50_ms, "ttft_p99_ms": self.ttft_p99_ms}
        met = self.met(result)
        words = [f"{name} {value:,.0f} {'met' if met[name] else 'MISSED'}" for name, value in targets.items() if value]
        return f"[{', '.join(words)}]"


@dataclass(frozen=True)
class Result:
    requests: int
    tokens_s: float
    events_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    failed: int
    cpu_seconds: float  # of all client processes, with their start
    errors: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "cpu_seconds"}


@dataclass(frozen=True)
class Load:
    """Whom to ask, and with what. `program`: see `bench.online --client`; None: our own client."""

    port: int
    model: str
    program: Path | None
    procs: int


def run_load(load: Load, row: Row, rounds: int) -> Result:
    """`rounds` requests of each stream, one after the other. Raises RuntimeError if the client fails."""
    before = _children_cpu()
    figures = _ours(load, row, rounds) if load.program is None else _program(load, load.program, row, rounds)
    return Result(**figures, cpu_seconds=_children_cpu() - before)


def _program(load: Load, program: Path, row: Row, rounds: int) -> dict[str, Any]:
    arguments = [load.port, load.model, row.streams, rounds, row.tokens, row.words, load.procs]
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RES ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the client ended with status {done.returncode}: {done.stderr[-1500:]}")
    found = json.loads(lines[-1].removeprefix("RES "))
    return {
        "requests": found["requests"],
        "tokens_s": found["tokens_s"],
        "events_s": found["events_s"],
        "ttft_p50_ms": found["ttft_ms_p50"],
        "ttft_p99_ms": found["ttft_ms_p99"],
        "gap_p50_ms": found["gap_ms_p50"],
        "gap_p99_ms": found["gap_ms_p99"],
        "failed": found["failed"],
    }


def _ours(load: Load, row: Row, rounds: int) -> dict[str, Any]:
    rng = random.Random(row.words)
    pairs = workload.random_pairs(rng, row.streams * rounds, row.words, row.tokens, 0.0)
    extra = {"temperature": 0.0, "ignore_eos": True}
    target = Target(f"http://127.0.0.1:{load.port}", False, load.model, None, extra)
    measured = measure(target, workload.schedule(rng, pairs), row.streams, load.procs)
    good = [outcome for outcome in measured.outcomes if not outcome.error]
    if not good:
        raise RuntimeError(f"no request succeeded: {measured.outcomes[0].error}")
    ttft = sorted(1e3 * outcome.ttft for outcome in good)
    gaps = sorted(1e3 * gap for outcome in good for gap in outcome.itl) or [0.0]
    return {
        "requests": len(measured.outcomes),
        "tokens_s": round(sum(outcome.output_tokens for outcome in good) / measured.duration, 1),
        "events_s": round(sum(1 + len(outcome.itl) for outcome in good) / measured.duration, 1),
        "ttft_p50_ms": round(percentile(ttft, 50), 2),
        "ttft_p99_ms": round(percentile(ttft, 99), 2),
        "gap_p50_ms": round(percentile(gaps, 50), 3),
        "gap_p99_ms": round(percentile(gaps, 99), 3),
        "failed": len(measured.outcomes) - len(good),
        "errors": tuple(sorted({outcome.error for outcome in measured.outcomes if outcome.error}))[:5],
    }


def _children_cpu() -> float:
    """Seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

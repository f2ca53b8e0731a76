"""The table part of `bench.online`: closed loops of streams, and what server and GPU did meanwhile."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from pathlib import Path

from bench.loads import Load, Row, run_load
from bench.recorded import ENGINE, EngineWatch, all_steps, rings, who_idled
from bench.report import Report
from bench.served import Served

ROWS = (
    Row(1, 64, 256, tokens_s=1_500, ttft_p50_ms=5),
    Row(16, 64, 256, tokens_s=20_000),
    Row(64, 64, 256, tokens_s=60_000, ttft_p50_ms=25),
    Row(256, 64, 256, tokens_s=100_000, ttft_p99_ms=150),
    Row(64, 1000, 16, tokens_s=10_000),
)
QUICK_ROWS = (Row(1, 16, 16), Row(4, 16, 16))
LOOKED_AT_S = 2.0  # the end of a row, for the causes of idle time: the rings of all processes hold it
LIMIT_S = 75.0


def measure_table(
    report: Report, server: Served, client: Path | None, client_procs: int, seconds: float, quick: bool
) -> None:
    """`seconds`: about how long each row is to take."""
    load = Load(server.port, server.name, client, client_procs)
    for row in QUICK_ROWS if quick else ROWS:
        report.attempt(f"table {row}", LIMIT_S, lambda row=row: _row(report, server, load, row, seconds))  # type: ignore[misc]


def _row(report: Report, server: Served, load: Load, row: Row, seconds: float) -> None:
    # Other lengths: prompts of the warm-up must not be found in the prefix cache.
    warm_up = run_load(load, row._replace(words=row.words - 3), max(2, 8 // row.streams))
    rounds = max(2, round(seconds * warm_up.tokens_s / (row.streams * row.tokens)))
    cpu, cached = server.cpu_seconds(), _cached(server)
    ring = rings(server.recordings).get(ENGINE)
    with EngineWatch(ring) if ring is not None else contextlib.nullcontext() as watch:
        begin = time.monotonic_ns()
        result = run_load(load, row, rounds)
    used = server.cpu_seconds()
    report.emit("table", **row.named(), **result.figures(), met=row.met(result))
    report.say(
        f"{row}: {result.tokens_s:,.0f} tok/s, TTFT {result.ttft_p50_ms:.1f} / {result.ttft_p99_ms:.1f} ms, "
        f"gap {result.gap_p50_ms:.2f} / {result.gap_p99_ms:.2f} ms, {result.events_s:,.0f} events/s, "
        f"{result.failed} failed {row.verdict(result)}"
    )
    if watch is None:
        raise RuntimeError("the engine has no flight recorder here: nothing more can be told of this row")
    steps, _, rows = all_steps(watch.records, begin)
    first, last = int(steps.end[0]), int(steps.end[-1])
    took = (last - first) / 1e9  # without the client's own start
    report.emit(
        "table server",
        **row.named(),
        cpu={name: round((used[name] - cpu[name]) / took, 2) for name in used if name in cpu},
        client_cpu=round(result.cpu_seconds / took, 2),
        cached_prompt_tokens=_cached(server) - cached,
        steps=len(steps),
        records_lost=watch.lost,
        step_ms_p50=round(steps.p50_ms, 4),
        gpu_step_ms_p50=round(statistics.median(steps.duration.tolist()) / 1e6, 4),
        rows_p50=statistics.median(rows.tolist()),
        idle_of_all_time=round(steps.idle, 4),
    )
    idle = who_idled(server.recordings, watch.records, max(first, last - round(LOOKED_AT_S * 1e9)), last)
    report.emit("table idle", **row.named(), **idle)
    causes = ", ".join(f"{cause} {share:.1%}" for cause, share in list(idle.get("causes", {}).items())[:4])
    report.say(f"    step {steps.p50_ms:.3f} ms, GPU idle {idle.get('idle', math.nan):.1%} ({causes})")


def _cached(server: Served) -> float:
    """Prompt tokens found in the prefix cache so far."""
    return server.metric("gapless:prefix_cache_hits_total")

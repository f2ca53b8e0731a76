"""Thousands of random lives of the engine. `GAPLESS_SEED=n` runs that one alone."""

from __future__ import annotations

import logging
import os
from collections import Counter

import pytest

from tests.simulation.simulate import simulate

NUM_SEEDS = 2_000
SHARDS = 8


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_invariant_holds_after_every_step(shard: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # simulated device failures are logged
    only = os.environ.get("GAPLESS_SEED")
    seeds = range(shard, NUM_SEEDS, SHARDS) if only is None else [int(only)]
    seen: Counter[str] = Counter()
    for seed in seeds:
        done = simulate(seed)
        stats = done.engine.stats()
        seen.update(life.finished.reason for life in done.lives.values() if life.finished)
        seen.update({"preemption": stats.preemptions, f"preemption at depth {done.depth}": stats.preemptions})
        seen.update({"prefix hit": stats.prefix_hits, "chunk": done.runner.num_chunks})
    if only is None:  # what never happens is not tested
        wanted = ("stop", "length", "abort", "rejected", "error", "preemption", "prefix hit", "chunk")
        rare = [what for what in (*wanted, "preemption at depth 1", "preemption at depth 2") if seen[what] < 10]
        assert not rare, f"too rare in this shard: {rare} of {seen}"

"""What the engine says of a GPU: its limits, and that all time is charged to something."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from engine_core.peaks import measure_peaks
from ipc.config import EngineOptions
from ipc.sampling import SamplingParams
from tests.gpu.models import engine, generate, save_model


def test_limits_are_those_of_a_gpu() -> None:
    peaks = measure_peaks("cuda", "bfloat16", EngineOptions())
    print(f"{peaks['bytes'] / 1e12:.2f} TB/s, {peaks['flops'] / 1e12:.0f} TFLOP/s")
    assert 1e11 < peaks["bytes"] < 1e14
    assert 1e12 < peaks["flops"] < 1e16


def test_all_time_is_charged(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    built = engine(tmp_path, dtype="bfloat16")
    before = built.stats().usage
    begin = time.monotonic()
    rng = random.Random(1)
    jobs = [([rng.randrange(300) for _ in range(20)], SamplingParams(max_tokens=60, ignore_eos=True)) for _ in range(8)]
    generate(built, jobs)
    after, elapsed = built.stats().usage, time.monotonic() - begin
    assert before is not None
    assert after is not None
    busy = after.busy_seconds - before.busy_seconds
    idle = sum(after.idle_seconds.values()) - sum(before.idle_seconds.values())
    assert busy + idle == pytest.approx(elapsed, abs=0.01)
    assert 0.0 < busy < elapsed
    assert after.bytes > before.bytes
    assert built.facts.weight_bytes == pytest.approx(2.0, rel=0.02)

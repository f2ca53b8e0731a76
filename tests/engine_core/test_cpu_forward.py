"""The program of a forward pass against the layers one by one, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Q
from gguf.quants import quantize

from engine_core.attention.cpu import CpuAttention
from engine_core.batch import Batches, ForwardBatch, make_batch
from engine_core.cpu.forward import CpuModel
from engine_core.kernels.cpu_program import Program
from engine_core.layers.embedding import QuantizedEmbedding
from engine_core.loader.weights import QuantizedWeight
from engine_core.plan import ScheduledRow, StepPlan
from engine_core.runner import ModelRunner
from tests.engine_core.tiny_models import FAMILIES, load, random_pieces, save_model, scattered_requests

KV_TOKENS = 1024


@pytest.fixture
def rng() -> random.Random:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


def pool_for_layers(runner: ModelRunner) -> CpuAttention:
    """An attention for the layers by themselves: the runner's is its program's alone."""
    attention = CpuAttention(runner.spec)
    attention.allocate(KV_TOKENS // 16 + 1)
    return attention


def steps(runner: ModelRunner, rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states, logits, where those are largest, and how large, side by side: of the program and the layers."""
    layers = pool_for_layers(runner)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in (130, 1, 47, 64, 90)]
    requests = scattered_requests(prompts, 16, KV_TOKENS, rng)
    for pieces in random_pieces(requests, rng):
        samples = [rng.random() < 0.7 for _ in pieces]
        rows = [ScheduledRow(r, start, stop - start, s) for (r, start, stop), s in zip(pieces, samples, strict=True)]
        batch = make_batch(StepPlan(tuple(rows)), 16, runner.spec.device)
        yield from side_by_side(runner, layers, batch, rng.random() < 0.5)


def side_by_side(
    runner: ModelRunner, layers: CpuAttention, batch: ForwardBatch, whole: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    without = runner.forward(batch, whole, False)[2]
    assert without is not None
    indices, values = without.indices.copy(), without.values.copy()
    *actual, largest = runner.forward(batch, whole, True)
    hidden = runner.model.forward(batch, layers)
    logits = runner.model.logits(hidden[batch.logits_rows])
    if len(actual[0]) < len(hidden):
        assert not whole
        hidden = hidden[batch.logits_rows]
    yield from zip(actual, (hidden, logits), strict=True)
    assert largest is not None
    for found in (indices, largest.indices):
        yield torch.from_numpy(found), torch.from_numpy(logits.numpy().argmax(1))
    for found in (values, largest.values):
        yield torch.from_numpy(found), torch.from_numpy(logits.numpy().max(1))


@pytest.mark.parametrize("weights", ["none", "int8"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if "moe" not in family])
@torch.inference_mode()
def test_a_program_computes_what_the_layers_do(
    family: str, weights: str, threads: int, tmp_path: Path, rng: random.Random
) -> None:
    save_model(tmp_path, family)
    runner = load(tmp_path, kv_tokens=KV_TOKENS, weights=weights, threads=threads)
    assert CpuModel.supports(runner.model)
    for actual, expected in steps(runner, rng):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("weights", ["none", "int8"])
@torch.inference_mode()
def test_a_batch_that_is_kept_computes_what_the_layers_do(
    weights: str, threads: int, tmp_path: Path, rng: random.Random
) -> None:
    """Also when rows change places, when the number of threads changes, and when hidden states of all are wanted."""
    save_model(tmp_path, "qwen3")
    runner = load(tmp_path, kv_tokens=KV_TOKENS, weights=weights, threads=threads)
    layers = pool_for_layers(runner)
    pending = np.zeros(8, np.int64)
    batches = Batches(16, pending)
    requests = scattered_requests([[rng.randrange(320) for _ in range(100)] for _ in range(5)], 16, KV_TOKENS, rng)
    starts = {request.request_id: rng.randrange(1, 30) for request in requests}
    chunks = tuple(ScheduledRow(request, 0, starts[request.request_id], True) for request in requests)
    plan, last, kept = StepPlan(chunks), None, 0
    for _ in range(60):
        batch = batches.of(plan)
        kept, last = kept + (batch is last), batch
        for actual, expected in side_by_side(runner, layers, batch, rng.random() < 0.1):
            assert torch.equal(actual, expected)
        if rng.random() < 0.1:
            torch.set_num_threads(rng.randint(1, 2))
        if rng.random() < 0.1:
            rng.shuffle(requests)
        rows = tuple(ScheduledRow(request, starts[request.request_id], 1, True) for request in requests)
        plan = StepPlan(rows, num_tokens=5, num_decodes=5)
        for request in requests:
            starts[request.request_id] += 1
        pending[:] = [rng.randrange(320) for _ in pending]
    assert kept > 20


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1])
@torch.inference_mode()
def test_a_program_looks_up_quantized_embeddings(kind: Q, threads: int, tmp_path: Path, rng: random.Random) -> None:
    save_model(tmp_path, "llama")
    runner = load(tmp_path, kv_tokens=KV_TOKENS, weights="int8", threads=threads)
    table = runner.model.embedding.weight.numpy()  # type: ignore[attr-defined]
    weight = QuantizedWeight(kind, table.shape, quantize(table, kind))
    runner.model.embedding = QuantizedEmbedding(weight, torch.float32)
    assert isinstance(runner.attention, CpuAttention)
    runner.forward = CpuModel(runner.model, runner.attention, KV_TOKENS).forward
    for actual, expected in steps(runner, rng):
        assert torch.equal(actual, expected)


def test_experts_and_odd_sizes_are_left_to_the_layers(tmp_path: Path) -> None:
    save_model(tmp_path / "experts", "qwen3-moe")
    assert not CpuModel.supports(load(tmp_path / "experts").model)
    save_model(tmp_path / "odd", "llama", intermediate_size=72)
    assert not CpuModel.supports(load(tmp_path / "odd").model)


@torch.inference_mode()
def test_a_nan_stays_in_its_row(tmp_path: Path, rng: random.Random) -> None:
    save_model(tmp_path, "qwen3")
    runner = load(tmp_path, kv_tokens=KV_TOKENS, weights="int8")
    (request, other) = scattered_requests([[1] * 40, [2] * 40], 16, KV_TOKENS, rng)
    batch = make_batch(StepPlan(tuple(ScheduledRow(r, 0, 40, True) for r in (request, other))), 16, runner.spec.device)
    batch = replace(batch, logits_rows=torch.arange(80))
    clean = runner.forward(batch, True, True)[1]
    assert clean is not None
    clean = clean.clone()
    weight = runner.model.embedding.weight  # type: ignore[attr-defined]
    weight.data[1, 5] = math.nan
    _, logits, largest = runner.forward(batch, True, True)
    assert largest is not None
    assert not largest.indices[:40].any()
    assert np.isnan(largest.values[:40]).all()
    assert not logits[:40].isfinite().any()
    assert torch.equal(logits[40:], clean[40:])


@torch.inference_mode()
def test_the_last_program_stays_if_there_is_no_memory_for_a_larger_one(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its buffers cannot be had."""
    save_model(tmp_path, "qwen3")
    runner = load(tmp_path, kv_tokens=KV_TOKENS, weights="int8")
    layers = pool_for_layers(runner)
    requests = scattered_requests([[rng.randrange(320) for _ in range(40)] for _ in range(6)], 16, KV_TOKENS, rng)
    large = make_batch(StepPlan(tuple(ScheduledRow(r, 0, 40, True) for r in requests)), 16, runner.spec.device)
    runner.model.forward(large, layers)
    left = 0

    def scarce(make: Callable[..., torch.Tensor], *size: object, **options: object) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        return make(*size, **options)

    for failures in itertools.count():
        left = failures
        with monkeypatch.context() as patch:
            for make in (torch.empty, torch.empty_like):
                patch.setattr(torch, make.__name__, partial(scarce, make))
            with contextlib.suppress(MemoryError):
                runner.forward(large, True, True)
                break
        ids = [rng.randrange(320) for _ in range(9)]
        small = scattered_requests([ids], 16, KV_TOKENS, rng)[0]
        batch = make_batch(StepPlan((ScheduledRow(small, 0, 9, True),)), 16, runner.spec.device)
        for actual, expected in side_by_side(runner, layers, batch, False):
            assert torch.equal(actual, expected)
    assert failures > 5


@torch.inference_mode()
def test_a_step_that_failed_leaves_nothing_behind(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it did: those before and after it may be of as many rows."""
    save_model(tmp_path, "qwen3")
    runner = load(tmp_path, kv_tokens=KV_TOKENS, weights="int8")
    layers = pool_for_layers(runner)
    parts = [(CpuAttention, "prepare"), (CpuAttention, "chosen_args"), (Program, "share"), (Program, "run")]
    for (owner, name), late in itertools.product(parts, (False, True)):
        method = getattr(owner, name)

        def fail(*args: object, method: Callable[..., object] = method, late: bool = late) -> None:
            if late:
                method(*args)
            raise MemoryError

        for count, fails in ((20, False), (10, True), (20, False)):
            prompts = [[rng.randrange(320) for _ in range(count)] for _ in range(3)]
            requests = scattered_requests(prompts, 16, KV_TOKENS, rng)
            rows = tuple(ScheduledRow(request, 0, count, True) for request in requests)
            batch = make_batch(StepPlan(rows), 16, runner.spec.device)
            if not fails:
                for actual, expected in side_by_side(runner, layers, batch, False):
                    assert torch.equal(actual, expected)
                continue
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(MemoryError):
                    runner.forward(batch, False, True)

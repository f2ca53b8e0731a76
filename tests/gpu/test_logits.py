"""Logits on the GPU against transformers in float32, at every kind of step and at the edges of blocks and ladders.

Stated bounds: in float32 1e-3 of absolute difference; in bfloat16 3 % of the largest logit for any one logit and 1.5 %
of their spread in the mean square. The weights are bfloat16 values, so the latter is the arithmetic's error alone.
For a mixture of experts twice as much: its router turns a small error into other weights, at times into another expert.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.gpu.models import LONG, SHAPES, VOCABULARY, Forced, save_model

CONTEXTS = (1, 15, 16, 17, 4095, 4096, 16384)
DECODES = 4


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


@torch.inference_mode()
def routed_ids(rng: random.Random, model: PreTrainedModel, count: int) -> list[int]:
    """Random ids that no router of the model is undecided about: there rounding alone would choose another expert."""
    margins: list[float] = []

    def note(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        scores = torch.nn.functional.linear(inputs[0].flatten(0, -2), router.weight).sort(-1, descending=True).values
        top_k = model.config.num_experts_per_tok
        margins.append(float((scores[:, top_k - 1] - scores[:, top_k]).min()))

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(note) for router in routers]
    while True:
        margins.clear()
        ids = random_ids(rng, count)
        if routers:
            model(torch.tensor([ids], device=model.device), use_cache=False)
        if min(margins, default=1.0) > 1e-4:
            for hook in hooks:
                hook.remove()
            return ids


@torch.inference_mode()
def reference(model: PreTrainedModel, ids: list[int], keep: int) -> torch.Tensor:
    """Logits of the last `keep` positions, float32 on the CPU."""
    given = torch.tensor([ids], device=model.device)
    return model(given, logits_to_keep=keep, use_cache=False).logits[0].float().cpu()


def check(actual: torch.Tensor, expected: torch.Tensor, dtype: str, what: str, times: int = 1) -> None:
    difference = actual - expected
    largest = float(difference.abs().max())
    relative = float(difference.square().mean().sqrt() / expected.std())
    print(f"{what} {dtype}: largest difference {largest:.2e} of {float(expected.abs().max()):.2f}, rms {relative:.2e}")
    assert not actual.isnan().any()
    if dtype == "float32":
        assert largest < 1e-3
    else:
        assert largest < times * 0.03 * float(expected.abs().max())
        assert relative < times * 0.015


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SHAPES)
def test_every_kind_of_step(family: str, dtype: str, tmp_path: Path) -> None:
    """Chunks with and without a graph, a whole fresh prompt, decode batches of 1 to 64 rows."""
    rng = random.Random(5)
    model = save_model(tmp_path, family)
    if "moe" not in family:
        model.cuda()
    forced = Forced(tmp_path, dtype=dtype, kv_tokens=16384)
    for size, stop, chunk in (
        (1, 300, 300),
        (1, 300, 77),
        (2, 1, 1),
        (3, 17, 5),
        (8, 90, 64),
        (20, 33, 33),
        (64, 40, 40),
    ):
        prompts = [routed_ids(rng, model, stop + 2) for _ in range(size)]
        requests = [forced.request(slot, ids) for slot, ids in enumerate(prompts)]
        parts = [torch.stack([forced.prefill(request, stop, chunk) for request in requests])]
        parts += [forced.decode(requests, stop), forced.decode(requests, stop + 1)]
        expected = torch.stack([reference(model, ids, 3) for ids in prompts], 1)
        what = f"{family} {size} x {stop} in {chunk}"
        check(torch.stack(parts), expected, dtype, what, times=2 if "moe" in family else 1)
        for request in requests:
            forced.drop(request)


@pytest.fixture(scope="module", params=[None, 1000])
def long_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    """Without and with a sliding window."""
    folder = tmp_path_factory.mktemp("long")
    rope = {"rope_type": "default", "rope_theta": 1e6}
    settings = {**LONG, "max_position_embeddings": 16640, "rope_parameters": rope}
    model = save_model(folder, "mistral", **settings, head_dim=64, sliding_window=request.param)
    return folder, model.cuda()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_context_lengths(dtype: str, long_model: tuple[Path, PreTrainedModel]) -> None:
    """Each context as one fresh prompt and in chunks below and above what graphs hold; decode after it by the kernel
    for few rows and by the one for many."""
    folder, model = long_model
    rng = random.Random(6)
    forced = Forced(folder, dtype=dtype, kv_tokens=16 * 16400, max_num_batched_tokens=16384)
    for context in CONTEXTS:
        ids = random_ids(rng, context + DECODES)
        expected = reference(model, ids, DECODES + 1)
        for chunk, rows in ((16384, 1), (1000, 2), (2500, 9)):
            requests = [forced.request(slot, ids) for slot in range(rows)]
            parts = [torch.stack([forced.prefill(request, context, chunk) for request in requests])]
            parts += [forced.decode(requests, context + step) for step in range(DECODES)]
            actual = torch.stack(parts, 1)
            for row in actual:
                check(row, expected, dtype, f"context {context} in {chunk}, {rows} rows")
            for request in requests:
                forced.drop(request)


def test_batch_composition_moves_logits_by_rounding_alone(tmp_path: Path) -> None:
    """The same request alone and among 63 others: other kernels, other orders of summation, the stated bound."""
    rng = random.Random(7)
    save_model(tmp_path, "qwen3")
    forced = Forced(tmp_path, dtype="bfloat16", kv_tokens=16384)
    prompts = [random_ids(rng, 128 + 16) for _ in range(64)]
    alone = forced.request(0, prompts[0])
    expected = [forced.prefill(alone, 128, 128)] + [forced.decode([alone], 128 + step)[0] for step in range(16)]
    forced.drop(alone)
    requests = [forced.request(slot, ids) for slot, ids in enumerate(prompts)]
    firsts = [forced.prefill(request, 128, 128) for request in requests]
    actual = [firsts[0]] + [forced.decode(requests, 128 + step)[0] for step in range(16)]
    check(torch.stack(actual), torch.stack(expected), "bfloat16", "alone and among 63 others")

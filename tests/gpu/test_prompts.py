"""Prompts too large for graphs, by each attention there is: whole, in chunks, beside decodes, and with NaN left in the
pool, against transformers in float32. The bounds are those of test_logits.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine_core.attention.flash import GENERATIONS, find_flash
from engine_core.plan import ScheduledRow, StepPlan
from tests.gpu.models import LONG, VOCABULARY, Forced, save_model


@pytest.fixture(scope="module", params=[(64, None), (128, None), (128, 1000)], ids=["64", "128", "128, window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """By head size and sliding window."""
    folder = tmp_path_factory.mktemp("long")
    head_dim, window = request.param
    rope = {"rope_type": "default", "rope_theta": 1e6}
    shape = {**LONG, "head_dim": head_dim, "sliding_window": window, "max_position_embeddings": 8192}
    made = save_model(folder, "mistral", **shape, rope_parameters=rope)
    return folder, made.cuda()


@torch.inference_mode()
def last_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids], device="cuda"), logits_to_keep=1, use_cache=False).logits
    return logits[0, 0].float().cpu()


def check(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = actual - expected
    relative = float(difference.square().mean().sqrt() / expected.std())
    print(f"{what}: largest difference {float(difference.abs().max()):.2e}, rms {relative:.2e}")
    assert float(difference.abs().max()) < 0.03 * float(expected.abs().max())
    assert relative < 0.015


@pytest.mark.filterwarnings("ignore")  # those of a package are not ours
@pytest.mark.parametrize("attention", ["triton", "flash_attn"])
def test_large_prompt_steps(attention: str, model: tuple[Path, PreTrainedModel]) -> None:
    if attention == "flash_attn":
        tried: list[str] = []
        if find_flash(torch.cuda.get_device_capability(), GENERATIONS, tried) is None:
            pytest.skip(f"no FlashAttention: {'; '.join(tried)}")
    folder, reference = model
    rng = random.Random(12)
    budget = {"kv_tokens": 32768, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    forced = Forced(folder, dtype="bfloat16", attention=attention, **budget)
    print(forced.runner.attention_name)
    forced.runner.cache.fill_(float("nan"))  # what failed requests may leave behind
    slots = iter(range(64))
    for length, chunk in ((1500, 8192), (4001, 8192), (3500, 1100), (2600, 1301)):
        ids = [rng.randrange(VOCABULARY) for _ in range(length + 1)]
        request = forced.request(next(slots), ids)
        check(forced.prefill(request, length, chunk), last_logits(reference, ids[:length]), f"{length} in {chunk}")
        check(forced.decode([request], length)[0], last_logits(reference, ids), f"decode at {length}")
        forced.drop(request)
    # one step: three decode rows, two whole prompts, a chunk
    lengths, starts = (40, 700, 33, 900, 300, 2000), (39, 699, 32, 0, 0, 800)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    requests = [forced.request(next(slots), ids) for ids in prompts]
    for request, start in zip(requests, starts, strict=True):
        if start:
            forced.prefill(request, start, 8192)
    for keep in (slice(0, 6), slice(0, 5)):  # the second time without the chunk
        rows = tuple(
            ScheduledRow(request, start, len(request.prompt_ids) - start, True)
            for request, start in zip(requests[keep], starts[keep], strict=True)
        )
        plan = StepPlan(rows, num_tokens=sum(row.count for row in rows))
        forced.runner.launch(plan).wait()
        for index, logits in enumerate(forced._logits[: len(rows)].cpu()):
            check(logits, last_logits(reference, prompts[index]), f"row {index} of a mixed step")

"""Logits of every family and RoPE scaling equal those of transformers, however the tokens are cut into steps."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from tests.engine_core.tiny_models import (
    FAMILIES,
    ROPE_SCALINGS,
    load,
    make_model,
    random_pieces,
    reference_logits,
    save_model,
    scattered_requests,
    step_logits,
)

KV_TOKENS = 1024
TOLERANCE = 1e-4


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def prompts(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(("attention", "block_size"), [("torch", 5), ("cpu", 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_prefill_chunks_and_decode(
    family: str, attention: str, block_size: int, tmp_path: Path, rng: random.Random
) -> None:
    reference = save_model(tmp_path, family)
    runner = load(tmp_path, kv_tokens=KV_TOKENS, block_size=block_size, attention=attention)
    requests = scattered_requests(prompts(rng, 83, 50, 31), block_size, KV_TOKENS, rng)
    whole = step_logits(runner, [(request, 0, request.num_tokens) for request in requests])
    one_by_one = [step_logits(runner, [(requests[2], i, i + 1)])[0] for i in range(31)]
    for request, logits in zip(requests, whole, strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, request.prompt_ids), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(
        torch.cat(one_by_one), reference_logits(reference, requests[2].prompt_ids), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(
    ("attention", "block_size"), [("torch", 1), ("torch", 3), ("torch", 16), ("cpu", 16), ("cpu", 64)]
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window", "qwen2-window", "qwen3-moe"])
def test_random_mixes_of_chunks_and_decodes(
    family: str, attention: str, block_size: int, tmp_path: Path, rng: random.Random
) -> None:
    reference = save_model(tmp_path, family)
    runner = load(tmp_path, kv_tokens=KV_TOKENS, block_size=block_size, attention=attention)
    requests = scattered_requests(prompts(rng, 130, 1, 47, 64, 65, 90), block_size, KV_TOKENS, rng)
    parts: dict[int, list[torch.Tensor]] = {request.request_id: [] for request in requests}
    for pieces in random_pieces(requests, rng):
        for (request, _, _), logits in zip(pieces, step_logits(runner, pieces), strict=True):
            parts[request.request_id].append(logits)
    for request in requests:
        expected = reference_logits(reference, request.prompt_ids)
        torch.testing.assert_close(torch.cat(parts[request.request_id]), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", ["torch", "cpu"])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 99, 100, 101, 300])
def test_a_window_is_as_long_as_it_says(window: int, attention: str, tmp_path: Path, rng: random.Random) -> None:
    reference = save_model(tmp_path, "mistral", sliding_window=window)
    ids = prompts(rng, 100)[0]
    expected = reference_logits(reference, ids)
    for other in {max(1, window - 1), window + 1} - {window}:
        # One token more or less must matter where it can be seen, or this test would not see it.
        difference = (expected - reference_logits(make_model("mistral", sliding_window=other), ids)).abs().max()
        assert (difference > 10 * TOLERANCE) == (min(window, other) < 100)
    runner = load(tmp_path, kv_tokens=KV_TOKENS, attention=attention)
    request = scattered_requests([ids], 16, KV_TOKENS, rng)[0]
    pieces = ((0, 70), (70, 71), (71, 98), (98, 99), (99, 100))
    parts = [step_logits(runner, [(request, start, stop)])[0] for start, stop in pieces]
    torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("scaling", ROPE_SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rope_scaling(family: str, scaling: str, tmp_path: Path, rng: random.Random) -> None:
    parameters = {"rope_theta": 10000.0, **ROPE_SCALINGS[scaling]}
    reference = save_model(tmp_path, family, rope_parameters=parameters)
    ids = prompts(rng, 400)[0]
    expected = reference_logits(reference, ids)
    # The scaling must matter, or this test would not see that it is ignored.
    assert (expected - reference_logits(make_model(family), ids)).abs().max() > 1e-2
    runner = load(tmp_path, kv_tokens=KV_TOKENS)
    request = scattered_requests([ids], 16, KV_TOKENS, rng)[0]
    parts = [step_logits(runner, [(request, start, stop)])[0] for start, stop in ((0, 333), (333, 399), (399, 400))]
    torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_widened(dtype: str, tmp_path: Path, rng: random.Random) -> None:
    make_model("qwen3").to(getattr(torch, dtype)).save_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = prompts(rng, 40)[0]
    runner = load(tmp_path, kv_tokens=KV_TOKENS)
    request = scattered_requests([ids], 16, KV_TOKENS, rng)[0]
    logits = step_logits(runner, [(request, 0, 40)])[0]
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=TOLERANCE, rtol=0)


def test_bfloat16_compute_is_close(tmp_path: Path, rng: random.Random) -> None:
    reference = save_model(tmp_path, "llama")
    ids = prompts(rng, 40)[0]
    runner = load(tmp_path, kv_tokens=KV_TOKENS, dtype="bfloat16")
    request = scattered_requests([ids], 16, KV_TOKENS, rng)[0]
    logits = torch.cat([step_logits(runner, [(request, 0, 30)])[0], step_logits(runner, [(request, 30, 40)])[0]])
    assert logits.dtype == torch.float32
    expected = reference_logits(reference, ids)
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_older_form_of_rope_settings(tmp_path: Path, rng: random.Random) -> None:
    parameters = {"rope_theta": 5000.0, **ROPE_SCALINGS["llama3"]}
    reference = save_model(tmp_path, "llama", rope_parameters=parameters)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {"type" if key == "rope_type" else key: value for key, value in ROPE_SCALINGS["llama3"].items()}
    config |= {"rope_theta": 5000.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = prompts(rng, 300)[0]
    runner = load(tmp_path, kv_tokens=KV_TOKENS)
    request = scattered_requests([ids], 16, KV_TOKENS, rng)[0]
    logits = step_logits(runner, [(request, 0, 300)])[0]
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=TOLERANCE, rtol=0)

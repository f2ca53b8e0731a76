"""Small random models in Hugging Face layout, made by transformers, and a way to step a runner over known tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from engine_core.batch import make_batch
from engine_core.plan import ScheduledRow, StepPlan
from engine_core.request import Request
from engine_core.runner import ModelRunner, build_runner
from ipc.config import EngineConfig
from ipc.sampling import SamplingParams

ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE: dict[str, Any] = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Family -> transformers' class prefix and what differs from the common shape below.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama3-tied": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 21}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-window": (
        "Qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 5, "layer_types": ALTERNATING},
    ),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (  # layers with and without experts, sizes that no kernel likes, windows
        "Qwen3Moe",
        {**MOE, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": False}
        | {"decoder_sparse_step": 2, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 20},
    ),
    "qwen3-biased": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 0.9,
    },
}


def make_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model whose parameters are all random, biases and norms included."""
    prefix, differences = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **differences, **changes})
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config).float().train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Routers choose clearly: where two experts are as good, rounding would decide.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "mlp.gate." in name else 0.1)
    return model


def save_model(folder: Path, family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    model = make_model(family, seed, **changes)
    model.save_pretrained(folder)
    return model


def load(model: Path, **settings: Any) -> ModelRunner:
    """A runner in exact float32 with a small KV pool."""
    defaults: dict[str, Any] = {"weights": "none", "kv_tokens": 1024, "max_num_seqs": 8, "device": "cpu", "threads": 1}
    runner, _ = build_runner(EngineConfig(model=str(model), **{**defaults, **settings}))
    return runner


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary] from transformers."""
    return model(torch.tensor([list(ids)])).logits[0]


def scattered_requests(
    prompts: Sequence[Sequence[int]], block_size: int, kv_tokens: int, rng: random.Random
) -> list[Request]:
    """Requests that hold all blocks they will need, in random order all over the pool."""
    free = list(range(1, kv_tokens // block_size + 1))
    rng.shuffle(free)
    requests = []
    for slot, ids in enumerate(prompts):
        blocks = [free.pop() for _ in range(-(-len(ids) // block_size))]
        requests.append(Request(slot, list(ids), SamplingParams(temperature=0.0), block_ids=blocks, slot=slot))
    return requests


@torch.inference_mode()
def step_logits(runner: ModelRunner, pieces: Sequence[tuple[Request, int, int]]) -> list[torch.Tensor]:
    """One forward pass over positions [start, stop) of each request. Logits of all of them, per piece."""
    rows = tuple(ScheduledRow(request, start, stop - start, True) for request, start, stop in pieces)
    batch = make_batch(StepPlan(rows), runner.spec.block_size, runner.spec.device)
    batch = replace(batch, logits_rows=torch.arange(batch.num_tokens))
    logits = runner.forward(batch, False, True)[1]
    assert logits is not None
    return list(logits.clone().split([row.count for row in rows]))


def random_pieces(requests: Sequence[Request], rng: random.Random) -> Iterator[list[tuple[Request, int, int]]]:
    """Steps that compute all requests: each step a random mix of single tokens and chunks, in random row order."""
    done = {request.request_id: 0 for request in requests}
    while True:
        open_requests = [r for r in requests if done[r.request_id] < r.num_tokens]
        if not open_requests:
            return
        rng.shuffle(open_requests)
        pieces = []
        for request in open_requests[: rng.randint(1, len(open_requests))]:
            start = done[request.request_id]
            stop = min(request.num_tokens, start + rng.choice((1, 1, 1, 2, 5, 17, 64)))
            done[request.request_id] = stop
            pieces.append((request, start, stop))
        yield pieces

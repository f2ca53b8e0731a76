"""Small random models with the head sizes that the GPU kernels are for, and ways to run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine_core.build import build_engine
from engine_core.engine import Engine
from engine_core.plan import ScheduledRow, StepPlan
from engine_core.request import Request
from engine_core.runner import build_runner
from ipc.codec import pack_ids, unpack_ids, unpack_request_ids
from ipc.config import EngineConfig
from ipc.messages import Finished, Generate, TokenLogprobs
from ipc.sampling import SamplingParams
from tests.engine_core.tiny_models import make_model

VOCABULARY = 320
BLOCK_SIZE = 16
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 384, "intermediate_size": 640},  # 6 heads of 64, 2 KV heads
    "llama-biased": {"hidden_size": 384, "intermediate_size": 640},
    "mistral-window": {"hidden_size": 384, "intermediate_size": 640, "sliding_window": 70},
    "qwen2-window": {"hidden_size": 384, "intermediate_size": 640},
    "qwen2": {"hidden_size": 384, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 4},
    "qwen3-moe": {"hidden_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 64},
    "qwen3-moe-mixed": {"hidden_size": 256, "num_experts": 12, "num_experts_per_tok": 4, "head_dim": 64},
}
LONG = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


def save_model(folder: Path, family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model whose weights are bfloat16 values, so that an engine in bfloat16 has the same; returned in float32."""
    model = make_model(family, seed, **{**SHAPES.get(family, {}), **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "mlp.gate." not in name:  # routers go on choosing clearly
                parameter.mul_(0.5)  # at these widths: activations keep their size from layer to layer
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return model


def settings(model: Path, **changes: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"device": "cuda", "dtype": "float32", "weights": "none", "kv_tokens": 8192}
    return EngineConfig(model=str(model), **{**defaults, "max_num_seqs": 64, "block_size": BLOCK_SIZE, **changes})


# --- through the engine -----------------------------------------------------------------------------------------------


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[TokenLogprobs | None] = field(default_factory=list)  # log-probabilities, if they were asked for
    finished: Finished | None = None


def engine(model: Path, **changes: Any) -> Engine:
    return build_engine(settings(model, **changes))


def generate(engine: Engine, jobs: Sequence[tuple[Sequence[int], SamplingParams]], first_id: int = 0) -> list[Answer]:
    """Run all jobs (prompt, sampling) together until they end."""
    answers = {first_id + index: Answer() for index in range(len(jobs))}
    for request_id, (ids, sampling) in zip(answers, jobs, strict=True):
        engine.add(
            Generate(request_id=request_id, frontend=0, prompt_ids=pack_ids(list(ids)), sampling=sampling, arrival=0)
        )
    while engine.has_work:
        collect(engine, answers)
    return list(answers.values())


def collect(engine: Engine, answers: dict[int, Answer]) -> None:
    """One step."""
    output = engine.step()
    owners = list(unpack_request_ids(output.request_ids))
    for request_id, token in zip(owners, unpack_ids(output.token_ids), strict=True):
        answers[request_id].tokens.append(token)
    for entry in output.logprobs:
        answers[owners[entry.row]].logprobs.append(entry.value)
    for prompt in output.prompt_logprobs:
        answers[prompt.request_id].prompt = prompt.values
    for finished in output.finished:
        assert finished.error is None, finished
        answers[finished.request_id].finished = finished


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


# --- the runner alone, over known tokens ------------------------------------------------------------------------------


class Forced:
    """Steps a runner over given ids and keeps the logits that it samples from."""

    def __init__(self, model: Path, **changes: Any) -> None:
        runner, facts = build_runner(settings(model, **changes))
        self.runner: Any = runner
        self._free = list(range(facts.num_blocks - 1, 0, -1))
        # Kept by a copy inside of the step, which a graph captures with it.
        self._logits = torch.zeros(64, facts.vocab_size, device="cuda")
        draw = self.runner.sampling.draw

        def keep(logits: torch.Tensor, *rest: Any) -> None:
            self._logits[: len(logits)].copy_(logits[: len(self._logits)])
            draw(logits, *rest)

        self.runner.sampling.draw = keep
        self.runner.graphs.forget()  # those of the warm-up, which have no such copy

    def request(self, slot: int, ids: Sequence[int]) -> Request:
        blocks = [self._free.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))]
        return Request(slot, list(ids), SamplingParams(temperature=0.0), block_ids=blocks, slot=slot)

    def drop(self, request: Request) -> None:
        self.runner.release(request)
        self._free += request.block_ids

    def prefill(self, request: Request, stop: int, chunk: int) -> torch.Tensor:
        """Positions [0, stop) in chunks; the last one's logits."""
        for start in range(0, stop, chunk):
            end = min(stop, start + chunk)
            row = ScheduledRow(request, start, end - start, True)
            self.runner.launch(StepPlan((row,), num_tokens=end - start)).wait()
        return self._logits[0].cpu()

    def decode(self, requests: Sequence[Request], position: int) -> torch.Tensor:
        """One step that computes `position` of each, as if its token had been sampled. Logits [requests, vocab]."""
        for request in requests:
            self.runner.sampling.last_tokens[request.slot] = request.prompt_ids[position]
        rows = tuple(ScheduledRow(request, position, 1, True) for request in requests)
        self.runner.launch(StepPlan(rows, num_tokens=len(rows), num_decodes=len(rows))).wait()
        return self._logits[: len(rows)].cpu()

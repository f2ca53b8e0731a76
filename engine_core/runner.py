"""Turns plans into device work: loads the model, owns the KV pool and the sampler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_core.attention.base import Attention, AttentionSpec
from engine_core.attention.select import check_attention, make_attention
from engine_core.batch import make_batch
from engine_core.device import choose_device, choose_dtype, choose_threads
from engine_core.errors import UserError
from engine_core.kv_size import choose_max_model_len, choose_num_blocks
from engine_core.layers.linear import WeightsMode, choose_mode
from engine_core.loader.checkpoint import Checkpoint, ModelBuilder
from engine_core.loader.select import open_checkpoint
from engine_core.models.config import ModelConfig
from engine_core.models.llama import LlamaForCausalLM
from engine_core.models.registry import model_class
from engine_core.plan import ModelFacts, ProgressCallback, Runner, ScheduledRow, StepPlan, StepTokens
from engine_core.prompt_logprobs import prompt_logprobs, wants_prompt_logprobs
from engine_core.request import Request
from engine_core.sampler import Sampler
from ipc.config import EngineConfig
from ipc.sampling import SamplingParams

if TYPE_CHECKING:
    from engine_core.cuda.runner import CudaRunner


@dataclass(frozen=True, slots=True)
class Done:
    """A step that ran to its end inside `launch`: on the CPU there is nothing to wait for."""

    tokens: StepTokens

    def wait(self) -> StepTokens:
        return self.tokens


class ModelRunner:
    """Runs one model on one device, one step after the other."""

    def __init__(self, model: LlamaForCausalLM, attention: Attention, spec: AttentionSpec, max_num_seqs: int) -> None:
        self.model, self.attention, self.spec = model, attention, spec
        self.attention_name = attention.name
        self.sampler = Sampler(model.config.vocab_size, max_num_seqs, spec.device)
        # The last token sampled per slot: the input of a step launched before that token was committed.
        self._last_token = np.zeros(max_num_seqs, np.int64)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Done:
        """Compute all rows of `plan` and sample for those that ask for it."""
        if not plan.rows:
            return Done(StepTokens([]))
        batch = make_batch(plan, self.spec.block_size, self.spec.device, self._last_token)
        hidden = self.model.forward(batch, self.attention)
        sampling = [row for row in plan.rows if row.samples]
        tokens = StepTokens([])
        if sampling:
            requests = [row.request for row in sampling]
            positions = [row.stop - row.request.num_prompt_tokens for row in sampling]
            tokens = self.sampler.sample(self.model.logits(hidden[batch.logits_rows]), requests, positions)
            self._last_token[[request.slot for request in requests]] = tokens.token_ids
        for row, start in zip(plan.rows, batch.query_starts.tolist(), strict=False):
            if wants_prompt_logprobs(row):
                values = prompt_logprobs(row, hidden[start:], self.model.logits, self.sampler)
                tokens.prompt_logprobs[row.request.request_id] = values
        return Done(tokens)

    def release(self, request: Request) -> None:
        self.sampler.release(request)


def build_runner(config: EngineConfig, progress: ProgressCallback | None = None) -> tuple[Runner, ModelFacts]:
    """Load the model of `config`, size the KV pool, and run once so that the first request finds everything warm.

    Raises:
        UserError: the model or a setting cannot be used; the message says which and what would do.
    """
    report = progress or (lambda phase, fraction: None)
    seconds: dict[str, float] = {}
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    check_attention(config.attention, device)
    if device.type == "cpu":
        torch.set_num_threads(choose_threads(config))
    with _timed(seconds, "load"):
        report("loading weights", 0.0)
        checkpoint = open_checkpoint(config.model, config.load_format, config.seed, device)
        max_model_len = choose_max_model_len(config, checkpoint.config)
        mode = choose_mode(config.weights, checkpoint.quantized, device)
        model = _load_model(config.model, checkpoint, mode, dtype, device, report)
    with _timed(seconds, "kv pool"):
        report("allocating the KV pool", None)
        spec = _attention_spec(checkpoint.config, config.block_size, dtype, device)
        num_blocks, max_model_len = choose_num_blocks(config, spec, max_model_len)
        with _out_of_memory(f"{num_blocks * config.block_size} KV tokens", "lower --kv-tokens"):
            runner = _make_runner(config, model, spec, num_blocks, max_model_len)
    with _timed(seconds, "warm-up"):
        report("warming up", None)
        _warm_up(runner, config, num_blocks)
    facts = ModelFacts(
        max_model_len=max_model_len,
        vocab_size=checkpoint.config.vocab_size,
        num_blocks=num_blocks,
        block_size=config.block_size,
        eos_token_ids=checkpoint.config.eos_token_ids,
        architecture=checkpoint.config.architecture,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        weights=mode,
        attention=runner.attention_name,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        seconds=seconds,
    )
    return runner, facts


def _make_runner(
    config: EngineConfig, model: LlamaForCausalLM, spec: AttentionSpec, num_blocks: int, max_model_len: int
) -> ModelRunner | CudaRunner:
    if spec.device.type == "cuda" and config.attention != "torch":
        from engine_core.cuda.runner import CudaRunner  # needs triton

        return CudaRunner(model, spec, config, num_blocks, max_model_len)
    attention = make_attention(config.attention, spec)
    attention.allocate(num_blocks)
    return ModelRunner(model, attention, spec, config.max_num_seqs)


def _load_model(
    path: str,
    checkpoint: Checkpoint,
    mode: WeightsMode,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback,
) -> LlamaForCausalLM:
    build = ModelBuilder(checkpoint, mode, dtype, device, progress)
    with _out_of_memory(f"the weights of {path}", "use a smaller or quantized model (GGUF), or --dtype bfloat16"):
        model = model_class(checkpoint.config.architecture)(build)
    unused = checkpoint.unused()
    if unused:
        raise UserError(
            f"{path} holds {len(unused)} weights that {checkpoint.config.architecture} does not use "
            f"({', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}): it is another model than it claims to be"
        )
    return model


def _attention_spec(model: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
    if block_size < 1:
        raise UserError(f"--block-size must be at least 1, got {block_size}")
    return AttentionSpec(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        windows=model.windows,
    )


def _warm_up(runner: ModelRunner | CudaRunner, config: EngineConfig, num_blocks: int) -> None:
    """A short prompt and a decode step: compiles kernels and touches the weights before the first request does."""
    room = (num_blocks - 1) * config.block_size
    count = max(1, min(config.max_num_batched_tokens, 32, room - 1))
    request = Request(-1, [0] * count, SamplingParams(temperature=0.0), block_ids=list(range(1, num_blocks)), slot=0)
    with _out_of_memory("a step", "lower --max-num-batched-tokens or --kv-tokens"):
        tokens = runner.launch(StepPlan((ScheduledRow(request, 0, count, True),), num_tokens=count)).wait()
        request.output_ids += tokens.token_ids
        if count < room:
            runner.launch(StepPlan((ScheduledRow(request, count, 1, True),), num_tokens=1, num_decodes=1)).wait()
    runner.release(request)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


@contextmanager
def _out_of_memory(what: str, remedy: str) -> Iterator[None]:
    """Turns an allocation failure into a plain error."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UserError(f"not enough memory for {what}; {remedy}") from error
    except RuntimeError as error:  # what torch's CPU allocator raises
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        raise UserError(f"not enough memory for {what}; {remedy}") from error

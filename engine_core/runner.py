"""Turns plans into device work: loads the model, owns the KV pool and the sampler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from engine_core.attention.base import Attention, AttentionSpec
from engine_core.attention.cpu import CpuAttention
from engine_core.attention.flash import FlashAttention, choose_flash
from engine_core.attention.select import check_attention, make_attention, with_pool
from engine_core.batch import Batches, ForwardBatch, make_batch
from engine_core.cpu.forward import CpuModel
from engine_core.device import choose_device, choose_dtype, choose_threads
from engine_core.errors import UserError
from engine_core.kernels import cpu_memory
from engine_core.kernels.cpu_cache import has_kernels
from engine_core.kernels.cpu_elementwise import Largest
from engine_core.kv_size import choose_max_model_len, choose_num_blocks, pool_flag
from engine_core.layers.held import mean_weight_bytes
from engine_core.layers.linear import WeightsMode, choose_mode
from engine_core.limits import max_batched_tokens
from engine_core.loader.checkpoint import Checkpoint, ModelBuilder
from engine_core.loader.select import open_checkpoint
from engine_core.loader.upload import Uploader
from engine_core.memory import SMALLER_STEPS, out_of_memory, refuse_if_out_of_memory
from engine_core.models.config import ModelConfig
from engine_core.models.llama import LlamaForCausalLM
from engine_core.models.registry import model_class
from engine_core.plan import ModelFacts, ProgressCallback, Runner, StepPlan, StepTokens
from engine_core.prompt_logprobs import prompt_logprobs, wants_prompt_logprobs
from engine_core.request import Request
from engine_core.sampler import Sampler
from engine_core.warmup import run_largest_step, warm_up
from ipc.config import EngineConfig
from ipc.recorder.events import GPU
from ipc.recorder.ring import Recorder

if TYPE_CHECKING:
    from engine_core.cuda.runner import CudaRunner


class Done(msgspec.Struct, frozen=True):
    """A step that ran to its end inside `launch`: on the CPU there is nothing to wait for."""

    tokens: StepTokens

    def wait(self) -> StepTokens:
        return self.tokens


class ModelRunner:
    """Runs one model on one device, one step after the other."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        attention: Attention,
        spec: AttentionSpec,
        config: EngineConfig,
        recorder: Recorder | None = None,
    ) -> None:
        max_num_seqs = config.max_num_seqs
        self.model, self.attention, self.spec = model, attention, spec
        self.attention_name = attention.name
        self._recorder = recorder or Recorder()
        self.sampler = Sampler(model.config.vocab_size, max_num_seqs, spec.device)
        # The last token sampled per slot: the input of a step launched before that token was committed.
        self._last_token = np.zeros(max_num_seqs, np.int64)
        self._on_cpu = spec.device.type == "cpu"
        self._batches = Batches(spec.block_size, self._last_token) if self._on_cpu else None
        # Of a batch: hidden states [tokens, hidden] before the last norm, if all are wanted; logits [sampling rows,
        # vocabulary], if they are wanted; and the largest of each row, if that is known.
        self.forward: Callable[[ForwardBatch, bool, bool], tuple[torch.Tensor, torch.Tensor | None, Largest | None]]
        self.forward = self._run_layers
        if isinstance(attention, CpuAttention) and CpuModel.supports(model):
            self.forward = CpuModel(model, attention, max_batched_tokens(config, "cpu")).forward

    def allocate(self, num_blocks: int, graphs: bool = False) -> None:
        """Make the KV pool. There are no graphs here."""
        self.attention.allocate(num_blocks)

    def compile(self, report: Callable[[float], None]) -> None:
        """Nothing: torch's kernels come compiled, and the CPU's compile where they first run."""

    def launch(self, plan: StepPlan) -> Done:
        """Compute all rows of `plan` and sample for those that ask for it."""
        began = self._recorder.begin(GPU)
        try:
            tokens = self._run(plan)
        except (MemoryError, OSError, RuntimeError) as error:
            refuse_if_out_of_memory(error, f"a step of {plan.num_tokens} tokens", SMALLER_STEPS)
            raise
        finally:
            self._recorder.end(GPU, began, plan.step, plan.num_tokens, len(plan.rows), int(self._on_cpu))
        tokens.span = began, time.monotonic_ns()
        return Done(tokens)

    def _run(self, plan: StepPlan) -> StepTokens:
        if not plan.rows:
            return StepTokens([])
        if self._batches is not None:
            batch = self._batches.of(plan)
        else:
            batch = make_batch(plan, self.spec.block_size, self.spec.device, self._last_token)
        chunks = enumerate(plan.rows[plan.num_decodes :], plan.num_decodes)
        scored = [(index, row) for index, row in chunks if wants_prompt_logprobs(row)]
        sampling = [row for row in plan.rows if row.samples]
        wanted = any(not row.request.takes_largest for row in sampling)
        hidden, logits, largest = self.forward(batch, bool(scored), wanted)
        tokens = StepTokens([])
        if sampling:
            tokens = self.sampler.sample(logits, sampling, largest)
            for row, token in zip(sampling, tokens.token_ids, strict=True):
                self._last_token[row.request.slot] = token
        for index, row in scored:
            values = prompt_logprobs(row, hidden[batch.query_starts[index] :], self.model.logits, self.sampler)
            tokens.prompt_logprobs[row.request.request_id] = values
        return tokens

    @torch.inference_mode()
    def _run_layers(self, batch: ForwardBatch, whole: bool, wanted: bool) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden = self.model.forward(batch, self.attention)
        return hidden, self.model.logits(hidden[batch.logits_rows]), None

    def idle(self) -> bool:
        return False

    def release(self, request: Request) -> None:
        self.sampler.release(request)


def build_runner(
    config: EngineConfig, progress: ProgressCallback | None = None, recorder: Recorder | None = None
) -> tuple[Runner, ModelFacts]:
    """Load the model of `config`, size the KV pool, and run once so that the first request finds everything warm.

    Raises:
        UserError: the model or a setting cannot be used; the message says which and what would do.
    """
    report = progress or (lambda phase, fraction: None)
    seconds: dict[str, float] = {}
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    check_attention(config.attention, device)
    with _timed(seconds, "attention"):
        flash = choose_flash(config.attention, device, dtype)
    if device.type == "cpu":
        torch.set_num_threads(choose_threads(config))
    with _timed(seconds, "weights"):
        report("loading weights", 0.0)
        checkpoint = open_checkpoint(config.model, config.load_format, config.seed, device)
        max_model_len = choose_max_model_len(config, checkpoint.config)
        mode = choose_mode(config.weights, checkpoint.quantized, device)
        spec, biased = _attention_spec(checkpoint.config, config.block_size, dtype, device), checkpoint.config.qkv_bias
        spec = with_pool(config.attention, spec, config.kv_cache_dtype, rounds=mode == "int8", biased=biased)
        model = _load_model(config.model, checkpoint, mode, dtype, device, report)
        weight_bytes = mean_weight_bytes(model)
    with out_of_memory("the runner's buffers", SMALLER_STEPS):
        runner = _make_runner(config, model, spec, max_model_len, flash, recorder)
    if device.type == "cuda":
        runner.allocate(1)  # a block that all rows of what comes next write to
        with _timed(seconds, "kernels"):
            report("compiling kernels", None)
            runner.compile(lambda done: report("compiling kernels", done))
        with _timed(seconds, "largest step"):
            report("running the largest step", None)
            torch.cuda.empty_cache()  # what came before has left memory behind that this step need not use
            run_largest_step(runner, config, spec, max_model_len)
    with _timed(seconds, "KV pool"):
        report("allocating the KV pool", None)
        num_blocks, max_model_len = choose_num_blocks(config, spec, max_model_len)
        what = f"{(num_blocks - 1) * spec.block_size} KV tokens"
        with out_of_memory(what, f"lower {pool_flag(config, device)}"):
            runner.allocate(num_blocks, config.cuda_graphs)
    with _timed(seconds, "warm-up"):
        report("compiling kernels" if device.type == "cpu" and not has_kernels() else "warming up", None)
        warm_up(runner, config, spec, num_blocks)
    cpu_memory.weights().gather()  # no sooner: kernels would wait for the pages that are being moved
    facts = ModelFacts(
        max_model_len=max_model_len,
        vocab_size=checkpoint.config.vocab_size,
        num_blocks=num_blocks,
        block_size=spec.block_size,
        eos_token_ids=checkpoint.config.eos_token_ids,
        architecture=checkpoint.config.architecture,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        weights=mode,
        attention=runner.attention_name,
        kv_dtype=str(spec.pool_dtype).removeprefix("torch."),
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        seconds=seconds,
        model=checkpoint.config,
        weight_bytes=weight_bytes,
    )
    return runner, facts


def _make_runner(
    config: EngineConfig,
    model: LlamaForCausalLM,
    spec: AttentionSpec,
    max_model_len: int,
    flash: FlashAttention | None,
    recorder: Recorder | None,
) -> ModelRunner | CudaRunner:
    if spec.device.type == "cuda" and config.attention != "torch":
        from engine_core.cuda.runner import CudaRunner  # needs triton

        return CudaRunner(model, spec, config, max_model_len, flash, recorder)
    return ModelRunner(model, make_attention(config.attention, spec), spec, config, recorder)


def _load_model(
    path: str,
    checkpoint: Checkpoint,
    mode: WeightsMode,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback,
) -> LlamaForCausalLM:
    remedy = "a smaller model, or --dtype bfloat16"
    if device.type == "cpu":
        remedy = "a smaller or quantized model (GGUF), or --dtype bfloat16"
    with contextlib.ExitStack() as stack:
        stack.enter_context(out_of_memory(f"the weights of {path}", f"use {remedy}"))
        uploader = stack.enter_context(Uploader(device)) if device.type == "cuda" else None
        build = ModelBuilder(checkpoint, mode, dtype, device, progress, uploader)
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


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start

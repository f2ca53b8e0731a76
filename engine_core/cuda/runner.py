"""Runs plans on a GPU. No step waits for the host: inputs are gathered on the device from the last sampled ids, tokens
come back on their own stream into pinned memory, and a decode step is one CUDA graph.

    launch: stage inputs -> replay graph (or run a prompt step) -> start the copy of the tokens
    wait:   the copy's event, nothing else
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine_core.attention.base import AttentionSpec
from engine_core.attention.flash import FlashAttention, PromptRows
from engine_core.costs import ModelCosts
from engine_core.cuda.forward import FusedModel
from engine_core.cuda.graphs import DecodeGraphs, DecodeInputs, GraphCache
from engine_core.cuda.mixed import MixedHost, MixedInputs, MixedLayout, mixed_inputs
from engine_core.cuda.mixed_graphs import MAX_UNSPLIT_CONTEXT, MixedGraphs, MixedSize
from engine_core.cuda.prompt_logprobs import prompt_records
from engine_core.cuda.prompts import FlashPrompts, try_flash
from engine_core.cuda.results import TURNS, CudaStep, Scored
from engine_core.cuda.sampling import DeviceSampler, Needs
from engine_core.cuda.spans import DeviceSpans
from engine_core.cuda.state import SlotState, Staging
from engine_core.cuda.step_times import StepTimes, product_rate
from engine_core.kernels import triton_attention, triton_pointwise, triton_step
from engine_core.kernels.triton_compile import compile_only
from engine_core.kernels.triton_step import Stamp
from engine_core.layers.embedding import DenseEmbedding
from engine_core.limits import max_batched_tokens
from engine_core.memory import SMALLER_STEPS, out_of_memory
from engine_core.models.llama import LlamaForCausalLM
from engine_core.plan import ScheduledRow, StepPlan
from engine_core.prompt_logprobs import wants_prompt_logprobs
from engine_core.request import Request
from engine_core.warmup import EVERYTHING
from ipc.config import EngineConfig
from ipc.recorder.ring import Recorder

# A kernel for each of these numbers of rows: see the `suits` of the products. Contexts: with one split, and with many.
COMPILED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
COMPILED_CONTEXTS = (256, 4096)
PREPARED_CONTEXT = 4096  # decode graphs of longer contexts are captured when needed


class CudaRunner:
    """Runs one model on one GPU. `launch` never waits for a step on its way."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        spec: AttentionSpec,
        config: EngineConfig,
        max_model_len: int,
        flash: FlashAttention | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        device, seqs, max_tokens = spec.device, config.max_num_seqs, max_batched_tokens(config, spec.device.type)
        self.model, self.spec = FusedModel(model), spec
        assert isinstance(model.embedding, DenseEmbedding)  # weights on a GPU are dense
        self.embedding = model.embedding.weight
        self.cache = torch.empty(0)
        cos, sin = model.rope.angles(torch.arange(max_model_len, device=device), torch.float32)
        self.cos_sin = torch.cat((cos, sin), -1).flatten(1).contiguous()
        self.graphs = GraphCache()
        self.decode_graphs = DecodeGraphs(self.graphs, self._decode_step, seqs, seqs, device)
        rate = product_rate(device, spec.dtype)
        times = StepTimes(ModelCosts(model.config, spec.dtype.itemsize, spec.dtype.itemsize), rate)
        self.layout = MixedLayout(triton_attention.query_tile(spec), seqs, device)
        self.mixed_graphs = MixedGraphs(self.graphs, self._mixed_step, self.layout, seqs, max_tokens, times.graph_pays)
        self.sampling = DeviceSampler(model.config.vocab_size, seqs, max(seqs, self.mixed_graphs.max_rows), device)
        self.state = SlotState(seqs, -(-max_model_len // spec.block_size), device, self.sampling.enter)
        self.staging = Staging(6 * max_tokens + 8 * seqs + 8192, device)
        self._package, self._package_required = flash, config.attention == "flash_attn"
        self.flash: FlashPrompts | None = None  # until the package is tried out
        self._ended = [torch.cuda.Event() for _ in range(TURNS)]  # steps, by turn
        self._spans = DeviceSpans(recorder or Recorder(), TURNS)
        self._captures: Iterator[None] = itertools.chain(
            self.mixed_graphs.prepare(), self.decode_graphs.prepare(min(max_model_len, PREPARED_CONTEXT))
        )

    @property
    def attention_name(self) -> str:
        if self.flash is None:
            return "triton decode, cuDNN and triton prefill"
        return f"triton decode, {self.flash.flash.name}{'' if self.flash.pages else ' and triton'} prefill"

    def allocate(self, num_blocks: int, graphs: bool = False) -> None:
        """Make the KV pool. `graphs`: the steps over it may be captured, which ties them to its address."""
        s = self.spec
        if graphs:  # what the largest step has left with the allocator
            self.graphs.reserve = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        self.cache = torch.empty(0)  # two pools at once would not fit
        shape = (s.num_layers, 2, num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
        self.cache = torch.zeros(shape, dtype=s.dtype, device=s.device)
        self.graphs.enabled = graphs

    @torch.inference_mode()
    def compile(self, report: Callable[[float], None]) -> None:
        """Compile the kernels of the steps to be expected, those that Triton's cache lacks: decode steps of few and of
        many rows, with short and long contexts, small steps with prompt tokens, and every way to sample."""
        self.sampling.enter([Request(-1, [0], EVERYTHING, slot=0)])
        with compile_only(report):
            for rows in {self.decode_graphs.size_for(min(rows, self.state.pad)) for rows in COMPILED_ROWS}:
                for longest in COMPILED_CONTEXTS:
                    self._decode_step(self.decode_graphs.inputs(rows), longest, Needs.GREEDY)
            for needs in Needs:
                self._decode_step(self.decode_graphs.inputs(1), COMPILED_CONTEXTS[0], needs)
            for size in self.mixed_graphs.compiled_sizes():
                self._mixed_step(self.mixed_graphs.inputs(size)[1], size, Needs.GREEDY)
        if self._package is not None:
            self.flash = try_flash(self._package, self.spec, self.cache[0], self._package_required)

    def launch(self, plan: StepPlan) -> CudaStep:
        with out_of_memory(f"a step of {plan.num_tokens} tokens", SMALLER_STEPS):
            return self._launch(plan)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> CudaStep:
        turn = self.sampling.results.next_turn()
        sampling = [row for row in plan.rows if row.samples]
        scored: list[Scored] = []
        self._spans.launch(turn)
        if plan.num_decodes == len(plan.rows):  # not for a chunk of one token: its id is not the last sampled one
            needs = self._launch_decode(plan.rows, turn)
        else:
            needs = self._launch_mixed(plan, sampling, turn, scored)
        ended = self._ended[turn]
        ended.record()
        step = self.sampling.results.fetch(turn, sampling, ended, needs is Needs.FULL, self._spans.keeps, scored)
        step.seen = partial(self._spans.read, turn, step=plan.step, num_tokens=plan.num_tokens, num_rows=len(plan.rows))
        return step

    @torch.inference_mode()
    def idle(self) -> bool:
        """Capture one more of the graphs to be expected, before a request has to wait for it."""
        return next(self._captures, self) is None

    def release(self, request: Request) -> None:
        self.state.forget(request)

    def _stamp(self, turn: torch.Tensor) -> Stamp | None:
        return Stamp(self.sampling.results.times, turn) if self._spans.keeps else None

    # --- a step of decode rows alone: one graph -------------------------------------------------------------------

    def _launch_decode(self, rows: Sequence[ScheduledRow], turn: int) -> Needs:
        new_blocks = self.state.new_blocks(rows, self.spec.block_size)
        lengths = [row.start + 1 for row in rows]
        slots = [row.request.slot for row in rows]
        values = self.decode_graphs.host_inputs(slots, lengths, new_blocks, turn)
        self.staging.send([values], self.decode_graphs.inputs(len(rows)).buffer)
        needs = self.sampling.needs(slots)
        self.decode_graphs.replay(len(rows), max(lengths), needs)
        return needs

    def _decode_step(self, inputs: DecodeInputs, longest: int, needs: Needs) -> None:
        state, spec, stamp = self.state, self.spec, self._stamp(inputs.turn)
        x = triton_step.begin_step(
            inputs.slots,
            inputs.lengths,
            inputs.new_blocks,
            state.tables,
            self.sampling.last_tokens,
            self.embedding,
            spec.block_size,
            stamp,
        )
        rows = inputs.slots.shape[0]

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            weights, window = self.model.layers[layer], spec.window(layer)
            return triton_attention.decode(
                qkv,
                self.cache[layer],
                weights.q_norm,
                weights.k_norm,
                self.model.eps,
                self.cos_sin,
                state.tables,
                inputs.slots,
                inputs.lengths,
                inputs.order,
                spec,
                triton_attention.decode_splits(rows, longest, spec, window),
                window,
            )

        logits = self.model.logits(self.model.forward(x, attend))
        self.sampling.draw(logits, inputs.slots, inputs.lengths, inputs.turn, needs)
        triton_step.end_step(stamp)

    # --- a step with prompt tokens in it ----------------------------------------------------------------

    def _launch_mixed(self, plan: StepPlan, sampling: Sequence[ScheduledRow], turn: int, scored: list[Scored]) -> Needs:
        spec = self.spec
        # decode rows first, so that each kind of attention has one run of tokens, and the longest of them first
        rows = sorted(plan.rows, key=lambda row: (row.count > 1, -row.stop))
        self.state.upload(rows, spec.block_size)
        needs = self.sampling.needs([row.request.slot for row in sampling])
        size = self.mixed_graphs.size_for(rows, plan.num_tokens, needs)
        host = mixed_inputs(rows, sampling, spec, turn, tile_all=size is not None and size.num_decodes == 0)
        if size is not None:
            padded = self.layout.padded(host.arrays, size.tokens, size.rows)
            self.staging.send([padded], self.mixed_graphs.inputs(size)[0])
            self.mixed_graphs.replay(size, needs)
            return needs
        device = MixedInputs(*self.staging.send(list(host.arrays)))
        stamp = self._stamp(device.turn)
        x = triton_step.embed(device.ids, device.token_slots, self.sampling.last_tokens, self.embedding, stamp)
        prompts = self.flash.rows(host, device, self.state.tables) if self.flash is not None else None

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            return self._attend_mixed(layer, qkv, rows, host, device, prompts)

        hidden = self.model.forward(x, attend)
        starts = dict(zip((row.request.request_id for row in rows), host.query_starts, strict=False))
        for row in rows:
            if wants_prompt_logprobs(row):
                records = prompt_records(row, hidden[starts[row.request.request_id] :], self.model.logits)
                scored.append(Scored(row.request, records))
        if sampling:
            logits = self.model.logits(hidden.index_select(0, device.logits_rows))
            self.sampling.draw(logits, device.logits_slots, device.logits_lengths, device.turn, needs)
        triton_step.end_step(stamp)
        return needs

    def _mixed_step(self, inputs: MixedInputs, size: MixedSize, needs: Needs) -> None:
        """A step of fixed size. All its rows that decode attention does not take go through the prefill kernel."""
        host = MixedHost((), [], num_decodes=size.num_decodes, longest_decode=MAX_UNSPLIT_CONTEXT)
        stamp = self._stamp(inputs.turn)
        x = triton_step.embed(inputs.ids, inputs.token_slots, self.sampling.last_tokens, self.embedding, stamp)
        hidden = self.model.forward(x, lambda layer, qkv: self._attend_mixed(layer, qkv, (), host, inputs))
        logits = self.model.logits(hidden.index_select(0, inputs.logits_rows))
        self.sampling.draw(logits, inputs.logits_slots, inputs.logits_lengths, inputs.turn, needs)
        triton_step.end_step(stamp)

    def _attend_mixed(
        self,
        layer: int,
        qkv: torch.Tensor,
        rows: Sequence[ScheduledRow],
        host: MixedHost,
        device: MixedInputs,
        prompts: PromptRows | None = None,
    ) -> torch.Tensor:
        spec, cache, weights = self.spec, self.cache[layer], self.model.layers[layer]
        heads, kv_heads, dim, window = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window(layer)
        triton_pointwise.rope_write_kv(
            qkv,
            cache,
            self.cos_sin,
            device.positions,
            device.slot_mapping,
            heads,
            weights.q_norm,
            weights.k_norm,
            self.model.eps,
        )
        out = torch.empty(qkv.shape[0], heads * dim, dtype=qkv.dtype, device=qkv.device)
        decodes = host.num_decodes
        if decodes:
            splits = triton_attention.paged_splits(decodes, host.longest_decode, spec, window)
            triton_attention.paged_decode(
                qkv[:decodes],
                cache,
                self.state.tables,
                device.decode_slots,
                device.decode_lengths,
                out[:decodes],
                spec,
                splits,
                window,
            )
        if self.flash is not None and prompts is not None:
            return self.flash.attend(qkv, cache, prompts, host, out, window)
        # whole prompts, seen whole: their K and V are at hand, in one piece
        if host.fresh and (window is None or max(row.count for row in rows) <= window):
            for row, start in zip(rows[decodes:], host.query_starts[decodes:], strict=False):
                part = qkv[start : start + row.count].view(1, row.count, heads + 2 * kv_heads, dim).transpose(1, 2)
                q, k, v = part.split((heads, kv_heads, kv_heads), 1)
                y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
                if row.count == out.shape[0]:
                    return y[0].transpose(0, 1).reshape(row.count, heads * dim)
                out[start : start + row.count].view(row.count, heads, dim).copy_(y[0].transpose(0, 1))
        elif not rows or len(rows) > decodes:
            triton_attention.paged_prefill(
                qkv,
                cache,
                self.state.tables,
                device.row_slots,
                device.query_starts,
                device.lengths,
                device.tile_rows,
                device.tile_starts,
                out,
                spec,
                window,
            )
        return out

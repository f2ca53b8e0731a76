"""Runs plans on a GPU. No step waits for the host: inputs are gathered on the device from the last sampled ids, tokens
come back on their own stream into pinned memory, and a decode step is one CUDA graph.

    launch: stage inputs -> replay graph (or run a prompt step) -> start the copy of the tokens
    wait:   the copy's event, nothing else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine_core.attention.base import AttentionSpec
from engine_core.cuda.forward import FusedModel
from engine_core.cuda.graphs import MAX_PROMPT_ROWS, DecodeGraphs, DecodeInputs, GraphCache, MixedGraphs
from engine_core.cuda.mixed import MixedHost, MixedInputs, MixedLayout, mixed_inputs
from engine_core.cuda.state import SlotState, Staging
from engine_core.kernels import triton_attention, triton_pointwise, triton_step
from engine_core.layers.embedding import DenseEmbedding
from engine_core.models.llama import LlamaForCausalLM
from engine_core.penalties import edits_logits
from engine_core.plan import ScheduledRow, StepPlan, StepTokens
from engine_core.prompt_logprobs import prompt_logprobs, wants_prompt_logprobs
from engine_core.request import Request
from engine_core.sampler import Sampler
from ipc.config import EngineConfig

FAILED = "the model's logits hold NaN or infinity"


@dataclass(slots=True)
class CudaStep:
    """A step on its way."""

    done: torch.cuda.Event
    tokens: torch.Tensor  # pinned int32
    count: int
    result: StepTokens  # what the host already knows: rows it sampled itself, prompt log-probabilities
    host_rows: dict[int, int]  # index of a row sampled on the host -> its token

    def wait(self) -> StepTokens:
        self.done.synchronize()
        ids = self.tokens[: self.count].tolist()
        for index, token in self.host_rows.items():
            ids[index] = token
        for index, token in enumerate(ids):
            if token < 0:
                ids[index] = 0
                self.result.failed[index] = FAILED
        self.result.token_ids.extend(ids)
        return self.result


def sampled_on_host(request: Request) -> bool:
    """Whether the request's sampling needs more than temperature: then its logits go to the host's sampler."""
    s = request.sampling
    truncates = not s.greedy and (s.top_p < 1.0 or s.top_k > 0 or s.min_p > 0.0)
    return truncates or s.logprobs is not None or edits_logits(s, 0)


class CudaRunner:
    """Runs one model on one GPU. `launch` never waits for a step on its way, unless a row samples on the host."""

    RING = 4  # results that may be on their way to the host at once; more than the engine ever has in flight
    attention_name = "triton"

    def __init__(
        self, model: LlamaForCausalLM, spec: AttentionSpec, config: EngineConfig, num_blocks: int, max_model_len: int
    ) -> None:
        device, seqs = spec.device, config.max_num_seqs
        self.model, self.spec = FusedModel(model), spec
        assert isinstance(model.embedding, DenseEmbedding)  # weights on a GPU are dense
        self.embedding = model.embedding.weight
        shape = (spec.num_layers, 2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.cache = torch.zeros(shape, dtype=spec.dtype, device=device)
        cos, sin = model.rope.angles(torch.arange(max_model_len, device=device), torch.float32)
        self.cos_sin = torch.cat((cos, sin), -1).flatten(1).contiguous()
        self.state = SlotState(seqs, -(-max_model_len // spec.block_size), device)
        self.staging = Staging(6 * config.max_num_batched_tokens + 8 * seqs + 8192, device)
        width = max(seqs, MAX_PROMPT_ROWS)
        self.ring = torch.zeros(self.RING, width, dtype=torch.int32, device=device)
        self.host_ring = [torch.zeros(width, dtype=torch.int32).pin_memory() for _ in range(self.RING)]
        self.copies = torch.cuda.Stream()
        self.sampler = Sampler(model.config.vocab_size, seqs, device)
        graphs = GraphCache(enabled=config.cuda_graphs)
        self.decode_graphs = DecodeGraphs(graphs, self._decode_step, seqs, self.state.pad, device)
        tile = triton_attention.query_tile(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.layout = MixedLayout(tile, self.state.pad, device)
        self.mixed_graphs = MixedGraphs(graphs, self._mixed_step, self.layout)
        self._turn = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> CudaStep:
        self._turn = turn = (self._turn + 1) % self.RING
        sampling = [row for row in plan.rows if row.samples]
        result = StepTokens([])
        if plan.num_decodes == len(plan.rows):  # not for a chunk of one token: its id is not the last sampled one
            logits = self._launch_decode(plan.rows, turn)
        else:
            logits = self._launch_mixed(plan, sampling, turn, result)
        host = self._sample_on_host(sampling, logits, result)
        return CudaStep(self._fetch(turn, len(sampling)), self.host_ring[turn], len(sampling), result, host)

    def release(self, request: Request) -> None:
        self.sampler.release(request)
        self.state.forget(request)

    # --- a step of decode rows alone: one graph -------------------------------------------------------------------

    def _launch_decode(self, rows: Sequence[ScheduledRow], turn: int) -> torch.Tensor:
        block_size = self.spec.block_size
        new_blocks = [self.state.new_block(row, block_size) for row in rows]
        lengths = [row.stop for row in rows]
        values = self.decode_graphs.host_inputs([row.request.slot for row in rows], lengths, new_blocks, turn)
        self.staging.send([values], self.decode_graphs.inputs(len(rows)).buffer)
        random = any(not row.request.sampling.greedy for row in rows)
        return self.decode_graphs.replay(len(rows), max(lengths), random)

    def _decode_step(self, inputs: DecodeInputs, longest: int, random: bool) -> torch.Tensor:
        state, spec = self.state, self.spec
        x = triton_step.begin_step(
            inputs.slots,
            inputs.lengths,
            inputs.new_blocks,
            state.tables,
            state.last_tokens,
            self.embedding,
            spec.block_size,
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
                triton_attention.num_splits(rows, longest, spec.num_kv_heads, window),
                window,
            )

        logits = self.model.logits(self.model.forward(x, attend))
        self._draw(logits, inputs.slots, inputs.lengths, inputs.turn, random)
        return logits

    def _draw(
        self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, turn: torch.Tensor, random: bool
    ) -> None:
        state = self.state
        triton_step.draw(
            logits,
            slots,
            lengths,
            state.temperatures if random else None,
            state.seeds if random else None,
            state.last_tokens,
            self.ring,
            turn,
        )

    # --- a step with prompt tokens in it ----------------------------------------------------------------

    def _launch_mixed(
        self, plan: StepPlan, sampling: Sequence[ScheduledRow], turn: int, result: StepTokens
    ) -> torch.Tensor:
        spec, state = self.spec, self.state
        # decode rows first, so that each kind of attention has one run of tokens, and the longest of them first
        rows = sorted(plan.rows, key=lambda row: (row.count > 1, -row.stop))
        state.upload(rows, spec.block_size)
        random = any(not row.request.sampling.greedy for row in sampling)
        size = self.mixed_graphs.size_for(rows, plan.num_tokens)
        host = mixed_inputs(rows, sampling, spec, turn, tile_all=size is not None)
        if size is not None:
            padded = self.layout.padded(host.arrays, size, MAX_PROMPT_ROWS)
            self.staging.send([padded], self.mixed_graphs.inputs(size)[0])
            return self.mixed_graphs.replay(size, random)
        device = MixedInputs(*self.staging.send(list(host.arrays)))
        x = triton_step.embed(device.ids, device.token_slots, state.last_tokens, self.embedding)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            return self._attend_mixed(layer, qkv, rows, host, device)

        hidden = self.model.forward(x, attend)
        starts = dict(zip((row.request.request_id for row in rows), host.query_starts, strict=False))
        for row in rows:
            if wants_prompt_logprobs(row):
                start = starts[row.request.request_id]
                values = prompt_logprobs(row, hidden[start : start + row.count], self.model.logits, self.sampler)
                result.prompt_logprobs[row.request.request_id] = values
        if not sampling:
            return hidden[:0]
        logits = self.model.logits(hidden.index_select(0, device.logits_rows))
        self._draw(logits, device.logits_slots, device.logits_lengths, device.turn, random)
        return logits

    def _mixed_step(self, inputs: MixedInputs, random: bool) -> torch.Tensor:
        """A mixed step of fixed size: all its rows, decode rows too, go through the prefill kernel."""
        x = triton_step.embed(inputs.ids, inputs.token_slots, self.state.last_tokens, self.embedding)
        everything = MixedHost((), [], num_decodes=0, longest_decode=0, fresh=False)
        hidden = self.model.forward(x, lambda layer, qkv: self._attend_mixed(layer, qkv, (), everything, inputs))
        logits = self.model.logits(hidden.index_select(0, inputs.logits_rows))
        self._draw(logits, inputs.logits_slots, inputs.logits_lengths, inputs.turn, random)
        return logits

    def _attend_mixed(
        self, layer: int, qkv: torch.Tensor, rows: Sequence[ScheduledRow], host: MixedHost, device: MixedInputs
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
            splits = triton_attention.num_splits(decodes, host.longest_decode, kv_heads, window)
            triton_attention.paged_decode(
                qkv[:decodes],
                cache,
                self.state.tables,
                device.row_slots[:decodes],
                device.lengths[:decodes],
                out[:decodes],
                spec,
                splits,
                window,
            )
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

    # --- tokens to the host ---------------------------------------------------------------------------------------

    def _sample_on_host(
        self, sampling: Sequence[ScheduledRow], logits: torch.Tensor, result: StepTokens
    ) -> dict[int, int]:
        """The rows that need the host's sampler: waits for the logits, puts the tokens where the next step looks."""
        chosen = [index for index, row in enumerate(sampling) if sampled_on_host(row.request)]
        if not chosen:
            return {}
        requests = [sampling[index].request for index in chosen]
        positions = [
            sampling[index].stop - request.num_prompt_tokens for index, request in zip(chosen, requests, strict=True)
        ]
        step = self.sampler.sample(logits[chosen].cpu(), requests, positions)
        slots = torch.tensor([request.slot for request in requests], device=self.spec.device)
        self.state.last_tokens[slots] = torch.tensor(step.token_ids, dtype=torch.int32, device=self.spec.device)
        for local, value in step.logprobs.items():
            result.logprobs[chosen[local]] = value
        for local, reason in step.failed.items():
            result.failed[chosen[local]] = reason
        return dict(zip(chosen, step.token_ids, strict=True))

    def _fetch(self, turn: int, count: int) -> torch.cuda.Event:
        """Start the copy of the step's tokens, beside whatever the compute stream does next."""
        done = torch.cuda.Event()
        if count:
            self.copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.copies):
                self.host_ring[turn][:count].copy_(self.ring[turn, :count], non_blocking=True)
                done.record()
        else:
            done.record()
        return done

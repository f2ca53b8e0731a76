"""One forward pass of a decoder on the CPU as one program of kernels: the embedding, then nine a layer with integer
weights:

    norm      RMSNorm of the residual stream; round to int8
    product   Q, K and V
    enter     biases, QK-norm, RoPE; K and V go to the pool
    attend
    round
    product   of what attention gave, added to the residual stream
    norm      as above
    product   gate and up, SiLU * up; round
    product   down, added to the residual stream

Float weights need no rounding, but their products are stored before SiLU or the sum. The last layer attends for the
rows that are sampled alone, unless the hidden states of all are wanted. Then come the last norm, the logits, and the
likeliest token of each row, while the team's threads are awake. Results are those of `LlamaForCausalLM`, bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_core.attention.cpu import CpuAttention
from engine_core.batch import ForwardBatch
from engine_core.cpu.stages import (
    ATTEND_STEP,
    EMBED_IDS,
    ENTER_STEP,
    GATHER_INDEX,
    NORM_INDEX,
    PRODUCT_OUT,
    Stages,
)
from engine_core.kernels.cpu_elementwise import Largest
from engine_core.kernels.cpu_linear import PackedLinear
from engine_core.kernels.cpu_program import ROWS, Program
from engine_core.layers.embedding import QuantizedEmbedding
from engine_core.layers.linear import Linear
from engine_core.layers.norm import RMSNorm
from engine_core.models.llama import LlamaForCausalLM, LlamaMLP


class CpuModel:
    """Runs `model` on the pool of `attention`, which nobody else uses. What `forward` returns is valid until its next
    call.

    The program is made again when a step is larger than all before it; others set what is new in its arguments, which
    is nothing if the batch is the same object as the last step's (see `engine_core.batch.Batches`).
    """

    def __init__(self, model: LlamaForCausalLM, attention: CpuAttention, most_tokens: int) -> None:
        """`most_tokens`: of any step."""
        self._model, self._attention, self._most_tokens = model, attention, most_tokens
        self._capacity = self._chosen = 0
        self._rows = (0, 0, 0, 0)  # tokens, those chosen, rows and threads of the last step
        self._step: tuple[ForwardBatch, bool, bool, int] | None = None  # what the arguments are set for; threads
        self._logits = torch.empty(0)
        self._cos = self._sin = torch.empty(0)

    @staticmethod
    def supports(model: LlamaForCausalLM) -> bool:
        """Whether there are kernels for all of `model`: packed weights, no experts."""
        linears: list[Linear] = [model.lm_head]
        for layer in model.layers:
            if not isinstance(layer.mlp, LlamaMLP):
                return False
            linears += [layer.attention.qkv_proj, layer.attention.o_proj]
            linears += [layer.mlp.gate_up_proj, layer.mlp.down_proj]
        return model.dtype == torch.float32 and all(isinstance(linear, PackedLinear) for linear in linears)

    def forward(
        self, batch: ForwardBatch, whole: bool, wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, Largest]:
        """Hidden states [tokens, hidden] before the last norm, or without `whole` perhaps of sampling rows alone;
        logits [sampling rows, vocabulary] if they are `wanted`, and the largest of each row; writes K and V of all
        tokens."""
        threads, step = torch.get_num_threads(), self._step
        if step is None or step[0] is not batch or step[1:] != (whole, wanted, threads):
            self._step = None
            self._set(batch, whole, wanted, threads)
            self._step = batch, whole, wanted, threads
        if not self._embeds:
            self._embed(batch)
        self._program.run()
        return self._given

    @torch.inference_mode()
    def _embed(self, batch: ForwardBatch) -> None:
        self._total[: batch.num_tokens] = self._model.embedding(batch.token_ids)

    def _set(self, batch: ForwardBatch, whole: bool, wanted: bool, threads: int) -> None:
        """The program's arguments, and what it gives."""
        tokens, rows = batch.num_tokens, len(batch.logits_rows)
        whole = whole or tokens == rows
        left = tokens if whole else rows
        self._make_room(tokens, rows, batch.block_tables.shape[1] * self._attention.spec.block_size)
        self._attention.prepare(batch)
        args = self._program.args
        if self._embeds:
            args[0, EMBED_IDS] = batch.token_ids.data_ptr()
        if self._rows != (tokens, left, rows, threads):
            self._rows = (0, 0, 0, 0)  # none of them, should this fail half-way
            args[:, ROWS] = tokens
            args[self._chosen :, ROWS] = left
            args[self._head :, ROWS] = rows
            self._program.share()
            self._rows = tokens, left, rows, threads
        sampled = batch.logits_rows.data_ptr()
        args[self._chosen, GATHER_INDEX], args[self._head, NORM_INDEX] = (0, sampled) if whole else (sampled, 0)
        where = (batch.positions.data_ptr(), batch.slot_mapping.data_ptr())
        args[self._enters, ENTER_STEP] = (tokens, *where, self._cos.data_ptr(), self._sin.data_ptr())
        args[self._attends, ATTEND_STEP] = attend = self._attention.step_args(batch)
        args[self._chosen + 1, ATTEND_STEP] = attend if whole else self._attention.chosen_args(batch)
        if self._tells:  # three bytes in a hundred of a step's would be written logits
            args[self._head + 1, PRODUCT_OUT] = self._logits.data_ptr() if wanted else 0
        logits = self._logits[:rows, : self._model.config.vocab_size] if wanted else None
        self._given = self._hidden[:left], logits, Largest(self._best.indices[:rows], self._best.values[:rows])

    def _make_room(self, tokens: int, rows: int, length: int) -> None:
        """For a step of `tokens`, of which `rows` are sampled, at positions below `length`."""
        if tokens > self._capacity:
            self._make_program(max(tokens, min(2 * self._capacity, self._most_tokens)), max(rows, len(self._logits)))
        elif rows > len(self._logits):
            self._make_program(self._capacity, rows)
        if length > len(self._cos):
            cos, sin = self._model.rope.angles(torch.arange(2 * length), torch.float32)
            self._cos, self._sin = cos[:, 0], sin[:, 0]

    def _make_program(self, capacity: int, logits_rows: int) -> None:
        model, head = self._model, _packed(self._model.lm_head)
        layers = [_linears(layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp) for layer in model.layers]
        stages = Stages(model.config, [linear for linears in layers for linear in linears], capacity)
        launches, enters, attends = stages.launches, list[int](), list[int]()
        chosen, total, embedding = 0, stages.total, model.embedding
        embeds = isinstance(embedding, QuantizedEmbedding) and stages.embed(embedding.weight)
        for index, (layer, (qkv, output, gate_up, down)) in enumerate(zip(model.layers, layers, strict=True)):
            stages.norm(layer.input_norm, qkv)
            stages.product(qkv)
            enters.append(len(launches))
            stages.enter(index, self._attention, _qk_norms(layer.attention))
            if layer is model.layers[-1]:
                chosen, total = len(launches), stages.total
                stages.choose()
            else:
                attends.append(len(launches))
            stages.attend(index, self._attention, output)
            stages.norm(layer.post_attention_norm, gate_up)
            stages.mlp(gate_up, down)
        first_of_head = len(launches)
        stages.norm(model.norm, head)
        logits = torch.empty(logits_rows, head.width)
        best = Largest(np.empty(logits_rows, np.int64), np.empty(logits_rows, np.float32))
        stages.head(head, logits, model.config.vocab_size, best)
        program = Program(launches)
        # Only now: had memory run out before, the last program would still be whole, and its buffers there.
        self._embeds, self._tells, self._total, self._rows = embeds, head.rounds, total, (0, 0, 0, 0)
        self._chosen, self._head, self._enters, self._attends = chosen, first_of_head, _every(enters), _every(attends)
        self._stages, self._program = stages, program
        self._capacity, self._hidden, self._logits, self._best = capacity, stages.total, logits, best


def _every(numbers: list[int]) -> slice:
    """The same as a slice: launches of one kind are as far apart in all layers."""
    if len(numbers) < 2:
        return slice(numbers[0], numbers[0] + 1) if numbers else slice(0)
    return slice(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0])


def _qk_norms(attention: object) -> tuple[RMSNorm, RMSNorm] | None:
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return (q_norm, k_norm) if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm) else None


def _linears(qkv: Linear, output: Linear, mlp: object) -> list[PackedLinear]:
    assert isinstance(mlp, LlamaMLP)
    return [_packed(linear) for linear in (qkv, output, mlp.gate_up_proj, mlp.down_proj)]


def _packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear, PackedLinear)  # `supports` says so
    return linear

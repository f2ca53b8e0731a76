"""Attention with torch's scaled_dot_product_attention: runs everywhere, and is what the kernels are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine_core.attention.base import AttentionSpec
from engine_core.batch import ForwardBatch
from engine_core.kernels import cpu_memory


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one query token and contexts of similar length, attended together."""

    tokens: torch.Tensor  # int64 [rows]: their indices in the batch
    blocks: torch.Tensor  # int64 [rows * width]
    mask: torch.Tensor  # bool [rows, 1, 1, width * block_size]


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """One row with several query tokens."""

    start: int
    stop: int
    context: int
    blocks: torch.Tensor | None  # int64; None if the row holds its whole context
    mask: torch.Tensor | None  # bool [query, context]; None if causal says it all


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers with the same window share."""

    decode: list[_DecodeGroup]
    prefill: list[_PrefillRow]


class TorchAttention:
    """KV pool [layers, 2, blocks, block_size, kv_heads, head_dim]."""

    name = "torch"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.cache = torch.empty(0)
        self._steps: dict[int | None, _Step] = {}  # by window

    def allocate(self, num_blocks: int) -> None:
        s = self.spec
        shape = (s.num_layers, 2, num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
        self.cache = zeros(shape, s.dtype, s.device)

    def prepare(self, batch: ForwardBatch) -> None:
        self._steps = {window: self._step(batch, window) for window in set(self.spec.windows or [None])}

    def _step(self, batch: ForwardBatch, window: int | None) -> _Step:
        groups: dict[int, list[int]] = {}
        prefill = []
        for row in range(batch.num_rows):
            if batch.query_lens[row] == 1:
                width = -(-int(batch.context_lens[row]) // self.spec.block_size)
                groups.setdefault(width.bit_length(), []).append(row)
            else:
                prefill.append(self._prefill_row(batch, row, window))
        return _Step([self._decode_group(batch, np.array(rows), window) for rows in groups.values()], prefill)

    def _decode_group(
        self, batch: ForwardBatch, rows: np.ndarray[tuple[int], np.dtype[np.int64]], window: int | None
    ) -> _DecodeGroup:
        contexts = torch.from_numpy(batch.context_lens[rows]).to(self.spec.device)[:, None]
        width = -(-int(batch.context_lens[rows].max()) // self.spec.block_size)
        keys = torch.arange(width * self.spec.block_size, device=self.spec.device)
        mask = keys < contexts
        if window is not None:
            mask &= keys >= contexts - window
        return _DecodeGroup(
            tokens=torch.from_numpy(batch.query_starts[rows].astype(np.int64)).to(self.spec.device),
            blocks=batch.block_tables[torch.from_numpy(rows), :width].long().flatten(),
            mask=mask[:, None, None, :],
        )

    def _prefill_row(self, batch: ForwardBatch, row: int, window: int | None) -> _PrefillRow:
        start, stop = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
        context = int(batch.context_lens[row])
        whole = stop - start == context
        if whole and (window is None or window >= context):
            return _PrefillRow(start, stop, context, None, None)
        width = -(-context // self.spec.block_size)
        keys = torch.arange(context, device=self.spec.device)
        positions = batch.positions[start:stop, None]
        mask = keys <= positions
        if window is not None:
            mask &= keys > positions - window
        return _PrefillRow(start, stop, context, None if whole else batch.block_tables[row, :width].long(), mask)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        keys, values = self.cache[layer]
        keys.flatten(0, 1).index_copy_(0, batch.slot_mapping, k)
        values.flatten(0, 1).index_copy_(0, batch.slot_mapping, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        step = self._steps[self.spec.window(layer)]
        for group in step.decode:
            out[group.tokens] = self._attend_decode(group, q, keys, values)
        for row in step.prefill:
            out[row.start : row.stop] = self._attend_prefill(row, q, k, v, keys, values)
        return out.flatten(1)

    def _attend_decode(
        self, group: _DecodeGroup, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        rows = len(group.tokens)
        k = keys.index_select(0, group.blocks).view(rows, -1, *keys.shape[2:])
        v = values.index_select(0, group.blocks).view(rows, -1, *values.shape[2:])
        # A mask does not stop the NaN that a failed request left behind in a block.
        beyond = ~group.mask.view(rows, -1, 1, 1)
        k, v = (x.masked_fill_(beyond, 0.0).transpose(1, 2) for x in (k, v))
        query = q[group.tokens].unsqueeze(2)
        out = scaled_dot_product_attention(query, k, v, group.mask, scale=self.spec.scale, enable_gqa=True)
        return out.squeeze(2)

    def _attend_prefill(
        self,
        row: _PrefillRow,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        if row.blocks is None:
            k, v = k[row.start : row.stop], v[row.start : row.stop]
        else:
            k = keys.index_select(0, row.blocks).flatten(0, 1)[: row.context]
            v = values.index_select(0, row.blocks).flatten(0, 1)[: row.context]
        query, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q[row.start : row.stop], k, v))
        causal = row.mask is None
        out = scaled_dot_product_attention(
            query, k, v, row.mask, is_causal=causal, scale=self.spec.scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed KV pool. On the CPU its pages are taken when they are first written: torch.zeros would touch
    gigabytes at start-up."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return cpu_memory.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

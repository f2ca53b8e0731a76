"""What the models ask of an attention implementation: write K and V into their slots, attend through block tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from engine_core.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of a model's attention, and of its KV pool."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per KV block
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = ()  # per layer, as in `ModelConfig`; empty if no layer has one
    kv_dtype: torch.dtype | None = None  # of the KV pool; None: that of Q, K and V

    def window(self, layer: int) -> int | None:
        """How many tokens each token of `layer` attends to, itself included; None: all before it."""
        return self.windows[layer] if self.windows else None

    @property
    def pool_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def head_bytes(self) -> int:
        """Of K or V of a token and KV head in the pool. As int8 they have a float32 scale for 32 numbers."""
        return self.head_dim * self.pool_dtype.itemsize + (self.head_dim // 8 if self.pool_dtype == torch.int8 else 0)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_bytes

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


class Attention(Protocol):
    """Owns the KV pool. A step is `prepare` once, then one call per layer, in order."""

    name: str

    def allocate(self, num_blocks: int) -> None:
        """Make the KV pool, for `num_blocks` blocks."""
        ...

    def prepare(self, batch: ForwardBatch) -> None:
        """What all layers of this step share (masks, index tensors)."""
        ...

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write K and V at `batch.slot_mapping`, then attend causally over each row's context, or the layer's window of
        it. What lies behind a row's context in its last block, be it NaN, has no influence.

        q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], already rotated; they may be strided views
        of one tensor. Returns [tokens, heads * head_dim].
        """
        ...

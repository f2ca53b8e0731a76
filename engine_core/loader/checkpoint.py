"""A source of weights by name, and the builder that turns them into layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine_core.layers.embedding import DenseEmbedding, Embedding, QuantizedEmbedding
from engine_core.layers.linear import Linear, WeightsMode, make_linear
from engine_core.layers.moe import Experts
from engine_core.layers.norm import RMSNorm
from engine_core.loader.upload import Uploader
from engine_core.loader.weights import QuantizedWeight, Weight
from engine_core.models.config import ModelConfig, MoEConfig
from engine_core.plan import ProgressCallback


class Checkpoint(Protocol):
    """Weights under their Hugging Face names."""

    config: ModelConfig
    # Whether any weight is stored in quantized blocks.
    quantized: bool

    def take(self, name: str, shape: tuple[int, ...]) -> Weight:
        """The weight `name`. May be a view of the file.

        Raises:
            UserError: it is missing, has another shape, or cannot be read.
        """
        ...

    def optional(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        """Like `take`, but None if the checkpoint has no such weight."""
        ...

    def unused(self) -> list[str]:
        """Weights that nothing took: the file holds more than this model computes."""
        ...


class ModelBuilder:
    """Makes layers from a checkpoint's weights: their names and shapes go in, layers come out.

    How weights are held (`mode`, `dtype`, `device`) is decided here once, for all models.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        mode: WeightsMode,
        dtype: torch.dtype,
        device: torch.device,
        progress: ProgressCallback | None = None,
        uploader: Uploader | None = None,
    ) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.mode, self.dtype, self.device = mode, dtype, device
        self._progress, self._uploader = progress, uploader

    def linear(self, names: Sequence[str], in_features: int, out_features: Sequence[int], bias: bool = False) -> Linear:
        """The matrices `names`, fused: their outputs stand one after the other."""
        sizes = list(zip(names, out_features, strict=True))
        parts = self._place([self.checkpoint.take(f"{name}.weight", (out, in_features)) for name, out in sizes])
        biases = [self._vector(f"{name}.bias", out) for name, out in sizes] if bias else []
        return make_linear(parts, biases, mode=self.mode, dtype=self.dtype, device=self.device)

    def router(self, name: str, num_experts: int) -> Linear:
        """The matrix that chooses experts. Never quantized: it is small, and a wrong choice is a large error."""
        weight = self.checkpoint.take(f"{name}.weight", (num_experts, self.config.hidden_size))
        return make_linear([weight], dtype=self.dtype, device=self.device)

    def experts(self, prefix: str, moe: MoEConfig) -> Experts:
        """The gated MLPs `prefix`.0, `prefix`.1 and so on; on a GPU in one piece."""
        hidden, size = self.config.hidden_size, moe.intermediate_size
        gate_up: list[Linear] = []
        down: list[Linear] = []
        for name in (f"{prefix}.{index}" for index in range(moe.num_experts)):
            gate_up.append(self.linear([f"{name}.gate_proj", f"{name}.up_proj"], hidden, (size, size)))
            down.append(self.linear([f"{name}.down_proj"], size, (hidden,)))
        return Experts(gate_up, down) if self.device.type == "cpu" else Experts.stack(gate_up, down)

    def norm(self, name: str, size: int) -> RMSNorm:
        weight = self._vector(f"{name}.weight", size).to(self.device, self.dtype)
        return RMSNorm(weight, self.config.rms_norm_eps)

    def embedding_and_head(self, embedding: str, head: str) -> tuple[Embedding, Linear]:
        """The token embedding and the matrix that makes logits: one and the same if the model ties them."""
        c = self.config
        table = self.checkpoint.take(f"{embedding}.weight", (c.vocab_size, c.hidden_size))
        (table,) = self._place([table])  # one copy, shared by both if they are tied
        embed: Embedding
        if isinstance(table, QuantizedWeight):
            embed = QuantizedEmbedding(table, self.dtype)
        else:
            embed = DenseEmbedding(table, self.dtype)
        if c.tie_embeddings:
            return embed, make_linear([table], mode=self.mode, dtype=self.dtype, device=self.device)
        return embed, self.linear([head], c.hidden_size, [c.vocab_size])

    def layer_done(self, index: int) -> None:
        """Tell the progress callback that layer `index` is loaded."""
        if self._progress is not None:
            self._progress("loading weights", (index + 1) / self.config.num_layers)

    def _place(self, parts: Sequence[Weight]) -> Sequence[Weight]:
        """The parts as they are, or on a GPU as one dense tensor."""
        return parts if self._uploader is None else [self._uploader.dense(parts, self.dtype)]

    def _vector(self, name: str, size: int) -> torch.Tensor:
        value = self.checkpoint.take(name, (size,))
        assert isinstance(value, torch.Tensor)  # only matrices are quantized
        return value

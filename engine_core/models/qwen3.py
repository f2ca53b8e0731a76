"""Qwen3, dense: Llama with an RMSNorm on each head of Q and K before the rotation."""

from __future__ import annotations

import torch

from engine_core.loader.checkpoint import ModelBuilder
from engine_core.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


class Qwen3Attention(LlamaAttention):
    def __init__(self, build: ModelBuilder, layer: int, prefix: str) -> None:
        super().__init__(build, layer, prefix)
        self.q_norm = build.norm(f"{prefix}.q_norm", self.head_dim)
        self.k_norm = build.norm(f"{prefix}.k_norm", self.head_dim)

    def normalize(self, qk: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q_norm(qk[:, : self.heads]), self.k_norm(qk[:, self.heads :])), dim=1)


class Qwen3Layer(LlamaLayer):
    attention_class = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3Layer

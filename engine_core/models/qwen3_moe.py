"""Qwen3 with a mixture of experts in place of the MLP, in all layers or in those that its config names."""

from __future__ import annotations

from engine_core.layers.moe import SparseMoE
from engine_core.loader.checkpoint import ModelBuilder
from engine_core.models.llama import LlamaMLP
from engine_core.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer


class Qwen3MoeLayer(Qwen3Layer):
    def make_mlp(self, build: ModelBuilder, layer: int, prefix: str) -> LlamaMLP | SparseMoE:
        moe = build.config.moe
        if moe is None or layer not in moe.layers:
            return super().make_mlp(build, layer, prefix)
        router = build.router(f"{prefix}.gate", moe.num_experts)
        return SparseMoE(router, build.experts(f"{prefix}.experts", moe), moe.experts_per_token, moe.normalize)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    layer_class = Qwen3MoeLayer

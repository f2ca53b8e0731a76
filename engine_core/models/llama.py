"""Llama and what shares its layout: Mistral, SmolLM. Sliding windows are the attention's affair."""

from __future__ import annotations

import torch

from engine_core.attention.base import Attention
from engine_core.batch import ForwardBatch
from engine_core.layers.activation import silu_and_mul
from engine_core.layers.moe import SparseMoE
from engine_core.layers.rope import RotaryEmbedding, rotate
from engine_core.loader.checkpoint import ModelBuilder


class LlamaAttention:
    """Grouped-query attention with one fused QKV product."""

    def __init__(self, build: ModelBuilder, layer: int, prefix: str) -> None:
        c = build.config
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, c.num_heads, c.num_kv_heads, c.head_dim
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        self.qkv_proj = build.linear(names, c.hidden_size, (q_size, kv_size, kv_size), bias=c.qkv_bias)
        self.o_proj = build.linear([f"{prefix}.o_proj"], q_size, (c.hidden_size,), bias=c.output_bias)

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention, batch: ForwardBatch
    ) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        turned = rotate(self.normalize(qkv[:, : self.heads + self.kv_heads]), cos, sin)
        q, k = turned[:, : self.heads], turned[:, self.heads :]
        v = qkv[:, self.heads + self.kv_heads :]
        return self.o_proj(attention(self.layer, q, k, v, batch))

    def normalize(self, qk: torch.Tensor) -> torch.Tensor:
        """What happens to Q and K [tokens, heads + kv_heads, head_dim] before they are rotated: nothing in Llama."""
        return qk


class LlamaMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, build: ModelBuilder, prefix: str) -> None:
        c = build.config
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up_proj = build.linear(names, c.hidden_size, (c.intermediate_size,) * 2, bias=c.mlp_bias)
        self.down_proj = build.linear([f"{prefix}.down_proj"], c.intermediate_size, (c.hidden_size,), bias=c.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


class LlamaLayer:
    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(self, build: ModelBuilder, layer: int) -> None:
        prefix, hidden = f"model.layers.{layer}", build.config.hidden_size
        self.input_norm = build.norm(f"{prefix}.input_layernorm", hidden)
        self.attention = self.attention_class(build, layer, f"{prefix}.self_attn")
        self.post_attention_norm = build.norm(f"{prefix}.post_attention_layernorm", hidden)
        self.mlp = self.make_mlp(build, layer, f"{prefix}.mlp")

    def make_mlp(self, build: ModelBuilder, layer: int, prefix: str) -> LlamaMLP | SparseMoE:
        return LlamaMLP(build, prefix)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's own output and the residual it must be added to, which the next norm does."""
        x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, cos, sin, attention, batch)
        x, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(x), residual


class LlamaForCausalLM:
    layer_class: type[LlamaLayer] = LlamaLayer

    def __init__(self, build: ModelBuilder) -> None:
        c = build.config
        self.config, self.dtype = c, build.dtype
        self.embedding, self.lm_head = build.embedding_and_head("model.embed_tokens", "lm_head")
        factors = build.checkpoint.optional("rope_freqs.weight", (c.head_dim // 2,))
        assert factors is None or isinstance(factors, torch.Tensor)  # only matrices are quantized
        self.rope = RotaryEmbedding(c.rope, c.head_dim, build.device, factors)
        self.layers = []
        for layer in range(c.num_layers):
            self.layers.append(self.layer_class(build, layer))
            build.layer_done(layer)
        self.norm = build.norm("model.norm", c.hidden_size)

    def forward(self, batch: ForwardBatch, attention: Attention) -> torch.Tensor:
        """Hidden states [tokens, hidden] after the last layer, before the last norm; writes K and V of all tokens."""
        attention.prepare(batch)
        cos, sin = self.rope.angles(batch.positions, self.dtype)
        x = self.embedding(batch.token_ids)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, attention, batch)
        return x + residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] for rows of what `forward` returned."""
        return self.lm_head(self.norm(hidden)).float()

"""Qwen2 and Qwen2.5: Llama with biases on Q, K and V, which its config always switches on."""

from __future__ import annotations

from engine_core.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass

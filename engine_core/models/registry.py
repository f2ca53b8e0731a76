"""Which class implements which architecture."""

from __future__ import annotations

from engine_core.models.config import check_architecture
from engine_core.models.llama import LlamaForCausalLM
from engine_core.models.qwen2 import Qwen2ForCausalLM
from engine_core.models.qwen3 import Qwen3ForCausalLM
from engine_core.models.qwen3_moe import Qwen3MoeForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """Raises `UserError` that lists the known architectures."""
    check_architecture(architecture)
    return MODELS[architecture]

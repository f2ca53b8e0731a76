"""GGUF files: tensors under their Hugging Face names and in Hugging Face row order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as GGML

from engine_core.errors import UserError
from engine_core.loader.gguf_config import config_of
from engine_core.loader.gguf_file import GGUFFile, TensorInfo
from engine_core.loader.weights import QuantizedWeight, Weight

DENSE = {GGML.F32: torch.float32, GGML.F16: torch.float16, GGML.BF16: torch.bfloat16}
QUANTIZED = (
    *(GGML.Q4_0, GGML.Q4_1, GGML.Q5_0, GGML.Q5_1, GGML.Q8_0),
    *(GGML.Q2_K, GGML.Q3_K, GGML.Q4_K, GGML.Q5_K, GGML.Q6_K),
)
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT_WEIGHT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
LAYER_WEIGHT = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GGUFCheckpoint:
    """Weights of a GGUF file. Matrices keep the file's blocks until a layer decides how to hold them."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.config = config_of(self.file)
        self.quantized = any(info.ggml_type not in DENSE for info in self.file.tensors.values())
        self._taken: set[str] = set()
        # Files of the llama family hold Q and K with the halves of each head interleaved.
        self._interleaved = self.config.architecture == "LlamaForCausalLM"

    def take(self, name: str, shape: tuple[int, ...]) -> Weight:
        info = self.file.tensors.get(gguf_name(name))
        if info is None:
            raise UserError(f"{self.file.path}: tensor {gguf_name(name)} is missing")
        expert = EXPERT_WEIGHT.fullmatch(name)
        if expert is not None and self.config.moe is not None:
            shape = (self.config.moe.num_experts, *shape)
        if info.shape != shape:
            raise UserError(
                f"{self.file.path}: tensor {info.name} has shape {list(info.shape)}, but the metadata asks for "
                f"{list(shape)}"
            )
        self._taken.add(info.name)
        weight = self._read(info, None if expert is None else int(expert[2]))
        if self._interleaved and ".self_attn.q_proj." in name:
            return _deinterleave(weight, self.config.num_heads)
        if self._interleaved and ".self_attn.k_proj." in name:
            return _deinterleave(weight, self.config.num_kv_heads)
        return weight

    def optional(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        return self.take(name, shape) if gguf_name(name) in self.file.tensors else None

    def unused(self) -> list[str]:
        return sorted(set(self.file.tensors) - self._taken)

    def _read(self, info: TensorInfo, index: int | None) -> Weight:
        """A tensor, or entry `index` of a stack of matrices."""
        data, shape = self.file.bytes_of(info), info.shape
        if index is not None:
            data, shape = data.reshape(shape[0], -1)[index], shape[1:]
        if info.ggml_type in DENSE:
            # A copy: torch has no read-only tensors, and the file's alignment need not suit it.
            values = torch.frombuffer(bytearray(data), dtype=DENSE[info.ggml_type])
            return values.view(shape)
        if info.ggml_type not in QUANTIZED or len(shape) != 2:
            kinds = ", ".join(kind.name for kind in (*DENSE, *QUANTIZED))
            raise UserError(
                f"{self.file.path}: tensor {info.name} is of type {info.ggml_type.name}, which is not supported; "
                f"supported are {kinds}"
            )
        rows, columns = shape
        return QuantizedWeight(info.ggml_type, (rows, columns), np.asarray(data).reshape(rows, -1))


def gguf_name(name: str) -> str:
    """The GGUF name of a weight known by its Hugging Face name; of an expert's, the stack that holds it."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    expert = EXPERT_WEIGHT.fullmatch(name)
    if expert is not None:
        return f"blk.{expert[1]}.ffn_{expert[3]}_exps.weight"
    match = LAYER_WEIGHT.fullmatch(name)
    return f"blk.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}" if match else name


def _deinterleave(weight: Weight, heads: int) -> Weight:
    """Rows (or a bias) from pairs (0, d/2), (1, d/2 + 1), ... of each head to first half, second half."""
    order = np.arange(weight.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    if isinstance(weight, torch.Tensor):
        return weight[torch.from_numpy(order)]
    return weight.take_rows(order)

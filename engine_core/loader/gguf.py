"""GGUF files: metadata to a `ModelConfig`, tensors under their Hugging Face names and in Hugging Face row order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as GGML

from engine_core.errors import UserError
from engine_core.loader.gguf_file import GGUFFile, TensorInfo
from engine_core.loader.weights import QuantizedWeight, Weight
from engine_core.models.config import (
    ModelConfig,
    MoEConfig,
    RopeConfig,
    check_num_layers,
    layer_windows,
    yarn_attention_factor,
)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
FIRST_LAYERS_FULL = ("qwen2", "qwen3")  # their windows are of some layers only
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


def config_of(file: GGUFFile) -> ModelConfig:
    """Raises `UserError` for what is missing or not supported."""
    get = _Metadata(file)
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{file.path}: GGUF architecture {name!r} is not supported; the known ones are: {known}")
    _refuse_unsupported(file, get)
    heads, hidden = get.integer("attention.head_count"), get.integer("embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path}: tensor token_embd.weight is missing")
    num_layers, max_position = check_num_layers(get.integer("block_count")), get.integer("context_length")
    eos = (file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return ModelConfig(
        architecture=ARCHITECTURES[name],
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=get.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=get.integer("attention.head_count_kv", heads),
        head_dim=get.integer("attention.key_length", hidden // max(heads, 1)),
        max_position=max_position,
        rope=_rope(get),
        rms_norm_eps=get.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        dtype="float32" if embedding.ggml_type == GGML.F32 else "float16",
        eos_token_ids=frozenset(int(token) for token in eos if isinstance(token, int)),
        windows=_windows(get, num_layers, max_position),
        moe=_moe(get, num_layers) if name == "qwen3moe" else None,
    )


class _Metadata:
    """Typed access to the metadata under the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.prefix = file, file.metadata.get("general.architecture")

    def optional(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.file.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._number(key, default, (int,)))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, default, (int, float)))

    def _number(self, key: str, default: float | None, kinds: tuple[type[int] | type[float], ...]) -> int | float:
        value: object = self.optional(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UserError(f"{self.file.path}: metadata {self.prefix}.{key} must be a number, got {value!r}")
        return value


def _refuse_unsupported(file: GGUFFile, get: _Metadata) -> None:
    if file.metadata.get("split.count") not in (None, 0, 1):
        raise UserError(f"{file.path} is one of {file.metadata['split.count']} parts; join them with llama-gguf-split")
    if get.optional("expert_count") and get.prefix != "qwen3moe":
        raise UserError(f"{file.path}: {get.prefix}.expert_count {get.optional('expert_count')} is not supported")
    heads = max(get.integer("attention.head_count"), 1)  # ModelConfig says what is wrong with 0
    head_dim = get.integer("attention.key_length", get.integer("embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get.integer(key, head_dim) != head_dim:
            raise UserError(
                f"{file.path}: {get.prefix}.{key} {get.optional(key)} differs from the head size {head_dim}"
            )


def _moe(get: _Metadata, num_layers: int) -> MoEConfig:
    return MoEConfig(
        num_experts=get.integer("expert_count"),
        experts_per_token=get.integer("expert_used_count"),
        intermediate_size=get.integer("expert_feed_forward_length"),
        normalize=True,  # llama.cpp takes it for granted
        layers=frozenset(range(num_layers)),
    )


def _windows(get: _Metadata, num_layers: int, max_position: int) -> tuple[int | None, ...]:
    """`ModelConfig.windows`: of all layers, unless a pattern says of which."""
    window = get.integer("attention.sliding_window", 0)
    if window == 0:
        return ()
    slides = [True] * num_layers
    if get.has("attention.sliding_window_pattern"):
        pattern = get.optional("attention.sliding_window_pattern")
        if not isinstance(pattern, list) or len(pattern) != num_layers:
            raise UserError(
                f"{get.file.path}: {get.prefix}.attention.sliding_window_pattern must say of each of the {num_layers} "
                f"layers whether it has a window, got {pattern!r}"
            )
        slides = [bool(each) for each in pattern]
    elif get.prefix in FIRST_LAYERS_FULL:
        raise UserError(
            f"{get.file.path}: {get.prefix}.attention.sliding_window {window} is not supported without "
            f"{get.prefix}.attention.sliding_window_pattern, which says of which layers it is"
        )
    return layer_windows(window, slides, max_position)


def _rope(get: _Metadata) -> RopeConfig:
    theta = get.number("rope.freq_base", 10000.0)
    kind = get.optional("rope.scaling.type") or ("linear" if get.optional("rope.scale_linear") else "none")
    factor = get.number("rope.scaling.factor", get.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind != "yarn":
        raise UserError(f"{get.file.path}: RoPE scaling type {kind!r} is not supported, only none, linear, yarn")
    if get.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise UserError(f"{get.file.path}: {get.prefix}.rope.scaling.yarn_ext_factor is not supported, only 1.0")
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position=get.integer("rope.scaling.original_context_length", get.integer("context_length")),
        beta_fast=get.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=get.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_attention_factor({}, factor) * get.number("rope.scaling.attn_factor", 1.0),
    )

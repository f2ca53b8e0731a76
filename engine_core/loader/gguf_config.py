"""The metadata of a GGUF file to a `ModelConfig`. Needs no torch."""

from __future__ import annotations

from typing import Any

from gguf.constants import GGMLQuantizationType as GGML

from engine_core.errors import UserError
from engine_core.loader.gguf_file import GGUFFile
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

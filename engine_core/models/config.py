"""What a model is, read from config.json or GGUF metadata into one checked struct.

Only what the models here implement is accepted. Everything else that would change the result is an error naming it:
a wrong answer is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from engine_core.errors import UserError

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)
DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 10_000
ALWAYS_SLIDES = ("MistralForCausalLM",)  # sliding_window counts without use_sliding_window
FIRST_LAYERS_FULL = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")  # max_window_layers counts
MOE = "Qwen3MoeForCausalLM"
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", MOE)
MAY_SLIDE = (*FIRST_LAYERS_FULL, MOE)
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. The fields below `theta` count only for the scaling types that have them."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: scales cos and sin
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture of experts in place of the MLPs of `layers`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalize: bool  # whether the weights of a token's experts are scaled to sum to one
    layers: frozenset[int]

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts or self.intermediate_size < 1:
            raise UserError(
                f"the model's {self.experts_per_token} of {self.num_experts} experts of size {self.intermediate_size} "
                "for each token make no sense"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, rotary embedding and SiLU-gated MLPs."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"  # the checkpoint's own
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    # Per layer how many tokens each one attends to, itself included; None is all before it. Empty: all, in every layer.
    windows: tuple[int | None, ...] = ()
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"the model's {name} is {getattr(self, name)}, which makes no sense")
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"the model's head_dim is {self.head_dim}; only even head sizes are supported")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"the model's {self.num_heads} attention heads are not a multiple of its {self.num_kv_heads} KV heads"
            )
        if self.max_position < 1:
            raise UserError(f"the model's context length is {self.max_position}, which makes no sense")


def from_hf(config: Mapping[str, Any], eos_token_ids: frozenset[int] = frozenset()) -> ModelConfig:
    """From the content of config.json.

    Raises:
        UserError: a setting that is missing, or that the models here do not implement.
    """
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    heads, hidden = _int(config, "num_attention_heads"), _int(config, "hidden_size")
    num_layers = check_num_layers(_int(config, "num_hidden_layers"))
    biased = bool(config.get("attention_bias", False))
    max_position = _int(config, "max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_int(config, "num_key_value_heads", heads),
        head_dim=_int(config, "head_dim", hidden // max(heads, 1)),
        max_position=max_position,
        rope=_hf_rope(config, max_position),
        rms_norm_eps=_float(config, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or biased,
        output_bias=architecture != "Qwen2ForCausalLM" and biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
        dtype=_hf_dtype(config),
        eos_token_ids=eos_token_ids | token_ids(config.get("eos_token_id")),
        windows=_hf_windows(config, architecture, num_layers, max_position),
        moe=_hf_moe(config, num_layers) if architecture == MOE else None,
    )


def check_architecture(name: str) -> None:
    """Raises `UserError` that lists the known architectures."""
    if name not in ARCHITECTURES:
        raise UserError(f"architecture {name!r} is not supported; the known ones are: {', '.join(ARCHITECTURES)}")


def check_num_layers(count: int) -> int:
    """`count`, if there can be a tuple with an entry for each layer."""
    if not 1 <= count <= MAX_LAYERS:
        raise UserError(f"the model's num_layers is {count}, which makes no sense")
    return count


def layer_windows(window: int, slides: Sequence[bool], max_position: int) -> tuple[int | None, ...]:
    """`ModelConfig.windows` of layers of which some have a window: none if it is as long as the whole context."""
    if window < 1:
        raise UserError(f"the model's sliding window is {window} tokens, which makes no sense")
    return tuple(window if each else None for each in slides) if window < max_position and any(slides) else ()


def token_ids(value: object) -> frozenset[int]:
    """`eos_token_id` may be absent, one id, or a list of ids."""
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f'config.json must name one architecture in "architectures", got {names!r}')
    return names[0]


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
    if config.get("quantization_config"):
        method = _object(config, "quantization_config").get("quant_method", "unknown")
        raise UserError(f"config.json: weights quantized with {method!r} are not supported; use a GGUF file instead")
    for name in ("num_experts", "num_local_experts"):
        if config.get(name) and architecture != MOE:
            raise UserError(f"config.json: {name} {config[name]} (a mixture of experts) is not part of {architecture}")


def _hf_windows(
    config: Mapping[str, Any], architecture: str, num_layers: int, max_position: int
) -> tuple[int | None, ...]:
    """`ModelConfig.windows`, as transformers reads the same settings."""
    window = config.get("sliding_window")
    in_use = window is not None and bool(config.get("use_sliding_window", architecture in ALWAYS_SLIDES))
    slides = _sliding_layers(config, architecture, num_layers, in_use)
    if not any(slides):
        return ()
    if architecture not in (*ALWAYS_SLIDES, *MAY_SLIDE):
        raise UserError(f"config.json: sliding_attention (sliding_window {window}) is not part of {architecture}")
    if not in_use:
        raise UserError("config.json: layer_types has sliding_attention, but sliding_window is not set or not in use")
    return layer_windows(_int(config, "sliding_window"), slides, max_position)


def _sliding_layers(config: Mapping[str, Any], architecture: str, num_layers: int, in_use: bool) -> list[bool]:
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise UserError(f"config.json: layer_types must be a list of {num_layers} names, got {kinds!r}")
        others = sorted({str(kind) for kind in kinds} - set(LAYER_TYPES))
        if others:
            raise UserError(f"config.json: layer_types {others} is not supported, only {', '.join(LAYER_TYPES)}")
        return [kind == "sliding_attention" for kind in kinds]
    # Of Qwen2's and Qwen3's layers the first ones see everything.
    full = _int(config, "max_window_layers", 28) if in_use and architecture in FIRST_LAYERS_FULL else 0
    return [in_use and layer >= full for layer in range(num_layers)]


def _hf_moe(config: Mapping[str, Any], num_layers: int) -> MoEConfig | None:
    """None if no layer has experts."""
    dense, step = config.get("mlp_only_layers") or [], _int(config, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or step < 1:
        raise UserError(
            f"config.json: mlp_only_layers {dense!r} must be a list and decoder_sparse_step {step} at least 1"
        )
    layers = frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    # transformers writes num_experts under its newer name.
    count = _int(config, "num_experts", _int(config, "num_local_experts", 0))
    if count == 0 or not layers:
        return None
    return MoEConfig(
        num_experts=count,
        experts_per_token=_int(config, "num_experts_per_tok"),
        intermediate_size=_int(config, "moe_intermediate_size"),
        normalize=bool(config.get("norm_topk_prob", False)),
        layers=layers,
    )


def _hf_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Both forms: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    scaling = _object(config, "rope_parameters") or _object(config, "rope_scaling")
    theta = _float(scaling, "rope_theta", _float(config, "rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UserError(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0")
    if kind not in ROPE_TYPES:
        raise UserError(f"config.json: RoPE scaling type {kind!r} is not supported, only {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return RopeConfig(theta)
    original = _int(config, "original_max_position_embeddings", max_position)
    original = _int(scaling, "original_max_position_embeddings", original)
    factor = _float(scaling, "factor", max_position / original if kind == "yarn" and original else 0.0)
    if factor <= 0.0 or original <= 0:
        raise UserError(
            f"config.json: RoPE scaling of type {kind!r} has the factor {scaling.get('factor')!r} and the original "
            f"length {original}; both must be above 0"
        )
    return RopeConfig(
        theta=theta,
        type=cast(RopeType, kind),
        factor=factor,
        original_max_position=original,
        low_freq_factor=_float(scaling, "low_freq_factor", 1.0),
        high_freq_factor=_float(scaling, "high_freq_factor", 4.0),
        beta_fast=_float(scaling, "beta_fast", 32.0),
        beta_slow=_float(scaling, "beta_slow", 1.0),
        attention_factor=yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """How much YaRN scales cos and sin: given, or derived from the factor as in its paper."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, all_dims = _float(scaling, "mscale", 0.0), _float(scaling, "mscale_all_dim", 0.0)
    derived = magnitude(scale) / magnitude(all_dims) if scale and all_dims else magnitude(1.0)
    return _float(scaling, "attention_factor", derived)


def _hf_dtype(config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UserError(f"config.json: dtype {dtype!r} is not supported, only {', '.join(DTYPES)}")
    return str(dtype)


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"config.json: {name} must be an object, got {value!r}")
    return value


def _int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"config.json: {name} must be an integer, got {value!r}")
    return value


def _float(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"config.json: {name} must be a number, got {value!r}")
    return float(value)

"""Writes transformers models as GGUF files with the `gguf` package, the way llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGML
from gguf import quants
from transformers import PreTrainedModel

# Where a K-quant block keeps its float16 scale(s), and what size makes its values about 0.1: the package cannot
# quantize to these, so their blocks are made of random bits around chosen scales.
K_SCALES: dict[GGML, tuple[tuple[int, float], ...]] = {
    GGML.Q2_K: ((80, 2e-3), (82, 4e-3)),
    GGML.Q3_K: ((108, 8e-4),),
    GGML.Q4_K: ((0, 1e-4), (2, 1e-3)),
    GGML.Q5_K: ((0, 5e-5), (2, 1e-3)),
    GGML.Q6_K: ((208, 2e-5),),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
Extra = Callable[[gguf.GGUFWriter], None]


def raw_blocks(values: np.ndarray[Any, Any], kind: GGML, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """`values` in blocks of `kind`, or random blocks of that shape where the package cannot quantize."""
    if kind not in K_SCALES:
        return quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*values.shape[:-1], values.shape[-1] // block)
    data = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
    for offset, scale in K_SCALES[kind]:
        scales = (scale * rng.uniform(0.5, 1.0, (*shape, 1))).astype(np.float16)
        data[..., offset : offset + 2] = scales.view(np.uint8)
    return data.reshape(*values.shape[:-1], -1)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind_of: Callable[[str], GGML] = lambda name: GGML.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Extra = lambda writer: None,
) -> None:
    """Write `model`, and change its weights to what the file then holds.

    `kind_of` gives the type of each matrix by its GGUF name. `metadata` is added under the architecture's prefix, and
    replaces; None drops a key.
    """
    writer = gguf.GGUFWriter(path, architecture)
    c = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    entries: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": c.rope_parameters["rope_theta"],
        **(metadata or {}),
    }
    if architecture == "qwen3moe":
        entries |= {
            "expert_count": c.num_experts,
            "expert_used_count": c.num_experts_per_tok,
            "expert_feed_forward_length": c.moe_intermediate_size,
        }
    for key, value in entries.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    writer.add_eos_token_id(7)
    writer.add_token_list([f"token {i}" for i in range(c.vocab_size)])
    rng = np.random.default_rng(0)
    for name, tensor in _tensors(model):
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        values, gguf_name = tensor.numpy(), translate(name)
        heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads}.get(name.partition("_proj")[0][-1:])
        permuted = architecture == "llama" and "self_attn" in name and heads is not None
        if permuted:
            values = interleave(values, heads)
        kind = kind_of(gguf_name) if values.ndim > 1 and "ffn_gate_inp" not in gguf_name else GGML.F32
        data = raw_blocks(values, kind, rng)
        writer.add_tensor(gguf_name, data, raw_dtype=kind)
        values = quants.dequantize(data, kind).reshape(values.shape)
        if permuted:
            values = deinterleave(values, heads)
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own weights, by name; stacks of experts' gate above up as the two halves they are."""
    for name, tensor in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            yield f"{stem}.gate_proj.weight", gate
            yield f"{stem}.up_proj.weight", up
        else:
            yield f"{name}.weight" if stem.endswith("experts") else name, tensor


def translate(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{ending}"
    _, _, layer, rest = stem.split(".", 3)
    if rest.startswith("mlp.experts."):
        return f"blk.{layer}.{NAMES[rest.replace('experts.', '')]}_exps.{ending}"
    return f"blk.{layer}.{NAMES[rest]}.{ending}"


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def interleave(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's `permute`: the two halves of each head become pairs."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def deinterleave(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

"""GGUF files written by the `gguf` package load as what they are, and damaged or foreign ones are refused plainly."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGML
from gguf import quants
from transformers import LlamaForCausalLM

from engine_core.errors import UserError
from engine_core.loader.gguf import GGUFCheckpoint
from engine_core.loader.select import open_checkpoint
from engine_core.loader.weights import QuantizedWeight, dense
from tests.engine_core.gguf_files import raw_blocks, write_gguf
from tests.engine_core.tiny_models import (
    load,
    make_model,
    reference_logits,
    scattered_requests,
    step_logits,
)

KINDS = [
    *(GGML.F32, GGML.F16, GGML.BF16, GGML.Q4_0, GGML.Q4_1, GGML.Q5_0, GGML.Q5_1, GGML.Q8_0),
    *(GGML.Q2_K, GGML.Q3_K, GGML.Q4_K, GGML.Q5_K, GGML.Q6_K),
]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def check_logits(path: Path, reference: torch.nn.Module, length: int = 60, **settings: Any) -> None:
    rng = random.Random(length)
    ids = [rng.randrange(320) for _ in range(length)]
    runner = load(path, **settings)
    request = scattered_requests([ids], 16, 1024, rng)[0]
    logits = torch.cat([step_logits(runner, [(request, *span)])[0] for span in ((0, length - 1), (length - 1, length))])
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_tensor_type(kind: GGML, tmp_path: Path) -> None:
    model = make_model("llama", num_hidden_layers=2, **WIDE)
    write_gguf(tmp_path / "model.gguf", model, "llama", lambda name: kind)
    check_logits(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name.startswith("Q")], ids=lambda kind: kind.name)
def test_dequantize_equals_the_gguf_package(kind: GGML) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, 512)).astype(np.float32)  # more than one cached piece
    data = raw_blocks(values, kind, rng)
    weight = QuantizedWeight(kind, values.shape, data)
    expected = quants.dequantize(data, kind)
    np.testing.assert_array_equal(weight.dequantize(), expected)
    order = rng.permutation(300)
    np.testing.assert_array_equal(weight.take_rows(order).dequantize(), expected[order])
    parts = [weight.take_rows(slice(0, 7)), weight.take_rows(slice(7, 300))]
    np.testing.assert_array_equal(dense(parts, torch.float32, torch.device("cpu")).numpy(), expected)


def test_a_quantized_weight_checks_its_shape() -> None:
    with pytest.raises(ValueError, match="Q8_0"):
        QuantizedWeight(GGML.Q8_0, (4, 64), np.zeros((4, 64), np.uint8))


def test_mixed_types_in_one_layer(tmp_path: Path) -> None:
    """As in the usual Q4_K_M files: V and down in more bits than the rest."""
    model = make_model("llama", **WIDE)
    kinds = {"attn_v": GGML.Q6_K, "ffn_down": GGML.Q6_K, "ffn_up": GGML.Q8_0, "token_embd": GGML.F16}
    write_gguf(tmp_path / "model.gguf", model, "llama", lambda name: kinds.get(name.split(".")[-2], GGML.Q4_K))
    check_logits(tmp_path / "model.gguf", model)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "llama"),
        ("llama-biased", "llama"),
        ("llama-tied", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3-moe", "qwen3moe"),
    ],
)
def test_every_family(family: str, architecture: str, tmp_path: Path) -> None:
    model = make_model(family)
    write_gguf(tmp_path / "model.gguf", model, architecture)
    check_logits(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_sliding_windows(family: str, tmp_path: Path) -> None:
    """Of all layers of Mistral, which is architecture llama; of those that the pattern names, elsewhere."""
    architecture = {"mistral": "llama"}.get(family, family)
    model = make_model(f"{family}-window")
    window = model.config.sliding_window

    def add_pattern(writer: gguf.GGUFWriter) -> None:
        if family == "qwen2":
            writer.add_array(f"{architecture}.attention.sliding_window_pattern", [False, True, True])

    metadata = {"attention.sliding_window": window}
    write_gguf(tmp_path / "model.gguf", model, architecture, metadata=metadata, extra=add_pattern)
    check_logits(tmp_path / "model.gguf", model)


def test_a_window_of_unnamed_layers_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("qwen2"), "qwen2", metadata={"attention.sliding_window": 64})
    with pytest.raises(UserError, match="sliding_window 64 is not supported without"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(family: str, kind: str, tmp_path: Path) -> None:
    parameters = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    model = make_model(family, rope_parameters=parameters)
    metadata = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    write_gguf(tmp_path / "model.gguf", model, family, metadata=metadata)
    check_logits(tmp_path / "model.gguf", model, length=300)


@pytest.mark.parametrize("family", ["llama3", "llama3-tied"])
@pytest.mark.parametrize("kind", [GGML.F32, GGML.Q8_0, GGML.Q4_K], ids=lambda kind: kind.name)
def test_llama3(kind: GGML, family: str, tmp_path: Path) -> None:
    """llama.cpp stores Llama 3's RoPE scaling as a divisor of each frequency, and no head where it is tied."""
    model = make_model(family, **{**WIDE, "head_dim": 64})
    theta = model.config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(0, model.config.head_dim, 2) / model.config.head_dim)
    factors = (frequencies / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 7

    def add_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    write_gguf(tmp_path / "model.gguf", model, "llama", lambda name: kind, extra=add_factors)
    check_logits(tmp_path / "model.gguf", model, length=300)


@pytest.mark.parametrize("kind", [GGML.F16, GGML.Q8_0, GGML.Q4_0, GGML.Q6_K], ids=lambda kind: kind.name)
def test_experts(kind: GGML, tmp_path: Path) -> None:
    """llama.cpp stores an expert's matrix as a part of a tensor of three dimensions."""
    model = make_model("qwen3-moe", **WIDE | {"moe_intermediate_size": 256, "head_dim": 64})
    write_gguf(tmp_path / "model.gguf", model, "qwen3moe", lambda name: kind)
    check_logits(tmp_path / "model.gguf", model)


def test_smollm2_equals_transformers(smollm2_path: Path, smollm2_reference: LlamaForCausalLM) -> None:
    rng = random.Random(5)
    ids = [rng.randrange(49152) for _ in range(150)]
    runner = load(smollm2_path)
    request = scattered_requests([ids], 16, 1024, rng)[0]
    logits = torch.cat([step_logits(runner, [(request, *span)])[0] for span in ((0, 100), (100, 149), (149, 150))])
    # In float64: transformers in float32 is itself 0.9e-4 from that on this prompt, more than twice as far as we are.
    exact = reference_logits(copy.deepcopy(smollm2_reference).double(), ids)
    torch.testing.assert_close(logits.double(), exact, atol=7e-5, rtol=0)


def test_metadata_of_smollm2(smollm2_path: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2_path)
    config = checkpoint.config
    assert checkpoint.quantized
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_position, config.tie_embeddings) == (49152, 8192, True)
    assert config.rope.theta == 100000.0
    assert config.eos_token_ids == {2}


# --- what is refused ------------------------------------------------------------------------------------------------


def tensor(name: str, shape: tuple[int, ...]) -> Callable[[gguf.GGUFWriter], None]:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(name, np.zeros(shape, np.float32))

    return add


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, "expert_count 8"),
        ({"attention.sliding_window": 64, "attention.sliding_window_pattern": 4}, "pattern must say of each of the 3"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
        ({"rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"attention.value_length": 8}, "attention.value_length 8"),
        ({"block_count": None}, "llama.block_count"),
        ({"context_length": 0}, "context length is 0"),
        ({"attention.layer_norm_rms_epsilon": "small"}, "layer_norm_rms_epsilon"),
        ({"attention.head_count_kv": 5}, "not a multiple"),
        ({"attention.head_count": 0}, "num_heads is 0"),
        ({"feed_forward_length": 161}, "blk.0.ffn_gate.weight has shape"),
        ({"block_count": 4}, "blk.3.attn_norm.weight is missing"),
        ({"block_count": 2}, "does not use"),
    ],
)
def test_metadata_that_is_not_supported_is_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("llama"), "llama", metadata=metadata)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "model.gguf")


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("llama"), "gemma3")
    with pytest.raises(UserError, match=r"'gemma3'.*llama, qwen2, qwen3, qwen3moe"):
        open_checkpoint(str(tmp_path / "model.gguf"))


def test_weights_of_another_model_are_not_ignored(tmp_path: Path) -> None:
    """A Llama with QK-norms would run, and answer nonsense."""
    extra = tensor("blk.0.attn_q_norm.weight", (16,))
    write_gguf(tmp_path / "model.gguf", make_model("llama"), "llama", extra=extra)
    with pytest.raises(UserError, match="attn_q_norm"):
        load(tmp_path / "model.gguf")


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    def kind_of(name: str) -> GGML:
        return GGML.TQ2_0 if "ffn_up" in name else GGML.F32

    write_gguf(tmp_path / "model.gguf", make_model("llama", **WIDE), "llama", kind_of)
    with pytest.raises(UserError, match=r"blk.0.ffn_up.weight is of type TQ2_0.*Q6_K"):
        load(tmp_path / "model.gguf")


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", extra=lambda w: w.add_uint16("split.count", 3))
    with pytest.raises(UserError, match="one of 3 parts"):
        load(tmp_path / "m.gguf")


def test_truncated_files_are_named_wherever_they_end(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama"), "llama")
    data = path.read_bytes()
    for length in (0, 3, 4, 20, 200, 2000, len(data) // 2, len(data) - 100):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"model\.gguf"):
            load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK" * 1000)
    with pytest.raises(UserError, match=r"model\.gguf is not a GGUF file"):
        load(path)
    with pytest.raises(UserError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")


def test_a_damaged_header_never_raises_anything_else(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama", num_hidden_layers=1, vocab_size=100), "llama")
    data = path.read_bytes()
    header = data.index(b"token_embd.weight") + 600
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 8, 9, 127, 255, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            open_checkpoint(str(path))
        except UserError:
            refused += 1
    assert refused > 50

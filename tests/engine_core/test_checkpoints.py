"""Hugging Face directories: what loads, and what is refused with a message that names the file and the setting."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_core.errors import UserError
from engine_core.loader.hf_config import read_config
from engine_core.loader.select import open_checkpoint
from engine_core.models.config import from_hf
from tests.engine_core.tiny_models import load, reference_logits, save_model, scattered_requests, step_logits

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def check_logits(folder: Path, reference: Any) -> None:
    ids = [random.Random(3).randrange(320) for _ in range(40)]
    request = scattered_requests([ids], 16, 1024, random.Random(1))[0]
    logits = step_logits(load(folder), [(request, 0, 40)])[0]
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=1e-4, rtol=0)


def test_sharded_weights(tmp_path: Path) -> None:
    model = save_model(tmp_path / "whole", "qwen2", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    check_logits(tmp_path / "sharded", model)


def test_a_tied_head_stored_all_the_same(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama-tied")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "lm_head.weight": torch.zeros(320, 96)}, tmp_path / "model.safetensors")
    check_logits(tmp_path, model)


def test_experts_in_stacks(tmp_path: Path) -> None:
    """As transformers holds them in memory, and saves them if told to."""
    model = save_model(tmp_path / "each", "qwen3-moe")
    model.save_pretrained(tmp_path / "stacks", save_original_format=False)
    name = "model.layers.2.mlp.experts"
    assert f"{name}.7.up_proj.weight" in load_file(tmp_path / "each" / "model.safetensors")
    weights = load_file(tmp_path / "stacks" / "model.safetensors")
    assert weights[f"{name}.gate_up_proj"].shape == (8, 128, 96)
    check_logits(tmp_path / "stacks", model)
    change_config(tmp_path / "stacks", moe_intermediate_size=32)
    with pytest.raises(UserError, match=r"experts.gate_up_proj has shape \[8, 128, 96\], .* asks for \[8, 64, 96\]"):
        load(tmp_path / "stacks")


def test_experts_in_int8_are_close(tmp_path: Path) -> None:
    """At most positions: where a router is nearly undecided, rounding the inputs before it chooses another expert.

    K and V are rounded little here: they take part in what every later token comes to."""
    model = save_model(tmp_path, "qwen3-moe")
    rng = random.Random(3)
    ids = [rng.randrange(320) for _ in range(40)]
    request = scattered_requests([ids], 16, 1024, random.Random(1))[0]
    runner = load(tmp_path, weights="int8", kv_cache_dtype="float16")
    logits = step_logits(runner, [(request, 0, 40)])[0]
    expected = reference_logits(model, ids)
    errors = (logits - expected).square().mean(-1).sqrt() / expected.std()
    assert errors.median() < 0.06
    assert errors.max() < 0.5


def test_eos_ids_of_both_configs(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", eos_token_id=[3, 5])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert read_config(tmp_path).eos_token_ids == {3, 5, 9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; the known ones are: Llama"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' has the factor None"),
        ({"rope_parameters": "yarn"}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding_window 64"),
        ({"num_experts": 8}, "num_experts 8"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"hidden_size": "wide"}, "hidden_size must be an integer"),
        ({"num_key_value_heads": 4}, "6 attention heads are not a multiple of its 4"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"intermediate_size": 161}, r"gate_proj.weight has shape \[160, 96\]"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 2}, "does not use"),
    ],
)
def test_config_that_is_not_supported_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


MOE: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 64}
BOTH = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, ()),
        ({"sliding_window": 64}, ()),  # transformers' Llama does not know it
        ({"architectures": ["MistralForCausalLM"]}, ()),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, (64, 64, 64)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64, "layer_types": BOTH}, (None, 64, None)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, ()),  # the whole context
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}, ()),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}
            | {"use_sliding_window": True},
            (None, 64, 64),
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True}, ()),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 64, "max_window_layers": 0, "layer_types": BOTH}
            | {"use_sliding_window": True},
            (None, 64, None),
        ),
    ],
)
def test_windows_of_layers(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert from_hf(BASE | changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "window is 0 tokens"),
        ({"sliding_window": "wide"}, "sliding_window must be an integer"),
        ({"layer_types": BOTH}, "layer_types has sliding_attention, but sliding_window is not set"),
        ({"sliding_window": 9, "layer_types": BOTH[:2]}, "layer_types must be a list of 3 names"),
        ({"sliding_window": 9, "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ],
)
def test_windows_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_hf(BASE | {"architectures": ["MistralForCausalLM"]} | changes)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {0, 1, 2}),
        ({"num_local_experts": 8, "num_experts": None}, {0, 1, 2}),
        ({"mlp_only_layers": [1]}, {0, 2}),
        ({"decoder_sparse_step": 2}, {1}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, None),
        ({"num_experts": 0}, None),
    ],
)
def test_layers_with_experts(changes: dict[str, Any], layers: set[int] | None) -> None:
    moe = from_hf(BASE | MOE | changes).moe
    assert (moe and moe.layers) == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be an integer"),
        ({"moe_intermediate_size": 0}, "experts of size 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers 3"),
    ],
)
def test_experts_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_hf(BASE | MOE | changes)


def test_any_config_loads_or_is_refused() -> None:
    """Odd values in any field raise nothing but `UserError`."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    fields = [*BASE, "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "layer_types"]
    fields += ["sliding_window", "use_sliding_window", "max_window_layers", *MOE, "decoder_sparse_step"]
    fields += ["mlp_only_layers", "num_local_experts"]
    fields += ["tie_word_embeddings", "torch_dtype", "eos_token_id", "quantization_config"]
    odd = [None, -1, 0, 1, 1.5, "x", "", [], [1], ["a"], {}, {"rope_type": "yarn"}, True, float("nan"), 10**30]
    odd += [{"type": "linear", "factor": "2"}, {"rope_type": "yarn", "factor": 0}, {"rope_type": "llama3", "factor": 1}]
    names = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]
    for _ in range(4000):
        config = (
            BASE
            | {"architectures": [rng.choice(names)]}
            | {rng.choice(fields): rng.choice(odd) for _ in range(rng.randint(1, 3))}
        )
        try:
            from_hf(config)
        except UserError as error:
            assert str(error)  # noqa: PT017


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    model = save_model(tmp_path / "whole", "llama")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    shard = sorted(sharded.glob("*.safetensors"))[1]
    data = shard.read_bytes()

    shard.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=shard.name):
        load(sharded)
    shard.unlink()
    with pytest.raises(UserError, match=rf"{shard.name} is missing"):
        load(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../../etc/passwd"}}')
    with pytest.raises(UserError, match="outside its directory"):
        load(sharded)

    weights = load_file(whole / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, whole / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight is missing"):
        load(whole)
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickle"):
        load(whole)
    (whole / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        load(whole)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int32)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model.norm.weight is of type torch.int32"):
        load(tmp_path)


def test_dummy_weights_have_the_true_shape_and_finite_logits(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    runner = load(tmp_path, load_format="dummy")
    request = scattered_requests([list(range(50))], 16, 1024, random.Random(1))[0]
    logits = step_logits(runner, [(request, 0, 50)])[0]
    assert logits.shape == (50, 320)
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert open_checkpoint(str(tmp_path), "dummy").config.architecture == "Qwen3ForCausalLM"

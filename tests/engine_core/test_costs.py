"""What a step costs at least, against figures worked out by hand and against the models' own weights."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as GGML

from bench.shapes import SHAPES, write_config
from engine_core.cards import CARDS, find_card
from engine_core.costs import ModelCosts, count_parameters, turning_point
from engine_core.errors import UserError
from engine_core.loader.describe import describe
from engine_core.models.config import ARCHITECTURES, ModelConfig, RopeConfig, from_hf
from engine_core.models.registry import MODELS
from tests.engine_core.gguf_files import write_gguf
from tests.engine_core.tiny_models import save_model

BANDWIDTH, FLOPS = 4.3e12, 790e12  # an H200, as measured


def costs_of(name: str) -> ModelCosts:
    return ModelCosts(from_hf(SHAPES[name]), 2, 2)


def test_qwen3_by_hand() -> None:
    small, large = costs_of("qwen3-0.6b"), costs_of("qwen3-8b")
    # 2 (K and V) x 28 layers x 8 heads x 128 x 2 bytes, and with 36 layers
    assert small.kv_bytes_per_token == 114_688
    assert large.kv_bytes_per_token == 147_456
    # 151,936 x 1024 + 28 (1024 (2048 + 2048) + 2048 x 1024 + 3 x 1024 x 3072 + 2 x 1024 + 2 x 128) + 1024
    assert small.parameters.total == 596_049_920
    assert large.parameters.total == 8_190_735_360
    assert small.decode(1, 0).seconds(BANDWIDTH, FLOPS) * 1e3 == pytest.approx(0.277, abs=5e-4)
    # 8B does not tie its head: the embedding's 151,936 x 4096 are not read
    assert large.weights_read(1, 1) == 2 * (8_190_735_360 - 151_936 * 4096)
    assert large.decode(1, 0).seconds(BANDWIDTH, FLOPS) * 1e3 == pytest.approx(3.52, abs=5e-3)


def test_a_decode_step_by_hand() -> None:
    small = costs_of("qwen3-0.6b")
    work = small.decode(64, 1000)
    assert work.bytes == pytest.approx(2 * 596_049_920 + 64 * 1000 * 114_688)
    # weights without the norms' 65,536; attention: QK and PV of 16 heads of 128 in 28 layers
    assert work.flops == pytest.approx(64 * (2 * (596_049_920 - 65_536) + 4 * 16 * 128 * 28 * 1000))
    assert work.intensity == pytest.approx(work.flops / work.bytes)
    assert small.step([1000] * 64) == work


def test_a_prompt_by_hand() -> None:
    small = costs_of("qwen3-0.6b")
    work = small.prefill(8192)
    head = 151_936 * 1024
    body = 596_049_920 - 65_536 - head
    pairs = 8192 * 8193 // 2
    assert work.flops == pytest.approx(2 * (8192 * body + head) + 4 * 16 * 128 * 28 * pairs)
    assert work.bytes == pytest.approx(2 * 596_049_920 + 8192 * 114_688)
    # what is cached is read, not computed
    later = small.prefill(8192, cached=1000)
    assert later.bytes - work.bytes == pytest.approx(1000 * 114_688)
    assert later.flops - work.flops == pytest.approx(4 * 16 * 128 * 28 * 1000 * 8192)


def test_experts_active_against_total() -> None:
    moe = costs_of("qwen3-30b-a3b")
    expert = 3 * 2048 * 768
    assert moe.parameters.experts == 48 * 128 * expert
    assert moe.parameters.total == pytest.approx(30.53e9, rel=1e-3)  # "30B"
    # "A3B" counts the embedding too
    assert moe.active_parameters + moe.parameters.embedding == pytest.approx(3.35e9, rel=1e-2)
    # one token reads its 8 experts of 128, many tokens all of them
    others = moe.parameters.total - moe.parameters.experts - moe.parameters.embedding
    assert moe.weights_read(1, 1) == pytest.approx(2 * (others + 48 * 8 * expert))
    assert moe.weights_read(10_000, 1) == pytest.approx(2 * (others + 48 * 128 * expert))
    # two tokens that choose 8 of 128 each have 0.5 in common on average
    assert moe.weights_read(2, 2) == pytest.approx(2 * (others + 48 * 15.5 * expert))
    assert moe.decode(5, 100).flops == pytest.approx(5 * moe.decode(1, 100).flops)


def test_sliding_windows_bound_what_is_read() -> None:
    mistral = costs_of("mistral-7b")
    per_token = mistral.kv_bytes_per_token
    weights = mistral.weights_read(1, 1)
    assert mistral.decode(1, 4096).bytes == mistral.decode(1, 30_000).bytes == weights + 4096 * per_token
    assert mistral.decode(1, 4000).bytes == weights + 4000 * per_token
    config = replace(from_hf(SHAPES["qwen3-8b"]), windows=(None,) * 12 + (1024,) * 24)
    mixed = ModelCosts(config, 2, 2)
    assert mixed.decode(1, 10_000).bytes - mixed.weights_read(1, 1) == pytest.approx(
        147_456 / 36 * (12 * 10_000 + 24 * 1024)
    )


def test_attention_against_a_count_position_by_position() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        window = rng.choice([None, rng.randrange(1, 40)])
        config = replace(from_hf(SHAPES["smollm2-135m"]), num_layers=1, windows=(window,) if window else ())
        costs = ModelCosts(config, 2, 2)
        start = rng.randrange(60)
        stop = start + rng.randrange(1, 60)
        reach = [range(max(0, p + 1 - (window or p + 1)), p + 1) for p in range(start, stop)]
        moved = len(set().union(*reach) | set(range(start, stop)))
        pairs = sum(map(len, reach))
        none = replace(config, windows=())
        work = costs.step((), ((start, stop),), sampled=0)
        assert work.bytes == pytest.approx(costs.weights_read(stop - start, 0) + moved * costs.kv_bytes_per_token)
        products = 2 * (stop - start) * (costs.active_parameters - config.vocab_size * config.hidden_size)
        assert work.flops == pytest.approx(products + 4 * config.num_heads * config.head_dim * pairs)
        assert ModelCosts(none, 2, 2).step((), ((start, stop),), sampled=0).flops >= work.flops


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-moe-mixed"])
def test_numbers_of_weights_are_those_of_the_models(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path, family)
    found = describe(tmp_path)
    expected = sum(p.numel() for p in dict(model.named_parameters()).values())
    assert count_parameters(found.config).total == expected
    assert (
        sum(each.parameters for each in found.stored) >= expected - found.config.vocab_size * found.config.hidden_size
    )


def test_a_gguf_file_tells_the_same(tmp_path: Path) -> None:
    model = save_model(tmp_path / "hf", "llama")
    write_gguf(tmp_path / "model.gguf", model, "llama", lambda name: GGML.Q8_0 if "ffn" in name else GGML.F16)
    plain, found = describe(tmp_path / "hf"), describe(tmp_path / "model.gguf")
    assert count_parameters(found.config) == count_parameters(plain.config)
    types = {each.type: each for each in found.stored}
    assert set(types) == {"F16", "Q8_0", "F32"}
    mlp = count_parameters(found.config).mlp
    assert (types["Q8_0"].parameters, types["Q8_0"].bytes) == (mlp, mlp // 32 * 34)


def test_biases_are_counted() -> None:
    plain = ModelConfig("LlamaForCausalLM", 100, 8, 16, 2, 4, 2, 2, 64, RopeConfig(1e4))
    biased = replace(plain, qkv_bias=True, output_bias=True, mlp_bias=True)
    assert count_parameters(biased).total - count_parameters(plain).total == 2 * ((8 + 4 + 4) + 8 + (16 + 16 + 8))


def test_turning_points() -> None:
    large = costs_of("qwen3-8b")
    turn = turning_point(lambda batch: large.decode(batch, 0), BANDWIDTH, FLOPS, 1 << 30)
    # 2 n weights / 790e12 = 2 bytes x weights / 4.3e12: about n = 790 / 4.3, a little more for norms
    assert turn == 184
    assert large.decode(184, 0).compute_bound(BANDWIDTH, FLOPS)
    assert not large.decode(183, 0).compute_bound(BANDWIDTH, FLOPS)
    # at a long context the KV of each sequence takes longer to read than its token takes to compute
    assert turning_point(lambda batch: large.decode(batch, 32768), BANDWIDTH, FLOPS, 1 << 30) is None


def test_cards() -> None:
    assert find_card("H200").bandwidth == BANDWIDTH
    assert find_card("RTX 4090").name == "rtx4090"
    assert CARDS["h200"].flops("bfloat16") == FLOPS > CARDS["h200"].flops("float32")
    with pytest.raises(UserError, match="the known ones are: b200, h200"):
        find_card("voodoo2")


def test_descriptions_of_what_is_not_there(tmp_path: Path) -> None:
    assert describe(write_config("qwen3-8b", tmp_path)).stored == ()
    (tmp_path / "qwen3-8b" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{not json")
    with pytest.raises(UserError, match="damaged or incomplete"):
        describe(tmp_path / "qwen3-8b")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with pytest.raises(UserError, match="NoSuchModel"):
        describe(tmp_path)


def test_every_known_architecture_has_a_class() -> None:
    assert tuple(MODELS) == ARCHITECTURES

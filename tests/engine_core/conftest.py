"""Fixtures shared by the engine's tests."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> LlamaForCausalLM:
    """transformers' Llama with SmolLM2's weights, read and dequantized by the `gguf` package alone."""
    # Imported here: the kernels' tests need none of it.
    import gguf
    from gguf import quants
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.engine_core.gguf_files import deinterleave, translate

    reader = gguf.GGUFReader(smollm2_path)

    def value(key: str) -> float:
        number: float = reader.fields[f"llama.{key}"].contents()
        return number

    heads = {"attn_q": int(value("attention.head_count")), "attn_k": int(value("attention.head_count_kv"))}
    config = LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().train(False)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = tensors.pop(translate(name))
            values = quants.dequantize(stored.data, stored.tensor_type)
            part = stored.name.split(".")[-2]
            if part in heads:
                values = deinterleave(values, heads[part])
            parameter.copy_(torch.tensor(values))
    assert not tensors, "the file holds what the reference does not use"
    return model


@pytest.fixture
def seed() -> int:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)
    np.random.seed(value)
    return value


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors start as NaN: an output that a kernel leaves unwritten cannot pass."""
    empty = torch.empty

    def nan_filled(*size: object, **options: object) -> torch.Tensor:
        out = empty(*size, **options)  # type: ignore[call-overload]
        return out.fill_(math.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", nan_filled)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)

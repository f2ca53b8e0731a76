"""Weights arrive on the GPU as they are in the files, whatever they are cut into on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_core.loader import upload
from engine_core.runner import build_runner
from tests.gpu.models import save_model, settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [4096, 4 * 2**20])
def test_weights_are_those_of_the_files(
    piece: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PIECE_BYTES", piece)
    reference = save_model(tmp_path, "llama-biased").model
    runner, _ = build_runner(settings(tmp_path, dtype=str(dtype).removeprefix("torch.")))
    for ours, theirs in zip(runner.model.layers, reference.layers, strict=True):  # type: ignore[attr-defined]
        attention, mlp = theirs.self_attn, theirs.mlp
        for linear, parts in (
            (ours.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (ours.output, (attention.o_proj,)),
            (ours.mlp.gate_up, (mlp.gate_proj, mlp.up_proj)),
            (ours.mlp.down, (mlp.down_proj,)),
        ):
            assert torch.equal(linear.weight.cpu(), torch.cat([part.weight for part in parts]).to(dtype))
            if parts[0].bias is not None:
                assert torch.equal(linear.bias.cpu(), torch.cat([part.bias for part in parts]).to(dtype))
    assert torch.equal(runner.embedding.cpu(), reference.embed_tokens.weight.to(dtype))  # type: ignore[attr-defined]

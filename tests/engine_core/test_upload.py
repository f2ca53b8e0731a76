"""How tensors are cut for the threads that carry them to the GPU; that they arrive is tested in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from engine_core.loader import upload


@pytest.mark.parametrize("piece_bytes", [2, 34, 100, 10**6])
def test_pieces_fill_the_target_in_order(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PIECE_BYTES", piece_bytes)
    sources = [torch.randn(7, 5).bfloat16(), torch.randn(5, 3).bfloat16().t()[:1], torch.randn(4, 5).bfloat16()]
    target = torch.full((12, 5), float("nan"))
    for part, source in upload.cut(target.view(-1), sources):
        assert part.shape == source.shape
        assert 0 < source.nbytes <= piece_bytes
        assert part.isnan().all()
        part.copy_(source)
    assert torch.equal(target, torch.cat(sources).float())

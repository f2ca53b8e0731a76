"""The mixture of experts in plain torch: a token's result is its own."""

from __future__ import annotations

import pytest
import torch

from engine_core.layers.linear import make_linear
from engine_core.layers.moe import Experts, SparseMoE


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (16, 5), (3, 3)])
def test_a_row_does_not_depend_on_its_batch(num_experts: int, top_k: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seed = torch.seed()
        print("seed", seed)
        gate_up = [make_linear([torch.randn(64, 96) * 0.1] * 2) for _ in range(num_experts)]
        down = [make_linear([torch.randn(96, 64) * 0.1]) for _ in range(num_experts)]
        moe = SparseMoE(make_linear([torch.randn(num_experts, 96)]), Experts(gate_up, down), top_k, True)
        x = torch.randn(200, 96)
        together = moe(x)
        for rows in (1, 2, 3, 7, 16, 33, 150):
            start = int(torch.randint(0, 200 - rows, ()))
            assert torch.equal(moe(x[start : start + rows]), together[start : start + rows]), rows
    finally:
        torch.set_num_threads(before)


def test_no_rows() -> None:
    experts = Experts([make_linear([torch.randn(64, 32)])] * 2, [make_linear([torch.randn(32, 32)])] * 2)
    moe = SparseMoE(make_linear([torch.randn(2, 32)]), experts, 1, False)
    assert moe(torch.zeros(0, 32)).shape == (0, 32)

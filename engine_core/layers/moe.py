"""A mixture of experts: many gated MLPs, of which each token uses the few that a router chooses for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_core.layers.activation import silu_and_mul
from engine_core.layers.linear import DenseLinear, Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """Each expert's layers; and, where kernels take all experts at once, the weights that they are views of."""

    gate_up: list[Linear]
    down: list[Linear]
    stacked_gate_up: torch.Tensor | None = None  # [experts, 2 * intermediate, hidden], gate first
    stacked_down: torch.Tensor | None = None  # [experts, hidden, intermediate]

    @staticmethod
    def stack(gate_up: Sequence[Linear], down: Sequence[Linear]) -> Experts:
        """Experts of dense layers without biases, their weights copied into one piece each."""
        stacked = [torch.stack([_weight(linear) for linear in linears]) for linears in (gate_up, down)]
        views = [[DenseLinear(weight) for weight in weights] for weights in stacked]
        return Experts(list(views[0]), list(views[1]), *stacked)


def _weight(linear: Linear) -> torch.Tensor:
    assert isinstance(linear, DenseLinear)
    return linear.weight


class SparseMoE:
    """The sum of what a token's `top_k` experts make of it, weighted by the router's softmax over all experts, scaled
    to sum to one if `normalize`."""

    def __init__(self, router: Linear, experts: Experts, top_k: int, normalize: bool) -> None:
        self.router, self.experts, self.top_k, self.normalize = router, experts, top_k, normalize

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> the same. A token's result does not depend on the others where the layers' do not."""
        weights, chosen = self.router(x).float().softmax(-1).topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            y = self.experts.down[expert](silu_and_mul(self.experts.gate_up[expert](x[token])))
            out.index_add_(0, token, y.float() * weights[token, place, None])
        return out.to(x.dtype)

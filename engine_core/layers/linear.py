"""Matrix products. The one place that decides how a weight is held: models never see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch.nn import functional

from engine_core.errors import UserError
from engine_core.loader.weights import Weight, dense

WeightsMode = Literal["none", "int8"]


class Linear(Protocol):
    """y = x W^T + b."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in_features] -> [tokens, out_features], of the same dtype."""
        ...


class DenseLinear:
    """Weights [out_features, in_features] in the compute dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


def choose_mode(wanted: str, quantized: bool, device: torch.device) -> WeightsMode:
    """How to hold weights: as `wanted`, or what suits the checkpoint and the device if that is "auto"."""
    if wanted == "int8":
        raise UserError("--weights int8 is not available here; use --weights none")
    return "none"


def make_linear(
    parts: Sequence[Weight],
    biases: Sequence[torch.Tensor] = (),
    *,
    mode: WeightsMode = "none",
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),
) -> Linear:
    """A linear layer whose output features are those of `parts`, one after the other (fused QKV, gate/up).

    `mode` "none" keeps the weights dense in `dtype`.
    """
    bias = dense(biases, dtype, device) if biases else None
    return DenseLinear(dense(parts, dtype, device), bias)

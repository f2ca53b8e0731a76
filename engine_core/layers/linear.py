"""Matrix products. The one place that decides how a weight is held: models never see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch.nn import functional

from engine_core.errors import UserError
from engine_core.kernels.cpu_layout import BLOCK
from engine_core.kernels.cpu_linear import PackedLinear
from engine_core.kernels.cpu_pack import pack_floats, pack_quantized
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
    if wanted == "int8" and device.type != "cpu":
        raise UserError("--weights int8 is for the CPU only; use --weights none")
    if wanted == "int8" or (wanted == "auto" and quantized and device.type == "cpu"):
        return "int8"
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

    `mode` "int8" keeps the integers of a GGUF file's blocks where it has 4, 5 or 8 bits, and rounds others to int8.
    "none" keeps the weights dense in `dtype`; in float32 on the CPU, laid out for kernels whose results do not depend
    on the rest of the batch.
    """
    bias = dense(biases, dtype, device) if biases else None
    if device.type == "cpu" and parts[0].shape[1] % BLOCK == 0:
        if mode == "int8":
            return PackedLinear(pack_quantized(parts), bias)
        if dtype == torch.float32:
            return PackedLinear(pack_floats(dense(parts, dtype, device)), bias)
    return DenseLinear(dense(parts, dtype, device), bias)

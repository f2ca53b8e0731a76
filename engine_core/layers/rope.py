"""Rotary position embedding: the inverse frequencies of each scaling type, and the rotation itself."""

from __future__ import annotations

import math

import torch

from engine_core.kernels import cpu_elementwise
from engine_core.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]: the angle each pair of dimensions turns by from one position to the next."""
    base = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    match rope.type:
        case "default":
            return base
        case "linear":
            return base / rope.factor
        case "llama3":
            return _llama3(rope, base)
        case "yarn":
            return _yarn(rope, base, head_dim)


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / base
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    spread = rope.high_freq_factor - rope.low_freq_factor
    keep = (rope.original_max_position / wavelengths - rope.low_freq_factor) / spread
    blended = (1 - keep) * base / rope.factor + keep * base
    stretched = torch.where(wavelengths > longest, base / rope.factor, base)
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often over the original context are kept, those that turn seldom are interpolated."""

    def dimension(rotations: float) -> float:
        """The dimension that makes this many rotations over the original context."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base / rope.factor * interpolate + base * (1 - interpolate)


class RotaryEmbedding:
    """Rotates the two halves of each head against one another.

    `factors` divides the inverse frequencies, as GGUF files with a `rope_freqs` tensor ask for.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, device: torch.device, factors: torch.Tensor | None = None
    ) -> None:
        frequencies = inverse_frequencies(rope, head_dim)
        if factors is not None:
            frequencies = frequencies / factors
        self.frequencies = frequencies.to(device)
        self.scale = rope.attention_factor

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [tokens, 1, head_dim / 2]: made once per step, shared by all layers."""
        angles = positions.float()[:, None] * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim], rotated to its position."""
    if cpu_elementwise.supports(x) and x.stride(1) == x.shape[2]:
        return cpu_elementwise.rotate(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

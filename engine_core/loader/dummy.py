"""Random weights of the true shapes: for measuring speed and memory without a download."""

from __future__ import annotations

import torch

from engine_core.loader.weights import Weight
from engine_core.models.config import ModelConfig


class DummyCheckpoint:
    """Small normal values, reproducible from the seed. Norm weights are one, so activations stay in range."""

    quantized = False

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | None = None) -> None:
        self.config = config
        self._device = device or torch.device("cpu")
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> Weight:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        return torch.empty(shape, device=self._device).normal_(0.0, 0.02, generator=self._generator)

    def optional(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        return None

    def unused(self) -> list[str]:
        return []

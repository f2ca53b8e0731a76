"""Chooses the attention implementation by name."""

from __future__ import annotations

from collections.abc import Callable

from engine_core.attention.base import Attention, AttentionSpec
from engine_core.errors import UserError


def _torch(spec: AttentionSpec) -> Attention:
    from engine_core.attention.torch import TorchAttention

    return TorchAttention(spec)


IMPLEMENTATIONS: dict[str, Callable[[AttentionSpec], Attention]] = {"torch": _torch}


def make_attention(name: str, spec: AttentionSpec) -> Attention:
    """The implementation `name`, or the best one for the device if it is "auto". The KV pool is not allocated yet."""
    if name == "auto":
        name = "torch"
    if name not in IMPLEMENTATIONS:
        known = ", ".join(sorted(IMPLEMENTATIONS))
        raise UserError(f"--attention {name} is not available here; choose one of: auto, {known}")
    return IMPLEMENTATIONS[name](spec)

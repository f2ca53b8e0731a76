"""Chooses the attention implementation by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine_core.attention.base import Attention, AttentionSpec
from engine_core.errors import UserError


def _torch(spec: AttentionSpec) -> Attention:
    from engine_core.attention.torch import TorchAttention

    return TorchAttention(spec)


def _cpu(spec: AttentionSpec) -> Attention:
    from engine_core.attention.cpu import CpuAttention

    if not CpuAttention.supports(spec):
        raise UserError(
            "--attention cpu needs float32 on the CPU, head sizes that are multiples of 16, and --block-size 16, 32 or "
            "64; use --attention torch"
        )
    return CpuAttention(spec)


IMPLEMENTATIONS: dict[str, Callable[[AttentionSpec], Attention]] = {"torch": _torch, "cpu": _cpu}


BY_DEVICE = {"cpu": ("auto", "cpu", "torch"), "cuda": ("auto", "torch", "triton", "flash_attn")}


def check_attention(name: str, device: torch.device) -> None:
    """Refuse an implementation that the device has not, before anything is loaded."""
    if name not in BY_DEVICE[device.type]:
        raise UserError(
            f"--attention {name} is not there for --device {device.type}; "
            f"choose one of: {', '.join(BY_DEVICE[device.type])}"
        )


def make_attention(name: str, spec: AttentionSpec) -> Attention:
    """The implementation `name`, or the best one for the device if it is "auto". The KV pool is not allocated yet."""
    return IMPLEMENTATIONS[_choose(name, spec)](spec)


def with_half_pool(name: str, spec: AttentionSpec) -> AttentionSpec:
    """`spec` with a KV pool in half precision, if the implementation `name` can have one beside float32."""
    half = replace(spec, kv_dtype=torch.float16)
    return half if _choose(name, half) == "cpu" else spec


def _choose(name: str, spec: AttentionSpec) -> str:
    if name != "auto":
        return name
    if spec.device.type == "cpu":
        from engine_core.attention.cpu import CpuAttention

        return "cpu" if CpuAttention.supports(spec) else "torch"
    return "torch"

"""Chooses the attention implementation by name, and what K and V are kept in."""

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


POOLS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


def with_pool(name: str, spec: AttentionSpec, wanted: str, *, rounds: bool, biased: bool) -> AttentionSpec:
    """`spec` with a KV pool as `wanted`, for the attention implementation `name`.

    "auto": smaller than float32 if the model's products round their inputs anyway (`rounds`) and the implementation
    can. Where K has a bias (`biased`), some of its dimensions may be far larger than others, which int8 would
    lose, so half precision then. Raises UserError if what is wanted is not there.
    """
    if wanted != "auto":
        kinds = [wanted]
    elif rounds:
        kinds = ["float16"] if biased else ["int8", "float16"]
    else:
        return spec
    for kind in kinds:
        found = replace(spec, kv_dtype=POOLS[kind])
        if found.pool_dtype == spec.dtype or _has_kernels(name, found):
            return found
    if wanted == "auto":
        return spec
    raise UserError(
        f"--kv-cache-dtype {wanted} needs the CPU's own kernels: --device cpu, float32, --attention auto or cpu, "
        f"--block-size 16, 32 or 64, head sizes that are multiples of {32 if wanted == 'int8' else 16}; use "
        "--kv-cache-dtype auto"
    )


def _has_kernels(name: str, spec: AttentionSpec) -> bool:
    if spec.device.type != "cpu" or name not in ("auto", "cpu"):
        return False
    from engine_core.attention.cpu import CpuAttention

    return CpuAttention.supports(spec)


def _choose(name: str, spec: AttentionSpec) -> str:
    if name != "auto":
        return name
    return "cpu" if _has_kernels(name, spec) else "torch"

"""How many KV blocks the pool gets, and how long a request may be."""

from __future__ import annotations

import torch

from engine_core.attention.base import AttentionSpec
from engine_core.device import available_memory
from engine_core.errors import UserError
from engine_core.models.config import ModelConfig
from ipc.config import EngineConfig

GIB = 2**30
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The model's own context length, or the shorter one that was asked for."""
    if config.max_model_len is None:
        return model.max_position
    if not 1 <= config.max_model_len <= model.max_position:
        raise UserError(
            f"--max-model-len {config.max_model_len} must be between 1 and the model's context length of "
            f"{model.max_position} tokens"
        )
    return config.max_model_len


def choose_num_blocks(config: EngineConfig, spec: AttentionSpec, max_model_len: int) -> tuple[int, int]:
    """Blocks of the KV pool, with the unused block 0, and the context length it allows: (num_blocks, max_model_len).

    Without --kv-tokens and --kv-bytes the pool takes its share of the free memory, but never more than all requests at
    full length need. Without --max-model-len a pool too small for the model's whole context shortens it.
    """
    block_bytes = spec.kv_bytes_per_token * spec.block_size
    free = _free_bytes(spec.device)
    blocks = _wanted_blocks(config, spec.block_size, block_bytes)
    if blocks is not None:
        if blocks * block_bytes > free:
            wanted = f"--kv-bytes {config.kv_bytes}" if config.kv_bytes else f"--kv-tokens {config.kv_tokens}"
            raise UserError(
                f"{wanted} needs {blocks * block_bytes / GIB:.1f} GiB, but only {free / GIB:.1f} GiB are free; "
                f"--kv-tokens {free // block_bytes * spec.block_size} would fit"
            )
    else:
        share = _pool_bytes(config, spec.device, free)
        needed = config.max_num_seqs * -(-max_model_len // spec.block_size)
        blocks = min(share // block_bytes, needed)
        if blocks < 1:
            raise UserError(
                f"no memory is left for the KV pool: {free / GIB:.2f} GiB are free and one block takes "
                f"{block_bytes / 2**20:.1f} MiB; free some memory or raise {pool_flag(config, spec.device)}"
            )
    capacity = blocks * spec.block_size
    if capacity >= max_model_len:
        return blocks + 1, max_model_len
    if config.max_model_len is not None:
        raise UserError(
            f"the KV pool of {capacity} tokens cannot hold one request of --max-model-len {max_model_len}; raise "
            f"{pool_flag(config, spec.device)} or lower --max-model-len"
        )
    return blocks + 1, capacity


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


def _pool_bytes(config: EngineConfig, device: torch.device, free: int) -> int:
    if device.type == "cpu":
        return int(free * config.cpu_memory_utilization)
    total = int(torch.cuda.mem_get_info(device)[1])
    return max(0, int(free - total * (1.0 - config.gpu_memory_utilization)))


def _wanted_blocks(config: EngineConfig, block_size: int, block_bytes: int) -> int | None:
    """Blocks of the pool if the settings say how large it is to be."""
    if config.kv_tokens is not None and config.kv_bytes is not None:
        raise UserError("--kv-tokens and --kv-bytes both set the size of the KV pool; give one of them")
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // block_size)
    if config.kv_bytes is None:
        return None
    blocks = parse_bytes(config.kv_bytes) // block_bytes
    if blocks < 1:
        raise UserError(f"--kv-bytes {config.kv_bytes} is less than one block takes: {block_bytes / 2**20:.1f} MiB")
    return blocks


def parse_bytes(text: str) -> int:
    """Bytes of "20GiB", "1.5GB" or "1000000"."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    return int(float(text.removesuffix(unit)) * UNITS.get(unit, 1))


def pool_flag(config: EngineConfig, device: torch.device) -> str:
    """The flag that sets the size of the pool."""
    if config.kv_tokens is not None or config.kv_bytes is not None:
        return "--kv-tokens" if config.kv_tokens is not None else "--kv-bytes"
    return "--gpu-memory-utilization" if device.type == "cuda" else "--cpu-memory-utilization"

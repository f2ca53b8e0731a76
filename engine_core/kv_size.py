"""How many KV blocks the pool gets, and how long a request may be."""

from __future__ import annotations

import torch

from engine_core.attention.base import AttentionSpec
from engine_core.device import available_memory
from engine_core.errors import UserError
from engine_core.models.config import ModelConfig
from ipc.config import EngineConfig

GIB = 2**30


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

    Without --kv-tokens the pool takes its share of the free memory, but never more than all requests at full length
    need. Without --max-model-len a pool too small for the model's whole context shortens it.
    """
    block_bytes = spec.kv_bytes_per_token * spec.block_size
    free = _free_bytes(spec.device)
    if config.kv_tokens is not None:
        blocks = -(-config.kv_tokens // spec.block_size)
        if blocks * block_bytes > free:
            raise UserError(
                f"--kv-tokens {config.kv_tokens} needs {blocks * block_bytes / GIB:.1f} GiB, but only "
                f"{free / GIB:.1f} GiB are free; --kv-tokens {free // block_bytes * spec.block_size} would fit"
            )
    else:
        share = _pool_bytes(config, spec.device, free)
        needed = config.max_num_seqs * -(-max_model_len // spec.block_size)
        blocks = min(share // block_bytes, needed)
        if blocks < 1:
            raise UserError(
                f"no memory is left for the KV pool: {free / GIB:.2f} GiB are free and one block takes "
                f"{block_bytes / 2**20:.1f} MiB; free some memory or raise {_share_flag(spec.device)}"
            )
    capacity = blocks * spec.block_size
    if capacity >= max_model_len:
        return blocks + 1, max_model_len
    if config.max_model_len is not None:
        raise UserError(
            f"the KV pool of {capacity} tokens cannot hold one request of --max-model-len {max_model_len}; raise "
            f"{'--kv-tokens' if config.kv_tokens is not None else _share_flag(spec.device)} or lower --max-model-len"
        )
    return blocks + 1, capacity


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


def _pool_bytes(config: EngineConfig, device: torch.device, free: int) -> int:
    if device.type == "cpu":
        return int(free * config.cpu_memory_utilization)
    total = int(torch.cuda.mem_get_info(device)[1])
    return max(0, int(free - total * (1.0 - config.gpu_memory_utilization)))


def _share_flag(device: torch.device) -> str:
    return "--gpu-memory-utilization" if device.type == "cuda" else "--cpu-memory-utilization"

"""What this machine offers: threads, memory, the device and the number format that suit a model."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch

from engine_core.errors import UserError
from ipc.config import EngineConfig
from ipc.cores import cpu_quota

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CGROUP = Path("/sys/fs/cgroup")


def choose_device(config: EngineConfig) -> torch.device:
    """The CUDA device if there is one, unless the config says otherwise."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError(
            "--device cuda: torch sees no CUDA device here; use --device cpu or install a CUDA build of torch"
        )
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """float32 on the CPU, where half precision is slower; bfloat16 on a GPU."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[config.dtype]


def choose_threads(config: EngineConfig) -> int:
    """One per physical core this process may run on: a second thread on the same core only gets in the way.

    OMP_NUM_THREADS says otherwise where it is set, as it does for torch.
    """
    if config.threads is not None:
        if config.threads < 1:
            raise UserError(f"--threads must be at least 1, got {config.threads}")
        return config.threads
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    logical, physical = psutil.cpu_count() or 1, psutil.cpu_count(logical=False) or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    cores = max(1, usable * physical // logical)
    quota = cpu_quota(CGROUP)
    return max(1, min(cores, int(quota))) if quota is not None else cores


def available_memory() -> int:
    """Bytes that can still be allocated on the host: the machine's, or what the container's limit leaves."""
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_number("memory.max")
    used = _cgroup_number("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _cgroup_file_cache()))
    return available


def _cgroup_file_cache() -> int:
    """Bytes of files that were read (a model's, just now) and are dropped when memory is wanted; they count as used."""
    try:
        return int((CGROUP / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _cgroup_number(name: str) -> int | None:
    try:
        return int((CGROUP / name).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None

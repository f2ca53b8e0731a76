"""What the device can move and compute per second at most: measured by a copy and a product, or as the user says."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine_core.device import DTYPES
from ipc.config import EngineOptions

CPU_COPY, CPU_SIZE = 32 * 2**20, 768  # bytes; rows of square matrices
GPU_COPY, GPU_SIZE = 512 * 2**20, 8192
REPEATS = 4


def measure_peaks(device: str, dtype: str, options: EngineOptions) -> dict[str, float]:
    """{"bytes": per second, "flops": per second}, where the given limits win over the measured ones.

    Takes a tenth of a second on a CPU and less on a GPU. Raises RuntimeError if memory is short.
    """
    given = {"bytes": (options.peak_bandwidth or 0.0) * 1e9, "flops": (options.peak_tflops or 0.0) * 1e12}
    try:
        return {
            "bytes": given["bytes"] or _bandwidth(torch.device(device)),
            "flops": given["flops"] or _flops(torch.device(device), DTYPES[dtype]),
        }
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()


@torch.inference_mode()
def _bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy that fits into no cache."""
    size = min(GPU_COPY, torch.cuda.mem_get_info(device)[0] // 8) if device.type == "cuda" else CPU_COPY
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


@torch.inference_mode()
def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a product of square matrices."""
    size = GPU_SIZE if device.type == "cuda" else CPU_SIZE
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 8 * size * size * dtype.itemsize:
        size //= 4
    left = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(left)
    return 2 * size**3 / _best(lambda: torch.mm(left, left, out=out), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs, after one that warms up."""
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])

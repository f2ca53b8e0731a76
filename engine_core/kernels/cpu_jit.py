"""Compiles the CPU kernels with numba, keeps the machine code on disk, and runs a kernel on a team of threads.

A kernel is a C function `void kernel(int64_t *args)`. Every thread of the team calls it with the same arguments; they
share the work by drawing task numbers from `args[0]`, a counter that starts at 0, until none are left. Which thread
computes a value never changes how it is computed, so results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.ir as ir
import numba
import torch
from numba import types
from numba.core import config as numba_config
from numba.extending import intrinsic

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_size_t)
KERNEL_SIGNATURE = types.void(types.CPointer(types.int64))


def cache_directory() -> Path:
    """Where machine code is kept: under the user's cache folder, one folder per version of these sources."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("cpu_*.py")):
        digest.update(source.read_bytes())
    root = os.environ.get("GAPLESS_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "gapless"
    )
    return Path(root) / "kernels" / digest.hexdigest()[:16]


_lock = threading.RLock()


def compile_kernel(function: Callable[..., None]) -> int:
    """Compile `function(args)`, or load it from the disk cache; returns the address of its code.

    Without a writable cache folder the kernel is compiled again at every start.
    """
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        cached = os.access(directory, os.W_OK)
    except OSError:
        cached = False
    with _lock:  # numba reads the folder from a process-wide setting while it decorates
        before = numba_config.CACHE_DIR
        numba_config.CACHE_DIR = str(directory) if cached else before
        try:
            compiled = numba.cfunc(KERNEL_SIGNATURE, cache=cached, error_model="numpy")(function)
        finally:
            numba_config.CACHE_DIR = before
    _alive.append(compiled)
    return int(compiled.address)


_alive: list[Any] = []  # compiled code lives as long as the process: its address is held by callers


def _openmp_parallel() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP runtime that torch itself uses: one pool of threads for both, which sleeps when
    idle. None where torch has no such library."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*")):
        try:
            parallel = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


@cache
def cpu_team() -> Team:
    """The team of this process."""
    return Team()


class Team:
    """The threads that run kernels: as many as torch is set to use when a kernel starts."""

    def __init__(self, openmp: bool = True) -> None:
        self._parallel = _openmp_parallel() if openmp else None
        self._pool: ThreadPoolExecutor | None = None

    def run(self, kernel: int, args: Sequence[int], parallel: bool = True) -> None:
        """Call the kernel at address `kernel` on every thread with `[0, *args]` and return when all are done.

        Work too small to share is done by the calling thread alone if `parallel` is false.
        """
        block = array("q", (0, *args))
        address = block.buffer_info()[0]
        threads = torch.get_num_threads() if parallel else 1
        if threads == 1:
            _CALL(kernel)(address)
            return
        if self._parallel is not None:
            self._parallel(kernel, address, threads, 0)
            return
        call = _CALL(kernel)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kernel")
        others = [self._pool.submit(call, address) for _ in range(threads - 1)]
        call(address)
        wait(others)


@intrinsic  # type: ignore[untyped-decorator]
def next_task(typing_context: Any, args: Any) -> Any:
    """Draw the next task number from the counter in `args[0]` (atomic)."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", values[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


def pointer_view(element: types.Type) -> Any:
    """An intrinsic `view(address)` that turns an integer address into a pointer to `element`."""

    @intrinsic  # type: ignore[untyped-decorator]
    def view(typing_context: Any, address: Any) -> Any:
        result = types.CPointer(element)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(result))

        return result(types.int64), codegen

    return view


floats = pointer_view(types.float32)
halves = pointer_view(types.float16)
int32s = pointer_view(types.int32)
int64s = pointer_view(types.int64)

"""The threads that run CPU kernels. The caller never waits for a thread that has not begun to work.

A kernel's threads draw tasks from one counter, so the caller can finish alone if nobody else comes. That matters where
other processes want the cores too: a barrier waits for the scheduler to bring back a thread that sits behind them, a
few milliseconds in each of the hundreds of kernels of a step.

    caller   publish kernel -> wake sleepers -> draw tasks -> shut the door -> wait for those inside
    worker   wait for a kernel (spin a little, then sleep) -> step inside -> draw tasks if the door is open -> step out

Both loops are compiled like the kernels and run without Python's lock.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import llvmlite.ir as ir
import torch
from numba import types
from numba.extending import intrinsic

from engine_core.kernels.cpu_jit import compile_kernel

# The shared state: int64 cells, those that are written often in cache lines of their own.
GENERATION, OPEN, INSIDE, SLEEPERS = 0, 8, 16, 24
KERNEL, ARGS, SYSCALL, FUTEX, STOP = 32, 33, 34, 35, 36
CELLS = 40
SPINS = 4_000  # about 50 us: longer than from one kernel of a step to the next, shorter than anyone's time slice
FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # private to this process
EVERYBODY = 2**31 - 1

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_size_t)
_PAUSE = {"x86_64": "pause", "AMD64": "pause", "aarch64": "yield", "arm64": "yield"}.get(platform.machine(), "")


@intrinsic  # type: ignore[untyped-decorator]
def load(typing_context: Any, cells: Any, index: Any) -> Any:
    """cells[index], in one order for all threads."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.gep(values[0], [values[1]]), "seq_cst", 8)

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store(typing_context: Any, cells: Any, index: Any, value: Any) -> Any:
    """cells[index] = value, in one order for all threads."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(values[2], builder.gep(values[0], [values[1]]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def add(typing_context: Any, cells: Any, index: Any, value: Any) -> Any:
    """cells[index] += value, in one order for all threads."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(values[0], [values[1]]), values[2], "seq_cst")

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(typing_context: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if _PAUSE:
            builder.asm(ir.FunctionType(ir.VoidType(), []), _PAUSE, "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call_kernel(typing_context: Any, address: Any, args: Any) -> Any:
    """Call the kernel at `address` with the arguments at `args`, both integers."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = ir.IntType(64).as_pointer()
        function = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), [pointer]).as_pointer())
        builder.call(function, [builder.inttoptr(values[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def futex(typing_context: Any, cells: Any, operation: Any, value: Any) -> Any:
    """The system call on the low half of the generation: sleep while it is `value`, or wake up to `value` sleepers."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        cells, operation, value = values
        word = ir.IntType(64)
        where = [builder.gep(cells, [ir.Constant(word, at)]) for at in (SYSCALL, FUTEX)]
        function = ir.FunctionType(word, [word], var_arg=True).as_pointer()
        zero = ir.Constant(word, 0)
        address = builder.ptrtoint(cells, word)
        arguments = [builder.load(where[1]), address, operation, value, zero, zero, zero]
        return builder.call(builder.inttoptr(builder.load(where[0]), function), arguments)

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), codegen


def _lead(cells: Any) -> None:
    store(cells, OPEN, 1)
    add(cells, GENERATION, 1)
    if load(cells, SLEEPERS) > 0:
        futex(cells, FUTEX_WAKE, EVERYBODY)
    call_kernel(cells[KERNEL], cells[ARGS])
    store(cells, OPEN, 0)
    while load(cells, INSIDE) > 0:  # they have each one task at most left
        pause()


def _work(cells: Any) -> None:
    seen = 0
    while load(cells, STOP) == 0:
        spins = 0
        while load(cells, GENERATION) == seen and spins < SPINS:
            pause()
            spins += 1
        if load(cells, GENERATION) == seen:
            add(cells, SLEEPERS, 1)
            futex(cells, FUTEX_WAIT, seen)
            add(cells, SLEEPERS, -1)
            continue
        seen = load(cells, GENERATION)
        add(cells, INSIDE, 1)
        if load(cells, OPEN) == 1:
            call_kernel(cells[KERNEL], cells[ARGS])
        add(cells, INSIDE, -1)


@cache
def cpu_team() -> Team:
    """The team of this process."""
    team = Team()
    os.register_at_fork(after_in_child=team.begin)
    return team


class Team:
    """The threads that run kernels: as many as torch is set to use, or was before. Kernels run one at a time."""

    def __init__(self, native: bool = True) -> None:
        self._futex = FUTEX_NUMBERS.get(platform.machine()) if native and sys.platform == "linux" else None
        if self._futex is not None:
            self._lead = _CALL(compile_kernel("lead", lambda: _lead))
            self._work = _CALL(compile_kernel("work", lambda: _work))
        self.begin()

    def begin(self) -> None:
        """Have no threads yet. A fork takes none along, and may come while the lock is held and threads are inside."""
        self._lock = threading.Lock()
        self._workers: list[threading.Thread] = []
        self._pool: ThreadPoolExecutor | None = None
        self._cells = array("q", bytes(8 * CELLS))
        self._address = self._cells.buffer_info()[0]
        if self._futex is not None:
            syscall = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value
            assert syscall is not None
            self._cells[SYSCALL], self._cells[FUTEX] = syscall, self._futex

    def run(self, kernel: int, args: Sequence[int], parallel: bool = True) -> None:
        """Call the kernel at address `kernel` with `[0, *args]`, on every thread that comes in time; return when all
        its tasks are done.

        Work too small to share is done by the calling thread alone if `parallel` is false.
        """
        block = array("q", (0, *args))
        address = block.buffer_info()[0]
        threads = torch.get_num_threads() if parallel else 1
        if threads == 1:
            _CALL(kernel)(address)
        elif self._futex is None:
            self._run_in_pool(kernel, address, threads)
        else:
            with self._lock:
                while len(self._workers) < threads - 1:
                    worker = threading.Thread(target=self._work, args=(self._address,), name="kernel", daemon=True)
                    worker.start()
                    self._workers.append(worker)
                self._cells[KERNEL], self._cells[ARGS] = kernel, address
                self._lead(self._address)

    def _run_in_pool(self, kernel: int, address: int, threads: int) -> None:
        """Where there is no futex."""
        call = _CALL(kernel)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kernel")
        others = [self._pool.submit(call, address) for _ in range(threads - 1)]
        call(address)
        wait(others)

    def close(self) -> None:
        """End the threads of this team. No kernel may run."""
        if self._pool is not None:
            self._pool.shutdown()
        with self._lock:
            if self._workers:
                self._cells[KERNEL], self._cells[ARGS] = _nothing(), self._address
                self._cells[STOP] = 1
                self._lead(self._address)
            for worker in self._workers:
                worker.join()  # they read the cells to the last
            self._workers.clear()


def _nothing() -> int:
    return compile_kernel("nothing", lambda: lambda args: None)

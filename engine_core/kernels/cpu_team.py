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

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.kernels.cpu_cache import kernel
from engine_core.kernels.cpu_layout import CELLS, COUNT, FUTEX, LAUNCHES, STOP, SYSCALL

FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_size_t)


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
            self._lead = _CALL(kernel("team:lead"))
            self._work = _CALL(kernel("team:work"))
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
                launch = array("q", (kernel, address, 1))
                self._launch(launch.buffer_info()[0], 1, threads)

    def replay(self, launches: NDArray[np.int64]) -> None:
        """Do all `launches` [count, 3] by one call: kernel, address of its arguments, and whether threads share it.

        Each has arguments of its own, of which the first is set to 0.
        """
        if self._futex is not None:
            with self._lock:
                self._launch(launches.ctypes.data, len(launches), torch.get_num_threads())
            return
        for function, address, parallel in launches.tolist():
            ctypes.c_int64.from_address(address).value = 0
            if parallel:
                self._run_in_pool(function, address, torch.get_num_threads())
            else:
                _CALL(function)(address)

    def _launch(self, address: int, count: int, threads: int) -> None:
        """Do `count` launches, which lie at `address`, with `threads` threads or more."""
        while len(self._workers) < threads - 1:
            worker = threading.Thread(target=self._work, args=(self._address,), name="kernel", daemon=True)
            worker.start()
            self._workers.append(worker)
        self._cells[LAUNCHES], self._cells[COUNT] = address, count
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
                self._cells[STOP] = 1
                args = array("q", (0,))
                launch = array("q", (kernel("team:nothing"), args.buffer_info()[0], 1))
                self._launch(launch.buffer_info()[0], 1, 1)
            for worker in self._workers:
                worker.join()  # they read the cells to the last
            self._workers.clear()

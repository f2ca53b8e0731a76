"""Compiles the kernels of steps that are yet to be made, side by side.

Triton compiles a kernel when it is first launched, a second or more each, one after the other. Its compiler releases
the interpreter's lock, so threads share the work; what is in Triton's cache folder is only read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

REPORT_EVERY_S = 0.1


@contextmanager
def compile_only(report: Callable[[float], None]) -> Iterator[None]:
    """Inside, a launch made by this thread compiles its kernel and does not run it. On leaving, all are ready.

    What kernels would have computed is undefined inside: nothing may index by it, or wait for it to be true.

    `report` hears which share of them is done.
    """
    launch, thread = JITFunction.run, threading.get_ident()

    def compile_instead(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, warmup=warmup or threading.get_ident() == thread, **options)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile") as pool, triton.AsyncCompileMode(pool) as mode:
        JITFunction.run = compile_instead
        try:
            yield
        finally:
            JITFunction.run = launch
        _await(mode.raw_futures, report)


def _await(futures: list[Future[Any]], report: Callable[[float], None]) -> None:
    waiting = set(futures)
    while waiting:
        waiting = wait(waiting, REPORT_EVERY_S).not_done
        report(1.0 - len(waiting) / len(futures))

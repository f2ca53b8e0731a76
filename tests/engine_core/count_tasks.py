"""The source of a kernel that shows which tasks were drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_core.kernels.cpu_source.compiler import choose_side, int64s, next_task


def count_tasks() -> Callable[[Any], None]:
    """Arguments: counter, tasks, address of one count per task. Adds 1 to the count of each task it draws."""

    def kernel(args: Any) -> None:
        counts = int64s(args[2])
        side = choose_side(args)
        while True:
            task = next_task(args, side, args[1])
            if task >= args[1]:
                break
            counts[task] += 1

    return kernel

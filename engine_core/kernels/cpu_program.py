"""Launches of CPU kernels that are made ready once and replayed by one call, as a CUDA graph is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine_core.kernels.cpu_team import cpu_team

COUNTER, ROWS = 0, 1  # of every kernel's arguments


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its arguments from number of rows on. `least`: rows from which on threads share it."""

    kernel: int
    args: tuple[int, ...]
    least: int = 1


class Program:
    """`args` [launches, ...] is what the kernels read, counter and number of rows first: set there what has changed."""

    def __init__(self, launches: list[Launch]) -> None:
        width = 2 + max(len(launch.args) for launch in launches)
        self.args = np.zeros((len(launches), width), np.int64)
        self._launches = np.empty((len(launches), 3), np.int64)
        self._least = np.array([launch.least for launch in launches])
        for row, launch in enumerate(launches):
            self.args[row, ROWS : ROWS + len(launch.args)] = launch.args
            self._launches[row, 0] = launch.kernel
        self._launches[:, 1] = self.args.ctypes.data + np.arange(len(launches)) * self.args.strides[0]
        self.share()

    def share(self) -> None:
        """Decide anew which launches threads share: numbers of rows have changed, or that of threads."""
        self._launches[:, 2] = (self.args[:, ROWS] >= self._least) & (torch.get_num_threads() > 1)

    def run(self) -> None:
        """All launches, each when those before it are done."""
        cpu_team().replay(self._launches)

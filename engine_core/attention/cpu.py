"""Attention by the CPU kernels: exact float32, and the same bits however a request's tokens are batched or chunked."""

from __future__ import annotations

import numpy as np
import torch

from engine_core.attention.base import AttentionSpec
from engine_core.attention.torch import zeros
from engine_core.batch import ForwardBatch
from engine_core.kernels.cpu_cache import kernel
from engine_core.kernels.cpu_layout import CONTEXT, GROUP, NO_WINDOW, QUERY_ROWS
from engine_core.kernels.cpu_team import cpu_team

SMALL = 65_536  # products of queries and keys that one thread computes sooner than two could agree to share them


class CpuAttention:
    """KV pool [layers, 2, blocks, kv_heads * block_size * head_dim]; the kernels say how a block is laid out."""

    name = "cpu"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.cache = torch.empty(0)
        self._pools: list[tuple[int, int]] = []  # addresses of K and V, for each layer
        self._tasks = np.empty((0, 3), np.int64)
        self._task_args = (0, 0)
        self._small = False

    @staticmethod
    def supports(spec: AttentionSpec) -> bool:
        """Whether the kernels can compute this shape."""
        return (
            spec.device.type == "cpu"
            and spec.dtype == torch.float32
            and spec.head_dim % GROUP == 0
            and spec.block_size % GROUP == 0
            and CONTEXT % spec.block_size == 0
        )

    def allocate(self, num_blocks: int) -> None:
        s = self.spec
        shape = (s.num_layers, 2, num_blocks, s.num_kv_heads * s.block_size * s.head_dim)
        self.cache = zeros(shape, s.dtype, s.device)
        self._pools = [(keys.data_ptr(), values.data_ptr()) for keys, values in self.cache]

    def prepare(self, batch: ForwardBatch) -> None:
        """Cut the query tokens into tasks, those with the longest contexts first."""
        step = max(1, QUERY_ROWS * self.spec.num_kv_heads // self.spec.num_heads)
        tasks = [
            (row, first, min(step, stop - first))
            for row, (start, stop) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True))
            for first in range(start, stop, step)
        ]
        self._tasks = np.array(tasks, np.int64).reshape(-1, 3)
        contexts = batch.positions.numpy()[self._tasks[:, 1]]
        work = int((self._tasks[:, 2] * (contexts + 1)).sum())
        self._tasks = np.ascontiguousarray(self._tasks[np.argsort(-contexts, kind="stable")])
        self._task_args = (self._tasks.ctypes.data, len(self._tasks))
        self._small = work * self.spec.num_heads * self.spec.head_dim <= SMALL

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        s = self.spec
        kv, tables = self._pools[layer], batch.block_tables
        tokens = q.shape[0]
        out = torch.empty(tokens, s.num_heads * s.head_dim)
        written = (k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), batch.slot_mapping.data_ptr(), *kv)
        team = cpu_team()
        team.run(
            kernel("attention:write"),
            (*written, tokens, s.num_kv_heads, s.head_dim, s.block_size),
            tokens >= QUERY_ROWS,
        )
        where = (*self._task_args, q.data_ptr(), q.stride(0), out.data_ptr())
        reads = (batch.positions.data_ptr(), tables.data_ptr(), tables.stride(0), *kv)
        shape = (
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            s.block_size,
            int(s.scale * 2.0**60),
            s.window(layer) or NO_WINDOW,
        )
        team.run(kernel("attention:attend"), (*where, *reads, *shape), not self._small)
        return out

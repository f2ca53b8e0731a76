"""Attention by the CPU kernels: in float32, and the same bits however a request's tokens are batched or chunked.

The KV pool is float32 too, or half precision or int8 if `kv_dtype` of its spec says so."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.attention.base import AttentionSpec
from engine_core.attention.torch import zeros
from engine_core.batch import ForwardBatch
from engine_core.kernels.cpu_cache import dot_width, kernel, tile_vectors
from engine_core.kernels.cpu_elementwise import fixed_point
from engine_core.kernels.cpu_layout import BLOCK, CONTEXT, GROUP, NO_WINDOW, QUERY_ROWS, TASK_NUMBERS
from engine_core.kernels.cpu_team import cpu_team

SMALL = 65_536  # products of queries and keys that one thread computes sooner than two could agree to share them


class CpuAttention:
    """KV pool [layers, 2, blocks, numbers of a block]; `PoolFormat` says how they lie there."""

    name = "cpu"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        bits = 8 * spec.pool_dtype.itemsize
        self.enter_kernel = kernel("attention:enter", bits)
        self.attend_kernel = kernel("attention:attend", tile_vectors(), bits, dot_width())
        self._write_kernel = kernel("attention:write", bits)
        self.cache = torch.empty(0)
        self.pools: list[tuple[int, int]] = []  # addresses of K and V, for each layer
        self._tasks = self._chosen = np.empty((0, TASK_NUMBERS), np.int64)

    @staticmethod
    def supports(spec: AttentionSpec) -> bool:
        """Whether the kernels can compute this shape."""
        return (
            spec.device.type == "cpu"
            and spec.dtype == torch.float32
            and spec.pool_dtype in (torch.float32, torch.float16, torch.int8)
            and spec.head_dim % (BLOCK if spec.pool_dtype == torch.int8 else GROUP) == 0
            and spec.block_size % GROUP == 0
            and CONTEXT % spec.block_size == 0
        )

    def allocate(self, num_blocks: int) -> None:
        s = self.spec
        block_bytes = s.num_kv_heads * s.block_size * s.head_bytes
        shape = (s.num_layers, 2, num_blocks, block_bytes // s.pool_dtype.itemsize)
        self.cache = zeros(shape, s.pool_dtype, s.device)
        self.pools = [(keys.data_ptr(), values.data_ptr()) for keys, values in self.cache]

    def prepare(self, batch: ForwardBatch) -> None:
        """Cut the query tokens into tasks, those with the longest contexts first."""
        rows, positions = batch.num_rows, batch.positions.numpy()
        if rows == len(positions):  # one each, most often
            tasks = np.ones((rows, TASK_NUMBERS), np.int64)
            tasks[:, (0, 1, 3)] = np.argsort(-positions, kind="stable")[:, None]
        else:
            step = max(1, QUERY_ROWS * self.spec.num_kv_heads // self.spec.num_heads)
            pieces = [
                (row, first, min(step, stop - first), first)
                for row, (start, stop) in enumerate(itertools.pairwise(batch.query_starts.tolist()))
                for first in range(start, stop, step)
            ]
            tasks = _longest_first(np.array(pieces, np.int64).reshape(-1, TASK_NUMBERS), positions)
        self._tasks = tasks

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        s = self.spec
        tokens = q.shape[0]
        out = torch.empty(tokens, s.num_heads * s.head_dim)
        team = cpu_team()
        new = (tokens, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), batch.slot_mapping.data_ptr())
        shape = (s.num_kv_heads, s.head_dim, s.block_size)
        team.run(self._write_kernel, (*new, *self.pools[layer], *shape), tokens >= QUERY_ROWS)
        args = (*self.step_args(batch), *self.layer_args(layer, q.data_ptr(), q.stride(0), out.data_ptr()))
        work = int((self._tasks[:, 2] * (batch.positions.numpy()[self._tasks[:, 1]] + 1)).sum())
        team.run(self.attend_kernel, args, work * s.num_heads * s.head_dim > SMALL)
        return out

    def step_args(self, batch: ForwardBatch) -> tuple[int, ...]:
        """What `attend` is told of the step that was prepared, the same in all layers: its first arguments."""
        return _step_args(self._tasks, batch)

    def chosen_args(self, batch: ForwardBatch) -> tuple[int, ...]:
        """Likewise of those query tokens alone whose logits are needed; what they get lies row by row."""
        tokens = batch.logits_rows.numpy()
        tasks = np.ones((len(tokens), TASK_NUMBERS), np.int64)
        tasks[:, 0] = np.searchsorted(batch.query_starts, tokens, side="right") - 1
        tasks[:, 1], tasks[:, 3] = tokens, np.arange(len(tokens))
        self._chosen = _longest_first(tasks, batch.positions.numpy())
        return _step_args(self._chosen, batch)

    def layer_args(self, layer: int, q: int, q_stride: int, out: int) -> tuple[int, ...]:
        """The other arguments of `attend`, the same in all steps as long as the addresses `q` and `out` are."""
        s = self.spec
        shape = (s.num_heads, s.num_kv_heads, s.head_dim, s.block_size)
        return (q, q_stride, out, *self.pools[layer], *shape, fixed_point(s.scale), s.window(layer) or NO_WINDOW)


def _step_args(tasks: NDArray[np.int64], batch: ForwardBatch) -> tuple[int, ...]:
    tables = batch.block_tables
    return len(tasks), tasks.ctypes.data, batch.positions.data_ptr(), tables.data_ptr(), tables.stride(0)


def _longest_first(tasks: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those with the longest contexts: whoever is still busy when no task is left should not be so for long."""
    return np.ascontiguousarray(tasks[np.argsort(-positions[tasks[:, 1]], kind="stable")])

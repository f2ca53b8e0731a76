"""Causal attention over the paged KV pool: write K and V, then attend through block tables, to all tokens before a
query or to a window of them.

Each query attends to its context in chunks of `CHUNK` positions with a running softmax. Chunk borders and the order of
sums depend only on positions, so a query's result is the same bit for bit whether it is decoded alone, sits in a batch,
or is one of many in a prompt chunk.

Per layer the pool holds K as [blocks, kv_heads, head_dim, block_size] (a vector is eight positions of one dimension)
and V as [blocks, kv_heads, block_size, head_dim] (a vector is eight dimensions of one position).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from engine_core.kernels.cpu_jit import compile_kernel, floats, int32s, int64s, next_task
from engine_core.kernels.cpu_tile import GROUP, dense_tile
from engine_core.kernels.cpu_vector import exp_row, row_max

CHUNK = 64  # positions per softmax step
NO_WINDOW = 1 << 40
QUERY_ROWS = 48  # query tokens times heads that share a KV head, in a task


def _write(args: Any) -> None:
    """Arguments: counter, k, k_stride, v, v_stride, slots, keys, values, tokens, kv_heads, head_dim, block_size."""
    k, k_stride, v, v_stride = args[1], args[2], args[3], args[4]
    slots, keys, values = int64s(args[5]), floats(args[6]), floats(args[7])
    tokens, kv_heads, head_dim, block_size = args[8], args[9], args[10], args[11]
    while True:
        token = next_task(args)
        if token >= tokens:
            break
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(kv_heads):
            start = (block * kv_heads + head) * head_dim * block_size
            k_row = floats(k + (token * k_stride + head * head_dim) * 4)
            v_row = floats(v + (token * v_stride + head * head_dim) * 4)
            for d in range(head_dim):
                keys[start + d * block_size + offset] = k_row[d]
                values[start + offset * head_dim + d] = v_row[d]


def _attend() -> Callable[[Any], None]:
    """Arguments: counter, tasks, num_tasks, q, q_stride, out, positions, block_tables, table_stride, keys, values,
    heads, kv_heads, head_dim, block_size, scale * 2^60, window.

    `tasks` is int64 [num_tasks, 3]: the batch row, its first query token, and how many of them. Each stands for one
    task per KV head.
    """
    score1, score2, score4, score6 = (dense_tile(rows, 2, False) for rows in (1, 2, 4, 6))
    value1, value2, value4, value6 = (dense_tile(rows, 2, True) for rows in (1, 2, 4, 6))

    def kernel(args: Any) -> None:
        tasks, num_tasks, q, q_stride, out = int64s(args[1]), args[2], args[3], args[4], args[5]
        positions, tables, table_stride = int64s(args[6]), args[7], args[8]
        keys, values, heads, kv_heads, dim, size = args[9], args[10], args[11], args[12], args[13], args[14]
        scale, window = np.float32(args[15] / 2.0**60), args[16]
        shared = heads // kv_heads
        most = max(shared, QUERY_ROWS)
        queries = np.empty((most, dim), np.float32)
        scores = np.empty((most, CHUNK), np.float32)
        total = np.empty((most, dim), np.float32)
        largest, weight = np.empty(most, np.float32), np.empty(most, np.float32)
        while True:
            task = next_task(args)
            if task >= num_tasks * kv_heads:
                break
            kv_head, entry = task % kv_heads, task // kv_heads * 3
            first, count = tasks[entry + 1], tasks[entry + 2]
            table = int32s(tables + tasks[entry] * table_stride * 4)
            rows = count * shared
            for r in range(rows):
                source = floats(q + ((first + r // shared) * q_stride + (kv_head * shared + r % shared) * dim) * 4)
                for d in range(dim):
                    queries[r, d] = source[d] * scale
                    total[r, d] = np.float32(0)
                largest[r], weight[r] = np.float32(-np.inf), np.float32(0)
            context = positions[first + count - 1] + 1
            oldest = max(positions[first] + 1 - window, 0)  # what the task's first query sees
            for start in range(oldest // CHUNK * CHUNK, context, CHUNK):
                stop = min(start + CHUNK, context)
                for at in range(start, stop, GROUP):  # scores = queries @ keys
                    block = (table[at // size] * kv_heads + kv_head) * dim * size
                    k_at = keys + (block + at % size) * 4
                    r = 0
                    while r < rows:
                        a, c = queries.ctypes.data + r * dim * 4, scores.ctypes.data + (r * CHUNK + at - start) * 4
                        if rows - r >= 6:
                            score6(a, dim, k_at, size, dim, c, CHUNK)
                            r += 6
                        elif rows - r >= 4:
                            score4(a, dim, k_at, size, dim, c, CHUNK)
                            r += 4
                        elif rows - r >= 2:
                            score2(a, dim, k_at, size, dim, c, CHUNK)
                            r += 2
                        else:
                            score1(a, dim, k_at, size, dim, c, CHUNK)
                            r += 1
                width = (stop - start + 7) // 8
                for r in range(rows):  # softmax so far
                    known = positions[first + r // shared] + 1 - start
                    for j in range(max(known, 0), width * 8):
                        scores[r, j] = np.float32(-np.inf)
                    unseen = known - window
                    for j in range(min(max(unseen, 0), width * 8)):
                        scores[r, j] = np.float32(-np.inf)
                    if known <= 0 or unseen >= CHUNK:
                        for j in range(width * 8):
                            scores[r, j] = np.float32(0)
                        continue
                    s_at = scores.ctypes.data + r * CHUNK * 4
                    highest = max(largest[r], row_max(s_at, width))
                    part = exp_row(s_at, width, highest)
                    if highest > largest[r]:
                        shrink = np.float32(np.exp(largest[r] - highest))
                        weight[r] *= shrink
                        for d in range(dim):
                            total[r, d] *= shrink
                        largest[r] = highest
                    weight[r] += part
                for at in range(start, stop, size):  # total += scores @ values
                    block = (table[at // size] * kv_heads + kv_head) * dim * size
                    used = min(size, stop - at)
                    for d in range(0, dim, GROUP):
                        v_at = values + (block + d) * 4
                        r = 0
                        while r < rows:
                            a, c = (
                                scores.ctypes.data + (r * CHUNK + at - start) * 4,
                                total.ctypes.data + (r * dim + d) * 4,
                            )
                            if rows - r >= 6:
                                value6(a, CHUNK, v_at, dim, used, c, dim)
                                r += 6
                            elif rows - r >= 4:
                                value4(a, CHUNK, v_at, dim, used, c, dim)
                                r += 4
                            elif rows - r >= 2:
                                value2(a, CHUNK, v_at, dim, used, c, dim)
                                r += 2
                            else:
                                value1(a, CHUNK, v_at, dim, used, c, dim)
                                r += 1
            for r in range(rows):
                target = floats(out + ((first + r // shared) * heads + kv_head * shared + r % shared) * dim * 4)
                for d in range(dim):
                    target[d] = total[r, d] / weight[r]

    return kernel


@cache
def write_kernel() -> int:
    return compile_kernel("write_kv", lambda: _write)


@cache
def attend_kernel() -> int:
    return compile_kernel("attend", _attend)

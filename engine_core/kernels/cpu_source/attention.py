"""Causal attention over the paged KV pool: write K and V, then attend through block tables, to all tokens before a
query or to a window of them.

Each query attends to its context in chunks of `CONTEXT` positions with a running softmax. Chunk borders and the order
of sums depend only on positions, so a query's result is the same bit for bit whether it is decoded alone, sits in a
batch, or is one of many in a prompt chunk.

Per layer the pool holds K as [blocks, kv_heads, head_dim, block_size] (a vector is eight positions of one dimension)
and V as [blocks, kv_heads, block_size, head_dim] (a vector is eight dimensions of one position).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from engine_core.kernels.cpu_layout import CONTEXT, GROUP, QUERY_ROWS
from engine_core.kernels.cpu_source.compiler import floats, int32s, int64s, larger, next_task, smaller, stack
from engine_core.kernels.cpu_source.elementwise import rotate_head
from engine_core.kernels.cpu_source.tile import dense_tile
from engine_core.kernels.cpu_source.vector import exp_row, prefetch, row_max, square_sum


def write() -> Callable[[Any], None]:
    """Arguments: counter, tokens, k, k_stride, v, v_stride, slots, keys, values, kv_heads, head_dim, block_size."""

    def kernel(args: Any) -> None:
        tokens, k, k_stride, v, v_stride = args[1], args[2], args[3], args[4], args[5]
        slots, keys, values = int64s(args[6]), floats(args[7]), floats(args[8])
        kv_heads, head_dim, block_size = args[9], args[10], args[11]
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

    return kernel


def enter() -> Callable[[Any], None]:
    """Arguments: counter, tokens, positions, slots, cos, sin, qkv, its stride, bias, norm of Q, norm of K (each 0 if
    there is none), eps * 2^60, keys, values, heads, kv_heads, head_dim, block_size.

    All that comes between the product and the scores: Q [tokens, heads, head_dim] is turned in place, K and V go to
    the pool. `cos` and `sin` have a row for each position.
    """

    def kernel(args: Any) -> None:
        tokens, positions, slots, bias = args[1], int64s(args[2]), int64s(args[3]), floats(args[8])
        eps, keys, values = np.float32(args[11] / 2.0**60), args[12], args[13]
        heads, kv_heads, dim, size = args[14], args[15], args[16], args[17]
        half = dim // 2
        while True:
            token = next_task(args)
            if token >= tokens:
                break
            row = args[6] + token * args[7] * 4
            if args[8] != 0:
                x = floats(row)
                for i in range((heads + 2 * kv_heads) * dim):
                    x[i] += bias[i]
            angle = positions[token] * half * 4
            cos, sin = floats(args[4] + angle), floats(args[5] + angle)
            block, offset = slots[token] // size, slots[token] % size
            for head in range(heads + kv_heads):
                address = row + head * dim * 4
                source = floats(address)
                weight = args[9] if head < heads else args[10]
                if weight != 0:
                    scale = np.float32(1) / np.sqrt(square_sum(address, dim // 8) / np.float32(dim) + eps)
                    factors = floats(weight)
                    for i in range(dim):
                        source[i] = source[i] * scale * factors[i]
                if head < heads:
                    rotate_head(source, source, 1, half, cos, sin)
                else:
                    start = (block * kv_heads + head - heads) * dim * size + offset
                    rotate_head(source, floats(keys + start * 4), size, half, cos, sin)
            for head in range(kv_heads):
                source = floats(row + (heads + kv_heads + head) * dim * 4)
                target = floats(values + ((block * kv_heads + head) * size + offset) * dim * 4)
                for i in range(dim):
                    target[i] = source[i]

    return kernel


@numba.njit(inline="always")
def fetch(pool, table, kv_heads, kv_head, start, stop, size, block_bytes):  # type: ignore[no-untyped-def]
    """Have K or V of the positions from `start` to `stop` come from memory while something else is computed.

    Blocks lie anywhere in the pool, so the processor does not know which comes next.
    """
    for block in range(start // size, (stop + size - 1) // size):
        address = pool + (table[block] * kv_heads + kv_head) * block_bytes
        for line in range(block_bytes // 64):
            prefetch(address + line * 64)


def attend() -> Callable[[Any], None]:
    """Arguments: counter, num_tasks, tasks, positions, block_tables, table_stride, q, q_stride, out, keys, values,
    heads, kv_heads, head_dim, block_size, scale * 2^60, window.

    `tasks` is int64 [num_tasks, 3]: the batch row, its first query token, and how many of them. Each stands for one
    task per KV head.
    """
    score1, score2, score3, score4, score6 = (dense_tile(rows, 2, False) for rows in (1, 2, 3, 4, 6))
    value1, value2, value3, value4, value6 = (dense_tile(rows, 2, True) for rows in (1, 2, 3, 4, 6))

    def kernel(args: Any) -> None:
        num_tasks, tasks, positions, tables = args[1], int64s(args[2]), int64s(args[3]), args[4]
        table_stride, q, q_stride, out = args[5], args[6], args[7], args[8]
        keys, values, heads, kv_heads, dim, size = args[9], args[10], args[11], args[12], args[13], args[14]
        scale, window = np.float32(args[15] / 2.0**60), args[16]
        shared = heads // kv_heads
        most = larger(shared, QUERY_ROWS)
        scratch = stack((2 * dim + CONTEXT + 2) * most * 4)  # of float32, for each of `most` rows:
        q_at, total_at, scores_at = scratch, scratch + most * dim * 4, scratch + most * dim * 8
        largest, weight = floats(scores_at + most * CONTEXT * 4), floats(scores_at + most * (CONTEXT + 1) * 4)
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
                query, total = floats(q_at + r * dim * 4), floats(total_at + r * dim * 4)
                for d in range(dim):
                    query[d] = source[d] * scale
                    total[d] = np.float32(0)
                largest[r], weight[r] = np.float32(-np.inf), np.float32(0)
            context = positions[first + count - 1] + 1
            oldest = larger(positions[first] + 1 - window, 0)  # what the task's first query sees
            begin, block_bytes = oldest // CONTEXT * CONTEXT, dim * size * 4
            fetch(keys, table, kv_heads, kv_head, begin, smaller(begin + CONTEXT, context), size, block_bytes)
            for start in range(begin, context, CONTEXT):
                stop = smaller(start + CONTEXT, context)
                fetch(values, table, kv_heads, kv_head, start, stop, size, block_bytes)
                for at in range(start, stop, GROUP):  # scores = queries @ keys
                    block = (table[at // size] * kv_heads + kv_head) * dim * size
                    k_at = keys + (block + at % size) * 4
                    r = 0
                    while r < rows:
                        a, c = q_at + r * dim * 4, scores_at + (r * CONTEXT + at - start) * 4
                        if rows - r >= 6:
                            score6(a, dim, k_at, size, dim, c, CONTEXT)
                            r += 6
                        elif rows - r >= 4:
                            score4(a, dim, k_at, size, dim, c, CONTEXT)
                            r += 4
                        elif rows - r >= 3:
                            score3(a, dim, k_at, size, dim, c, CONTEXT)
                            r += 3
                        elif rows - r >= 2:
                            score2(a, dim, k_at, size, dim, c, CONTEXT)
                            r += 2
                        else:
                            score1(a, dim, k_at, size, dim, c, CONTEXT)
                            r += 1
                fetch(keys, table, kv_heads, kv_head, stop, smaller(stop + CONTEXT, context), size, block_bytes)
                width = (stop - start + 7) // 8
                for r in range(rows):  # softmax so far
                    known = positions[first + r // shared] + 1 - start
                    unseen = known - window
                    s_at = scores_at + r * CONTEXT * 4
                    scores = floats(s_at)
                    for j in range(larger(known, 0), width * 8):
                        scores[j] = np.float32(-np.inf)
                    for j in range(smaller(larger(unseen, 0), width * 8)):
                        scores[j] = np.float32(-np.inf)
                    if known <= 0 or unseen >= CONTEXT:
                        for j in range(width * 8):
                            scores[j] = np.float32(0)
                        continue
                    highest = larger(largest[r], row_max(s_at, width))
                    row_weight = exp_row(s_at, width, highest)
                    if highest > largest[r]:
                        shrink = np.float32(np.exp(largest[r] - highest))
                        weight[r] *= shrink
                        total = floats(total_at + r * dim * 4)
                        for d in range(dim):
                            total[d] *= shrink
                        largest[r] = highest
                    weight[r] += row_weight
                for part in range((stop - start + size - 1) // size):  # total += scores @ values
                    at = start + part * size  # in a range it would bring the exception for steps of zero along
                    block = (table[at // size] * kv_heads + kv_head) * dim * size
                    used = smaller(size, stop - at)
                    for d in range(0, dim, GROUP):
                        v_at = values + (block + d) * 4
                        r = 0
                        while r < rows:
                            a, c = scores_at + (r * CONTEXT + at - start) * 4, total_at + (r * dim + d) * 4
                            if rows - r >= 6:
                                value6(a, CONTEXT, v_at, dim, used, c, dim)
                                r += 6
                            elif rows - r >= 4:
                                value4(a, CONTEXT, v_at, dim, used, c, dim)
                                r += 4
                            elif rows - r >= 3:
                                value3(a, CONTEXT, v_at, dim, used, c, dim)
                                r += 3
                            elif rows - r >= 2:
                                value2(a, CONTEXT, v_at, dim, used, c, dim)
                                r += 2
                            else:
                                value1(a, CONTEXT, v_at, dim, used, c, dim)
                                r += 1
            for r in range(rows):
                target = floats(out + ((first + r // shared) * heads + kv_head * shared + r % shared) * dim * 4)
                total = floats(total_at + r * dim * 4)
                for d in range(dim):
                    target[d] = total[d] / weight[r]

    return kernel

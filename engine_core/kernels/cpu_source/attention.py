"""Causal attention over the paged KV pool: write K and V, then attend through block tables, to all tokens before a
query or to a window of them.

Each query attends to its context in chunks of `CONTEXT` positions with a running softmax. Chunk borders and the order
of sums depend only on positions, so a query's result is the same bit for bit whether it is decoded alone, sits in a
batch, or is one of many in a prompt chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from engine_core.kernels.cpu_layout import (
    BLOCK,
    CONTEXT,
    GROUP,
    KEY_LINES,
    KEY_OFFSET,
    QUERY_ROWS,
    TASK_NUMBERS,
    X_BLOCK_BYTES,
    PoolFormat,
)
from engine_core.kernels.cpu_source.compiler import (
    choose_side,
    floats,
    int32s,
    int64s,
    larger,
    next_task,
    smaller,
    stack,
)
from engine_core.kernels.cpu_source.pool import key_writer, value_writer
from engine_core.kernels.cpu_source.rounding import quantize_row
from engine_core.kernels.cpu_source.scores import (
    GROUPS,
    PLACES,
    VALUE_SCALES,
    VALUES,
    score_tiles,
    tile_rows,
    value_tiles,
)
from engine_core.kernels.cpu_source.vector import (
    LANES,
    add_rows,
    exp_row,
    multiply_rows,
    rotate_head,
    scale_row,
    square_sum,
    visible_max,
)

MANY = 64  # tokens from which on a task has several: neighbours in a block share cache lines


def write(bits: int) -> Callable[[Any], None]:
    """Arguments: counter, tokens, k, k_stride, v, v_stride, slots, keys, values, kv_heads, head_dim, block_size.

    `bits`: of the pool's format.
    """
    write_pair = pair_writer(PoolFormat(bits))

    def kernel(args: Any) -> None:
        tokens, k, k_stride, v, v_stride = args[1], args[2], args[3], args[4], args[5]
        slots, keys, values = int64s(args[6]), args[7], args[8]
        kv_heads, dim, size = args[9], args[10], args[11]
        scratch = stack(dim // BLOCK * X_BLOCK_BYTES)
        step = GROUP if tokens >= MANY else 1
        side, tasks = choose_side(args), (tokens + step - 1) // step
        while True:
            first = next_task(args, side, tasks) * step
            if first >= tokens:
                break
            for token in range(first, smaller(first + step, tokens)):
                k_row, v_row = k + token * k_stride * 4, v + token * v_stride * 4
                write_pair(k_row, v_row, slots[token], keys, values, kv_heads, dim, size, scratch)

    return kernel


def enter(bits: int) -> Callable[[Any], None]:
    """Arguments: counter, tokens, positions, slots, cos, sin, qkv, its stride, bias, norm of Q, norm of K (each 0 if
    there is none), eps * 2^60, keys, values, heads, kv_heads, head_dim, block_size.

    All that comes between the product and the scores: Q and K [tokens, heads, head_dim] are turned in place, K and V go
    to the pool. `cos` and `sin` have a row for each position. `bits`: of the pool's format.
    """
    write_pair = pair_writer(PoolFormat(bits))

    def kernel(args: Any) -> None:
        tokens, positions, slots, bias = args[1], int64s(args[2]), int64s(args[3]), args[8]
        eps, keys, values = np.float32(args[11] / 2.0**60), args[12], args[13]
        heads, kv_heads, dim, size = args[14], args[15], args[16], args[17]
        width, scratch = (heads + 2 * kv_heads) * dim, stack(dim // BLOCK * X_BLOCK_BYTES)
        step = GROUP if tokens >= MANY else 1
        side, tasks = choose_side(args), (tokens + step - 1) // step
        while True:
            first = next_task(args, side, tasks) * step
            if first >= tokens:
                break
            for token in range(first, smaller(first + step, tokens)):
                row = args[6] + token * args[7] * 4
                if bias != 0:
                    add_rows(row, bias, row, width // LANES)
                angle = positions[token] * dim // 2 * 4
                for head in range(heads + kv_heads):
                    address = row + head * dim * 4
                    weight = args[9] if head < heads else args[10]
                    if weight != 0:
                        scale = np.float32(1) / np.sqrt(square_sum(address, dim // LANES) / np.float32(dim) + eps)
                        scale_row(address, scale, weight, address, dim // LANES)
                    rotate_head(address, address, args[4] + angle, args[5] + angle, dim // 2)
                k_row, v_row = row + heads * dim * 4, row + (heads + kv_heads) * dim * 4
                write_pair(k_row, v_row, slots[token], keys, values, kv_heads, dim, size, scratch)

    return kernel


def sizer(form: PoolFormat) -> Any:
    """A function `head_size(dim, size)`: bytes of K or V of a head in a KV block of `size` positions."""
    item, scales = form.item, form.scales

    @numba.njit(inline="always")
    def head_size(dim, size):  # type: ignore[no-untyped-def]
        return size * (dim * item + dim // BLOCK * scales)

    return head_size


def pair_writer(form: PoolFormat) -> Any:
    """A function `write(k, v, slot, keys, values, kv_heads, dim, size, scratch)`: K and V of all heads of a token."""
    write_key, write_value, item, cell = key_writer(form), value_writer(form), form.item, form.cell
    head_size = sizer(form)

    @numba.njit(inline="always")
    def write_pair(k, v, slot, keys, values, kv_heads, dim, size, scratch):  # type: ignore[no-untyped-def]
        head_bytes = head_size(dim, size)
        block, offset = slot // size, slot % size
        for head in range(kv_heads):
            start, source = (block * kv_heads + head) * head_bytes, head * dim * 4
            write_key(k + source, keys + start + offset * cell, size * cell, dim, scratch)
            at = values + start
            write_value(v + source, at + offset * dim * item, at + (size * dim + offset * 4), dim)

    return write_pair


def locator(form: PoolFormat) -> Any:
    """A function `locate(places, keys, values, shape, table, kv_head, start, stop)` that writes down where K and V of a
    chunk's groups of positions lie, and V's scales. Those beyond `stop` stand for the last: what is computed of them is
    not used."""
    item, cell, head_size = form.item, form.cell, sizer(form)

    @numba.njit(inline="always")
    def locate(places, keys, values, shape, table, kv_head, start, stop):  # type: ignore[no-untyped-def]
        kv_heads, dim, size = shape
        head_bytes = head_size(dim, size)
        for group in range(GROUPS):
            at = smaller(start + group * GROUP, (stop - 1) // GROUP * GROUP)
            block, offset = (table[at // size] * kv_heads + kv_head) * head_bytes, at % size
            places[group] = keys + block + offset * cell
            places[GROUPS + group] = values + block + offset * dim * item
            places[2 * GROUPS + group] = values + block + size * dim + offset * 4

    return locate


@numba.njit(inline="always")
def extent(tasks, entry, positions, window):  # type: ignore[no-untyped-def]
    """The first position of the chunks that a task attends to, and the end of the last."""
    first, last = tasks[entry + 1], tasks[entry + 1] + tasks[entry + 2] - 1
    oldest = larger(positions[first] + 1 - window, 0)  # what the task's first query sees
    return oldest // CONTEXT * CONTEXT, positions[last] + 1


def attend(wide: int, bits: int, dot_width: int) -> Callable[[Any], None]:
    """Arguments: counter, num_tasks, tasks, positions, block_tables, table_stride, q, q_stride, out, keys, values,
    heads, kv_heads, head_dim, block_size, scale * 2^60, window.

    `tasks` is int64 [num_tasks, TASK_NUMBERS]: the batch row, its first query token, how many of them, and the row
    of `out` for the first. Each stands for one task per KV head. `wide` is how many vectors of 16 floats a row of a
    tile has at most, `bits` the pool's format and `dot_width` as for linear layers.

    A thread knows its next task before it begins one, so that what comes next is always fetched while something else
    is computed: the next K with the sums, V with the scores before, or as int8, where those take no time, with the next
    K. Blocks lie anywhere in the pool, so the processor cannot know.
    """
    form = PoolFormat(bits)
    item, cell, scaled, locate = form.item, form.cell, form.scaled, locator(form)
    score = score_tiles(wide, form, dot_width)
    wide_sum, narrow_sum = value_tiles(wide, form), value_tiles(1, form)

    def kernel(args: Any) -> None:
        num_tasks, tasks, positions, tables = args[1], int64s(args[2]), int64s(args[3]), args[4]
        table_stride, q, q_stride, out = args[5], args[6], args[7], args[8]
        keys, values, heads, kv_heads, dim, size = args[9], args[10], args[11], args[12], args[13], args[14]
        scale, window = np.float32(args[15] / 2.0**60), args[16]
        shape = kv_heads, dim, size
        shared, step = heads // kv_heads, size * cell
        most = larger(shared, QUERY_ROWS)
        rounded_bytes = dim // BLOCK * X_BLOCK_BYTES if scaled else 0  # of a query
        here = stack(((2 * dim + CONTEXT + 2) * 4 + rounded_bytes) * most + 2 * PLACES)
        ahead = here + PLACES
        q_at = here + 2 * PLACES  # float32, for each of `most` rows
        total_at, scores_at = q_at + most * dim * 4, q_at + most * dim * 8
        largest, weight = floats(scores_at + most * CONTEXT * 4), floats(scores_at + most * (CONTEXT + 1) * 4)
        rounded_at = scores_at + most * (CONTEXT + 2) * 4
        queries, query_bytes = (rounded_at, rounded_bytes) if scaled else (q_at, dim * 4)
        side, all_tasks = choose_side(args), num_tasks * kv_heads
        task, located = next_task(args, side, all_tasks), False
        while task < all_tasks:
            following = next_task(args, side, all_tasks)
            kv_head, entry = task % kv_heads, task // kv_heads * TASK_NUMBERS
            first, count, first_out = tasks[entry + 1], tasks[entry + 2], tasks[entry + 3]
            table = int32s(tables + tasks[entry] * table_stride * 4)
            rows = count * shared
            for r in range(rows):
                source = floats(q + ((first + r // shared) * q_stride + (kv_head * shared + r % shared) * dim) * 4)
                query, total = floats(q_at + r * dim * 4), floats(total_at + r * dim * 4)
                for d in range(dim):
                    query[d] = source[d] * scale
                    total[d] = np.float32(0)
                largest[r], weight[r] = np.float32(-np.inf), np.float32(0)
                if scaled:
                    blocks = dim // BLOCK
                    quantize_row(q_at + r * dim * 4, queries + r * query_bytes, X_BLOCK_BYTES, blocks, KEY_OFFSET)
            begin, context = extent(tasks, entry, positions, window)
            if not located:
                locate(int64s(here), keys, values, shape, table, kv_head, begin, context)
            located = True
            for start in range(begin, context, CONTEXT):
                stop = smaller(start + CONTEXT, context)
                if stop < context:
                    locate(int64s(ahead), keys, values, shape, table, kv_head, stop, context)
                elif following < all_tasks:
                    next_entry, next_head = following // kv_heads * TASK_NUMBERS, following % kv_heads
                    next_table = int32s(tables + tasks[next_entry] * table_stride * 4)
                    next_begin, next_context = extent(tasks, next_entry, positions, window)
                    locate(int64s(ahead), keys, values, shape, next_table, next_head, next_begin, next_context)
                groups = (stop - start + GROUP - 1) // GROUP
                for group in range(0, groups, wide):  # scores = queries @ keys
                    k_at, r = here + group * 8, 0
                    while r < rows:
                        a, c = queries + r * query_bytes, scores_at + (r * CONTEXT + group * GROUP) * 4
                        number = tile_rows(rows - r)
                        score(number, a, dim, k_at, step, c, CONTEXT)
                        r += number
                for r in range(rows):  # softmax so far
                    known = positions[first + r // shared] + 1 - start
                    unseen, s_at = larger(known - window, 0), scores_at + r * CONTEXT * 4
                    highest = larger(largest[r], visible_max(s_at, groups, unseen, known))
                    row_weight = exp_row(s_at, groups, unseen, known, highest)
                    if highest > largest[r]:
                        if weight[r] != 0:
                            shrink = np.float32(np.exp(largest[r] - highest))
                            weight[r] *= shrink
                            total = floats(total_at + r * dim * 4)
                            for d in range(dim):
                                total[d] *= shrink
                        largest[r] = highest
                    weight[r] += row_weight
                    if scaled:
                        for group in range(groups):
                            p_at = s_at + group * GROUP * 4
                            multiply_rows(p_at, int64s(here + VALUE_SCALES)[group], p_at, 1)
                for group in range(groups):  # total += scores @ values
                    v_at, k_at = int64s(here + VALUES)[group], int64s(ahead)[group]
                    next_v = int64s(ahead + VALUES)[group]
                    used = smaller(GROUP, stop - start - group * GROUP)
                    d = 0
                    while d < dim:
                        whole = dim - d >= wide * GROUP
                        r, v = 0, v_at + d * item
                        k = k_at + (d // BLOCK * KEY_LINES + d % BLOCK // 4 if scaled else d) * step
                        while r < rows:
                            a, c = scores_at + (r * CONTEXT + group * GROUP) * 4, total_at + (r * dim + d) * 4
                            number = tile_rows(rows - r)
                            if whole:
                                wide_sum(number, a, CONTEXT, v, dim, used, c, k, step, next_v + d * item)
                            else:
                                narrow_sum(number, a, CONTEXT, v, dim, used, c, k, step, next_v + d * item)
                            r += number
                        d += wide * GROUP if whole else GROUP
                here, ahead = ahead, here
            for r in range(rows):
                target = floats(out + ((first_out + r // shared) * heads + kv_head * shared + r % shared) * dim * 4)
                total, share = floats(total_at + r * dim * 4), np.float32(1) / weight[r]
                for d in range(dim):
                    target[d] = total[d] * share
            task = following

    return kernel

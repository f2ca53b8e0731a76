"""Where min_p, top_k and top_p cut a row of logits: by search, not by sorting.

The kept tokens are always the head of one order, that of logits with equal ones by id. So a cut is the last token kept:
its logit and its id. Every row is worked on alone and in one order of sums, whatever else is in the batch.

    survey  all logits once, over many programs: the largest logit of each group of 64 tokens
    cut     one program per row. Groups whose largest logit is below a bound are never read again:
            bound      from the groups' maxima alone: k groups have a member at or above the k-th largest maximum
            narrow     while too many tokens are above it: weigh those above 8 pivots, keep the interval of the cut
            collect    the tokens between the bounds, at most 512
            rank       each of them against each: what is ahead of it decides whether it is kept
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels import triton_slots
from engine_core.kernels.triton_device import chained
from engine_core.kernels.triton_slots import (
    EDITED,
    FLAGS,
    GROUP,
    MIN_P_LOG,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TRUNCATED,
    float_of,
    integer_of,
    is_kept,
)
from engine_core.kernels.triton_survey import Survey

COLLECTED = 512  # tokens ranked against one another
BLOCK = 4096  # tokens read at once by the program that cuts
WARPS = 16
HALVINGS = tl.constexpr(12)  # of the range of the groups' maxima
PIVOTS = tl.constexpr(8)
NO_ID = tl.constexpr(2147483647)


class Cut(NamedTuple):
    """The last token kept of each row: float32 logit and int32 id. Anything where nothing is truncated."""

    thresholds: torch.Tensor
    last_ids: torch.Tensor


@triton.jit
def _weight(v, at, top, inverse, threshold, last, MASS: tl.constexpr):
    """What a token counts for: its probability over that of the best, or 1. Nothing if it is cut already."""
    weight = tl.exp((v - top) * inverse) if MASS else tl.where(v > float("-inf"), 1.0, 0.0)
    return tl.where(is_kept(v, at, threshold, last), weight, 0.0)


@triton.jit
def _list(group_tops, bound, listed, GROUPS: tl.constexpr):
    """Enter the groups that reach `bound` in `listed`, in their order. Returns how many tokens they hold."""
    reach = (group_tops >= bound).to(tl.int32)
    tl.debug_barrier()  # whoever still reads the list before
    tl.store(listed + tl.cumsum(reach, 0) - 1, tl.arange(0, GROUPS), mask=reach != 0)
    tl.debug_barrier()
    return tl.sum(reach, 0) * GROUP


@triton.jit
def _read(base, listed, n, count, V):
    """Logits and ids of tokens `n` of the `count` in the listed groups; ids rise with n."""
    at = tl.load(listed + n // GROUP, mask=n < count, other=0) * GROUP + n % GROUP
    inside = (n < count) & (at < V)
    return tl.load(base + at, mask=inside, other=float("-inf")), at


@triton.jit
def _total(base, listed, count, V, top, inverse, threshold, last, BLOCK: tl.constexpr):
    """Probability of all that is kept, over that of the best."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        v, at = _read(base, listed, start + tl.arange(0, BLOCK), count, V)
        total += _weight(v, at, top, inverse, threshold, last, True)
    return tl.sum(total, 0)


@triton.jit
def _head(
    base,
    group_tops,
    listed,
    values,
    ids,
    V,
    top,
    inverse,
    threshold,
    last,
    low,
    target,
    MASS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLLECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last token of the shortest head whose weights reach `target`, among those kept up to (threshold, last).

    All tokens of that head are at or above `low`. In the search, the tokens from `high` on weigh `above`, which is
    less than `target`; the cut is in [low, high).
    """
    if tl.sum((group_tops >= low).to(tl.int32), 0) * GROUP > BLOCK:  # fewer are read at once anyway
        weights = _weight(group_tops, 0, top, inverse, threshold, -1, MASS)
        if tl.sum(tl.where(group_tops >= low, weights, 0.0), 0) >= target:
            over = top
            for _ in range(HALVINGS):
                middle = low * 0.5 + over * 0.5
                if tl.sum(tl.where(group_tops >= middle, weights, 0.0), 0) >= target:
                    low = middle
                else:
                    over = middle
    high = float("inf")
    above = 0.0
    block = tl.arange(0, BLOCK)
    step = tl.arange(0, PIVOTS)
    # Where in the interval: evenly, both ends with it; from the second time on a few, so that it halves in any case,
    # and the others close to where a straight line has the cut.
    share = step.to(tl.float32) * (1.0 / (PIVOTS - 1))
    few = tl.where(step == 3, 1.0, step.to(tl.float32) * 0.25)
    near = (step % 2 * 2 - 1).to(tl.float32) * tl.where(step < 6, 1.0 / 128.0, 1.0 / 16.0)
    collected = COLLECTED + 1
    search = True
    while search:
        count = _list(group_tops, low, listed, GROUPS)
        collected = 0
        start = 0
        while (start < count) & (collected <= COLLECTED):
            v, at = _read(base, listed, start + block, count, V)
            inside = ((v >= low) & (v < high) & is_kept(v, at, threshold, last)).to(tl.int32)
            place = collected + tl.cumsum(inside, 0) - 1
            store = (inside != 0) & (place < COLLECTED)
            tl.store(values + place, v, mask=store)
            tl.store(ids + place, at, mask=store)
            collected += tl.sum(inside, 0)
            start += BLOCK
        search = collected > COLLECTED
        if search:
            end = tl.minimum(high, top)
            pivots = tl.minimum(tl.maximum(low * (1.0 - share) + end * share, low), end)
            weighed = tl.zeros((BLOCK, PIVOTS), tl.float32)
            for begin in range(0, count, BLOCK):
                v, at = _read(base, listed, begin + block, count, V)
                weight = _weight(v, at, top, inverse, threshold, last, MASS)
                weighed += tl.where(v[:, None] >= pivots[None, :], weight[:, None], 0.0)
            sums = tl.sum(weighed, 0)
            reach = sums >= target
            new_low = tl.maximum(tl.max(tl.where(reach, pivots, float("-inf")), 0), low)
            new_high = tl.minimum(tl.min(tl.where(reach, float("inf"), pivots), 0), high)
            from_low = tl.min(tl.where(reach, sums, 3e38), 0)
            above = tl.maximum(tl.max(tl.where(reach, 0.0, sums), 0), above)
            line = (from_low - target) / tl.maximum(from_low - above, 1e-30)
            share = tl.where(step < 4, few, tl.minimum(tl.maximum(line + near, 0.0), 1.0))
            search = (new_low > low) | (new_high < high)
            low = new_low
            high = new_high
    tl.debug_barrier()
    if collected <= COLLECTED:
        i = tl.arange(0, COLLECTED)
        v = tl.load(values + i, mask=i < collected, other=float("-inf"))
        at = tl.load(ids + i, mask=i < collected, other=NO_ID)
        before = tl.zeros((COLLECTED,), tl.float32)
        for begin in range(0, collected, 16):
            j = begin + tl.arange(0, 16)
            other = tl.load(values + j, mask=j < collected, other=float("-inf"))
            other_at = tl.load(ids + j, mask=j < collected, other=NO_ID)
            weight = _weight(other, other_at, top, inverse, threshold, last, MASS)
            ahead = (other[None, :] > v[:, None]) | ((other[None, :] == v[:, None]) & (other_at[None, :] < at[:, None]))
            before += tl.sum(tl.where(ahead, weight[None, :], 0.0), 1)
        kept = (i < collected) & (above + before < target)
        lowest = tl.min(tl.where(kept, v, float("inf")), 0)
        if lowest < high:
            threshold = lowest
            last = tl.max(tl.where(kept & (v == lowest), at, -1), 0)
        else:
            last = tl.where(high > threshold, NO_ID, last)
            threshold = tl.maximum(high, threshold)
    else:  # no number lies between `low` and `high`: so many tokens have the very same logit
        each = _weight(low, 0, top, inverse, float("-inf"), NO_ID, MASS)
        needed = tl.minimum(tl.ceil((target - above) / each), 1e9).to(tl.int32)
        count = _list(group_tops, low, listed, GROUPS)
        found = 0
        ours = -1
        start = 0
        while (start < count) & (found < needed):
            v, at = _read(base, listed, start + block, count, V)
            same = ((v >= low) & (v < high) & is_kept(v, at, threshold, last)).to(tl.int32)
            place = found + tl.cumsum(same, 0)
            ours = tl.maximum(ours, tl.max(tl.where((same != 0) & (place <= needed), at, -1), 0))
            found += tl.sum(same, 0)
            start += BLOCK
        threshold = low
        last = ours
    return threshold, last


@triton.jit(do_not_specialize=["V", "G"])
def _cut(
    logits,
    edited,
    slots,
    settings,
    tops,
    sums,
    lows,
    groups,
    listed,
    values,
    ids,
    thresholds,
    last_ids,
    V,
    G,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLLECTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    flags = integer_of(settings, slot, FLAGS)
    if (flags & TRUNCATED) != 0:
        threshold = float("-inf")
        last = NO_ID
        p = tl.arange(0, PARTS)
        part_tops = tl.load(tops + row * PARTS + p)
        top = tl.max(part_tops, 0)
        low = tl.min(tl.load(lows + row * PARTS + p), 0)
        if (top > float("-inf")) & (top < float("inf")):  # else the draw says what is wrong
            base = logits + row.to(tl.int64) * V
            if (flags & EDITED) != 0:
                base = edited + row.to(tl.int64) * V
            temperature = float_of(settings, slot, TEMPERATURE)
            inverse = 1.0 / temperature
            top_k = integer_of(settings, slot, TOP_K)
            top_p = float_of(settings, slot, TOP_P)
            g = tl.arange(0, GROUPS)
            group_tops = tl.load(groups + row * G + g, mask=g < G, other=float("-inf"))
            own_list = listed + row * GROUPS
            own_values = values + row * COLLECTED
            own_ids = ids + row * COLLECTED
            threshold = top + temperature * float_of(settings, slot, MIN_P_LOG)
            if top_k > 0:
                threshold, last = _head(
                    base, group_tops, own_list, own_values, own_ids, V, top, inverse, threshold, last,
                    tl.maximum(threshold, low), top_k.to(tl.float32), False, GROUPS, COLLECTED, BLOCK,
                )  # fmt: skip
            if top_p < 1.0:
                if threshold > float("-inf"):
                    count = _list(group_tops, threshold, own_list, GROUPS)
                    total = _total(base, own_list, count, V, top, inverse, threshold, last, BLOCK)
                    low = tl.maximum(threshold, low)
                else:
                    part_sums = tl.load(sums + row * PARTS + p)
                    total = tl.sum(part_sums * tl.exp((part_tops - top) * inverse), 0)
                    # Even if all tokens were as probable as one here, they would be less than half of what is cut.
                    low = tl.maximum(top + temperature * tl.log(0.5 * (1.0 - top_p) * total / V), low)
                threshold, last = _head(
                    base, group_tops, own_list, own_values, own_ids, V, top, inverse, threshold, last,
                    low, top_p * total, True, GROUPS, COLLECTED, BLOCK,
                )  # fmt: skip
        tl.store(thresholds + row, threshold)
        tl.store(last_ids + row, last)


def cut(logits: torch.Tensor, edited: torch.Tensor, slots: torch.Tensor, settings: torch.Tensor, found: Survey) -> Cut:
    """Where each row [rows, vocabulary] that asks for it is cut; `found` is its survey.

    Equal logits are kept by id, exactly. For top_p float32 sums decide, in an order that depends on the row alone: a
    token at which the sum equals top_p to 1e-6 may fall on either side.
    """
    rows, vocabulary = logits.shape
    count = found.groups.shape[2]
    padded = triton.next_power_of_2(count)
    integers = torch.empty(rows * (padded + COLLECTED + 1), dtype=torch.int32, device=logits.device)
    listed, ids, last_ids = integers.split((rows * padded, rows * COLLECTED, rows))
    floats = torch.empty(rows * (COLLECTED + 1), dtype=torch.float32, device=logits.device)
    values, thresholds = floats.split((rows * COLLECTED, rows))
    pdl = chained(logits.device)
    _cut[(rows,)](
        logits,
        edited,
        slots,
        settings,
        *found,
        listed,
        values,
        ids,
        thresholds,
        last_ids,
        vocabulary,
        count,
        triton_slots.PARTS,
        padded,
        COLLECTED,
        BLOCK,
        pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return Cut(thresholds, last_ids)

"""Log-probabilities of the raw distribution, on the device, into a ring for the host: no sort, no sync.

What the host gets is a record of int32 cells per row (floats by their bits), from which it has only to subtract:

    own logit | top | sum of exp(logit - top) | - | ids of the best | their logits | tokens ahead of the own, by part
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels import triton_slots
from engine_core.kernels.triton_device import chained
from engine_core.kernels.triton_slots import FLAGS, GROUP, LOGPROBS, NUM_LOGPROBS, integer_of
from engine_core.kernels.triton_survey import Survey

OWN, TOP, SUM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
IDS = tl.constexpr(4)
MOST = tl.constexpr(20)  # alternatives, as ipc.sampling.MAX_LOGPROBS
LOGITS = tl.constexpr(IDS.value + MOST.value)
AHEAD = tl.constexpr(LOGITS.value + MOST.value)


def record_width() -> int:
    """Cells of a record."""
    return int(AHEAD.value) + triton_slots.PARTS


@triton.jit
def _put(cell, value):
    tl.store(cell, value.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["stride", "V", "G"], do_not_specialize_on_alignment=["groups"])
def _best(
    logits,
    slots,
    settings,
    tops,
    sums,
    groups,
    ring,
    turn,
    stride,
    V,
    G,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    if (integer_of(settings, slot, FLAGS) & LOGPROBS) != 0:
        record = ring + tl.load(turn) * stride + row * WIDTH
        p = tl.arange(0, PARTS)
        part_tops = tl.load(tops + row * PARTS + p)
        top = tl.max(part_tops, 0)
        if (top > float("-inf")) & (top < float("inf")):  # else the row fails
            _put(record + TOP, top)
            _put(record + SUM, tl.sum(tl.load(sums + row * PARTS + p) * tl.exp(part_tops - top), 0))
            g, e = tl.arange(0, GROUPS), tl.arange(0, GROUP)
            remaining = tl.load(groups + row * G + g, mask=g < G, other=float("-inf"))
            # A tournament: the best of the groups gives its best, and stays in with the best of what is left of it.
            previous = float("inf")
            previous_token = -1
            for place in range(integer_of(settings, slot, NUM_LOGPROBS)):
                best = tl.max(remaining, 0)
                group = tl.min(tl.where(remaining == best, g, GROUPS - 1), 0)
                at = group * GROUP + e
                v = tl.load(logits + row.to(tl.int64) * V + at, mask=at < V, other=float("-inf"))
                taken = (v == previous) & (at <= previous_token)
                token = tl.min(tl.where((v == best) & ~taken, at, 2147483647), 0)
                tl.store(record + IDS + place, tl.where(best > float("-inf"), token, -1))
                _put(record + LOGITS + place, best)
                left = tl.max(tl.where((v < best) | ((v == best) & (at > token)), v, float("-inf")), 0)
                remaining = tl.where(g == group, left, remaining)
                previous = best
                previous_token = token


@triton.jit(do_not_specialize=["token_stride", "stride", "V", "G", "per"], do_not_specialize_on_alignment=["groups"])
def _rank(
    logits,
    slots,
    settings,
    groups,
    tokens,
    ring,
    turn,
    token_stride,
    stride,
    V,
    G,
    per,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    if (integer_of(settings, slot, FLAGS) & LOGPROBS) != 0:
        token = tl.load(tokens + tl.load(turn) * token_stride + row)
        if token >= 0:
            record = ring + tl.load(turn) * stride + row * WIDTH
            base = logits + row.to(tl.int64) * V
            own = tl.load(base + token)
            ahead = tl.zeros((BLOCK,), tl.int32)
            stop = tl.minimum((part + 1) * per, V)
            for start in range(part * per, stop, BLOCK):
                group = start // GROUP + tl.arange(0, BLOCK // GROUP)
                tops = tl.load(groups + row * G + group, mask=group < G, other=float("-inf"))
                if tl.max(tops, 0) >= own:
                    at = start + tl.arange(0, BLOCK)
                    v = tl.load(base + at, mask=at < stop, other=float("-inf"))
                    ahead += ((at < stop) & ((v > own) | ((v == own) & (at < token)))).to(tl.int32)
            tl.store(record + AHEAD + part, tl.sum(ahead, 0))
            if part == 0:
                _put(record + OWN, own)


def best(
    logits: torch.Tensor,
    slots: torch.Tensor,
    settings: torch.Tensor,
    found: Survey,
    ring: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """The most probable tokens of rows that ask for them, of raw float32 logits [rows, vocabulary]: their ids and
    logits, best first, equal ones by id, into the records of row `turn` of the int32 `ring` [turns, rows, cells]. An id
    of -1: no token is left that is not masked.
    """
    rows, vocabulary = logits.shape
    count = found.groups.shape[2]
    pdl = chained(logits.device)
    _best[(rows,)](
        logits,
        slots,
        settings,
        found.tops[1],
        found.sums[1],
        found.groups[1],
        ring,
        turn,
        ring.stride(0),
        vocabulary,
        count,
        ring.shape[2],
        triton_slots.PARTS,
        triton.next_power_of_2(count),
        pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


def rank(
    logits: torch.Tensor,
    slots: torch.Tensor,
    settings: torch.Tensor,
    found: Survey,
    tokens: torch.Tensor,
    ring: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """The raw logit of each sampled token and how many tokens are ahead of it, into the same records. `tokens`: the
    int32 ring [turns, rows] that `draw` has filled; a row that failed is left alone."""
    rows, vocabulary = logits.shape
    count = found.groups.shape[2]
    parts = triton_slots.PARTS
    pdl = chained(logits.device)
    _rank[(rows, parts)](
        logits,
        slots,
        settings,
        found.groups[1],
        tokens,
        ring,
        turn,
        tokens.stride(0),
        ring.stride(0),
        vocabulary,
        count,
        triton.cdiv(count, parts) * GROUP.value,
        ring.shape[2],
        1024,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )

"""One pass over rows of logits, on the device, for what the searches after it need: the largest logit of each group of
64 tokens, by which they skip nearly all of the row, and the sum of probabilities."""

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
    LOGPROBS,
    TEMPERATURE,
    TRUNCATED,
    cannot_be_sampled,
    float_of,
    integer_of,
)


class Survey(NamedTuple):
    """float32. `purposes`: 0, the logits to sample from over the temperature; 1, the raw ones, for log-probabilities.

    Rows that do not ask for a purpose hold anything.
    """

    tops: torch.Tensor  # [purposes, rows, parts]: the largest logit of each part
    sums: torch.Tensor  # [purposes, rows, parts]: of exp(logit - top of the part)
    lows: torch.Tensor  # [purposes, rows, parts]: the smallest logit that is not -inf
    groups: torch.Tensor  # [purposes, rows, groups]: the largest logit of each group, +inf if it is no row to sample


@triton.jit(do_not_specialize=["V", "G", "per"])
def _survey(
    logits,
    edited,
    slots,
    settings,
    tops,
    sums,
    lows,
    groups,
    V,
    G,
    per,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    purpose = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    flags = integer_of(settings, slot, FLAGS)
    base = logits + row.to(tl.int64) * V
    inverse = 1.0
    wanted = flags & LOGPROBS
    if purpose == 0:
        wanted = flags & TRUNCATED
        if wanted != 0:
            inverse = 1.0 / float_of(settings, slot, TEMPERATURE)
        if (flags & EDITED) != 0:
            base = edited + row.to(tl.int64) * V
    if wanted != 0:
        out = purpose * tl.num_programs(0) + row
        g, e = tl.arange(0, TILE), tl.arange(0, GROUP)
        reach = tl.full((TILE,), float("-inf"), tl.float32)
        top = tl.full((TILE,), float("-inf"), tl.float32)
        low = tl.full((TILE,), float("inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        stop = tl.minimum((part + 1) * per, G)
        for start in range(part * per, stop, TILE):
            group = start + g
            at = group[:, None] * GROUP + e[None, :]
            inside = (group < stop)[:, None] & (at < V)
            v = tl.load(base + at, mask=inside, other=float("-inf"))
            bad = cannot_be_sampled(v)
            most = tl.max(tl.where(bad, float("inf"), v), 1)
            tl.store(groups + out * G + group, most, mask=group < stop)
            reach = tl.maximum(reach, most)
            v = tl.where(bad, float("-inf"), v)  # nobody asks for the sum then
            low = tl.minimum(low, tl.min(tl.where(v > float("-inf"), v, float("inf")), 1))
            new = tl.maximum(top, tl.max(v, 1))
            finite = tl.where(new > float("-inf"), new, 0.0)
            total = total * tl.exp((top - finite) * inverse)
            total += tl.sum(tl.exp((v - finite[:, None]) * inverse), 1)
            top = new
        highest = tl.max(top, 0)
        finite = tl.where(highest > float("-inf"), highest, 0.0)
        at = out * PARTS + part
        tl.store(tops + at, tl.max(reach, 0))
        tl.store(sums + at, tl.sum(total * tl.exp((top - finite) * inverse), 0))
        tl.store(lows + at, tl.min(low, 0))


def survey(
    logits: torch.Tensor, edited: torch.Tensor, slots: torch.Tensor, settings: torch.Tensor, logprobs: bool
) -> Survey:
    """Of float32 rows [rows, vocabulary]; rows that edit their logits are sampled from `edited`."""
    rows, vocabulary = logits.shape
    purposes, parts = 2 if logprobs else 1, triton_slots.PARTS
    groups = triton.cdiv(vocabulary, GROUP.value)
    tops, sums, lows = torch.empty(3, purposes, rows, parts, dtype=torch.float32, device=logits.device)
    group_tops = torch.empty(purposes, rows, groups, dtype=torch.float32, device=logits.device)
    found = Survey(tops, sums, lows, group_tops)
    pdl = chained(logits.device)
    per = triton.cdiv(groups, parts)
    _survey[(rows, parts, purposes)](
        logits, edited, slots, settings, *found, vocabulary, groups, per, parts, 16, pdl, num_warps=4, launch_pdl=pdl
    )
    return found

"""What requests do to their logits before sampling, on the device: bias, allowed ids, min_tokens, penalties.

The raw logits stay as they are, because log-probabilities are theirs: edited rows are written beside them, and rows
with no edits not at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels import triton_slots
from engine_core.kernels.triton_device import chained
from engine_core.kernels.triton_slots import (
    ALLOWED,
    BIASED,
    EDITED,
    FLAGS,
    FREQUENCY,
    MIN_LENGTH,
    MIN_TOKENS,
    NUM_BIASED,
    PENALISED,
    PRESENCE,
    REPETITION,
    cannot_be_sampled,
    float_of,
    integer_of,
)


@triton.jit
def _edited(v, at, inside, slot, flags, length, settings, seen, allowed, ends, V, WORDS: tl.constexpr):
    """Logits `v` of tokens `at`, bias included, as the request wants them."""
    bad = cannot_be_sampled(v)
    word, bit = slot * WORDS + at // 32, at % 32
    if (flags & ALLOWED) != 0:
        v = tl.where((tl.load(allowed + word, mask=inside, other=0) >> bit) & 1 != 0, v, float("-inf"))
    if (flags & MIN_TOKENS) != 0:
        if length < integer_of(settings, slot, MIN_LENGTH):
            v = tl.where((tl.load(ends + word, mask=inside, other=0) >> bit) & 1 != 0, float("-inf"), v)
    if (flags & PENALISED) != 0:
        count = tl.load(seen + slot.to(tl.int64) * V + at, mask=inside, other=0).to(tl.int32)
        repetition = tl.zeros_like(v) + float_of(settings, slot, REPETITION)
        v = tl.where(count > 0, tl.where(v > 0, tl.div_rn(v, repetition), v * repetition), v)
        presence, frequency = float_of(settings, slot, PRESENCE), float_of(settings, slot, FREQUENCY)
        v = tl.where(count > 1, v - ((count >> 1).to(tl.float32) * frequency + presence), v)
    return tl.where(bad, float("nan"), v)  # a mask must not hide it


@triton.jit(do_not_specialize=["V", "per"])
def _edit_part(
    logits,
    edited,
    slots,
    lengths,
    settings,
    seen,
    allowed,
    ends,
    bias_ids,
    biases,
    V,
    per,
    WORDS: tl.constexpr,
    BIAS_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    flags = integer_of(settings, slot, FLAGS)
    if (flags & EDITED) != 0:
        length = tl.load(lengths + row)
        raw = logits + row.to(tl.int64) * V
        out = edited + row.to(tl.int64) * V
        first = part * per
        stop = tl.minimum(first + per, V)
        n = tl.arange(0, BLOCK)
        for start in range(first, stop, BLOCK):
            at = start + n
            inside = at < stop
            v = tl.load(raw + at, mask=inside, other=0.0)
            v = _edited(v, at, inside, slot, flags, length, settings, seen, allowed, ends, V, WORDS)
            tl.store(out + at, v, mask=inside)
        if (flags & BIASED) != 0:  # few tokens: done again, bias first
            tl.debug_barrier()
            count = integer_of(settings, slot, NUM_BIASED)
            for start in range(0, count, BLOCK):
                entry = slot * BIAS_WIDTH + start + n
                at = tl.load(bias_ids + entry, mask=start + n < count, other=-1)
                inside = (at >= first) & (at < stop)
                v = tl.load(raw + at, mask=inside, other=0.0) + tl.load(biases + entry, mask=inside, other=0.0)
                v = _edited(v, at, inside, slot, flags, length, settings, seen, allowed, ends, V, WORDS)
                tl.store(out + at, v, mask=inside)


def edit(
    logits: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    settings: torch.Tensor,
    seen: torch.Tensor,
    allowed: torch.Tensor,
    ends: torch.Tensor,
    bias_ids: torch.Tensor,
    biases: torch.Tensor,
) -> torch.Tensor:
    """float32 [rows, vocabulary]: the logits of rows that edit theirs; the other rows are not written.

    slots, lengths: int32 [rows]. Per slot: seen int16 [slots, vocabulary], twice the count in the output, plus 1 if in
    the prompt; allowed and ends, one bit per token in int32 [slots, words]; bias_ids int32 and biases float32
    [slots, entries].
    """
    rows, vocabulary = logits.shape
    edited = torch.empty_like(logits)
    pdl = chained(logits.device)
    _edit_part[(rows, triton_slots.PARTS)](
        logits,
        edited,
        slots,
        lengths,
        settings,
        seen,
        allowed,
        ends,
        bias_ids,
        biases,
        vocabulary,
        triton.cdiv(vocabulary, triton_slots.PARTS),
        allowed.shape[1],
        bias_ids.shape[1],
        1024,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return edited

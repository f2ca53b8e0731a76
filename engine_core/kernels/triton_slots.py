"""The sampling settings of a slot, as kernels read them: one row of int32 cells, floats by their bits.

The host fills the rows (`engine_core/cuda/sampling.py`); a row of zeros is a greedy request that wants nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

PARTS = 32  # programs that share a row of logits
GROUP = tl.constexpr(64)  # neighbouring tokens whose largest logit is kept: what a search for large logits skips by

WIDTH = tl.constexpr(16)
FLAGS = tl.constexpr(0)
TEMPERATURE = tl.constexpr(1)  # float
SEED_LOW = tl.constexpr(2)
SEED_HIGH = tl.constexpr(3)
TOP_K = tl.constexpr(4)  # 0: off
TOP_P = tl.constexpr(5)  # float
MIN_P_LOG = tl.constexpr(6)  # float, -inf: off
REPETITION = tl.constexpr(7)  # float
PRESENCE = tl.constexpr(8)  # float
FREQUENCY = tl.constexpr(9)  # float
MIN_LENGTH = tl.constexpr(10)  # below this length of context no end may be sampled
NUM_BIASED = tl.constexpr(11)
NUM_LOGPROBS = tl.constexpr(12)

PENALISED = tl.constexpr(1)  # bits of FLAGS
ALLOWED = tl.constexpr(2)
MIN_TOKENS = tl.constexpr(4)
BIASED = tl.constexpr(8)
EDITED = tl.constexpr(15)  # any of these
TRUNCATED = tl.constexpr(16)
LOGPROBS = tl.constexpr(32)


@triton.jit
def integer_of(settings, slot, FIELD: tl.constexpr):
    return tl.load(settings + slot * WIDTH + FIELD)


@triton.jit
def float_of(settings, slot, FIELD: tl.constexpr):
    return tl.load(settings + slot * WIDTH + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def seed_of(settings, slot):
    low = integer_of(settings, slot, SEED_LOW).to(tl.uint32, bitcast=True).to(tl.int64)
    return (integer_of(settings, slot, SEED_HIGH).to(tl.int64) << 32) | low


@triton.jit
def cannot_be_sampled(v):
    """NaN and +inf: a row with one of them fails."""
    return (v != v) | (v == float("inf"))


@triton.jit
def is_kept(v, at, threshold, last):
    """Whether token `at` with logit `v` is before the cut: tokens are in order of logits, equal ones in that of ids."""
    return (v > threshold) | ((v == threshold) & (at <= last))

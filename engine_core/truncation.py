"""From one row of logits to one token: temperature, min_p, top_k, top_p, and the draw. numpy only, one row at a time.

A row is worked on alone, in one scratch buffer, so its token cannot depend on what else is in the batch. The kept
tokens are always the head of the order (probability descending, id ascending), so every rule is a cut. Nothing sorts
the whole vocabulary unless the distribution is flat:

    logits --scale--> (x - max) / T --min_p, top_k, top_p--> (ids, weights) --pick--> id
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_BLOCK = 256  # tokens per partial sum of a draw
_SHARES = (64, 16, 4)  # tokens per maximum of the top_k prefilter: the most that leaves maxima enough
_BUCKETS, _DEEPEST = 2048, 32.0  # of logits below the maximum, to find where top_p is crossed; in nats
_NUCLEUS_GUESS = 512  # most top_p sets are smaller; larger ones take the slow path


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a pure function of the request's seed and the output position."""
    data = hashlib.blake2b(struct.pack("<qq", _int64(seed), position), digest_size=8).digest()
    return (int.from_bytes(data, "little") >> 11) * 2.0**-53


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


class Truncation:
    """Draws tokens from rows of `vocab_size` logits. Holds scratch memory only, nothing between two calls."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        padded = -(-vocab_size // _BLOCK) * _BLOCK
        self._scaled = np.full(padded, -np.inf, np.float32)  # the padding stays at -inf: weight 0
        self._weights = np.zeros(padded, np.float32)

    def draw(
        self, logits: Floats, highest: float, temperature: float, min_p: float, top_k: int, top_p: float, u: float
    ) -> int:
        """The token at quantile `u` of the truncated distribution.

        `logits` is float32 [vocab_size] without NaN or +inf; `highest` is its maximum, and finite.
        """
        ids, weights = self.support(logits, highest, temperature, min_p, top_k, top_p)
        index = pick(weights, u)
        return index if ids is None else int(ids[index])

    def support(
        self, logits: Floats, highest: float, temperature: float, min_p: float, top_k: int, top_p: float
    ) -> tuple[Ids | None, Floats]:
        """Token ids that can be drawn and their unnormalised weights; ids None: weight i belongs to token i.

        The arrays are valid until the next call.
        """
        if 0 < top_k < self._vocab_size:  # temperature keeps the order, so the few best are found before it
            ids = head(logits, top_k)
            values = _scale(logits[ids], highest, temperature)
            weights = np.exp(values)
            count = int(np.count_nonzero(values >= _bound(min_p)))
            count = _cut(weights[:count], top_p, float(weights[:count].sum(dtype=np.float64)))
            return ids[:count], weights[:count]
        row = self._scaled[: self._vocab_size]
        _scale(logits, highest, temperature, out=row)
        if min_p > 0.0:
            ids = np.flatnonzero(row >= _bound(min_p))
            values = row[ids]
            weights = np.exp(values)
            if top_p < 1.0:
                kept, weights = _nucleus(values, weights, top_p)
                ids = ids if kept is None else ids[kept]
            return ids, weights
        np.exp(self._scaled, out=self._weights)
        if top_p < 1.0:
            kept, weights = _nucleus(row, self._weights[: self._vocab_size], top_p)
            if kept is not None:
                return kept, weights
        return None, self._weights


def _scale(logits: Floats, highest: float, temperature: float, out: Floats | None = None) -> Floats:
    with np.errstate(over="ignore"):  # (x - max) / tiny T: -inf is the right answer
        out = np.subtract(logits, np.float32(highest), out=out)
        if temperature != 1.0:
            np.divide(out, np.float32(temperature), out=out)
    return out


def _bound(min_p: float) -> np.float32:
    """Scaled logits below it are less probable than `min_p` times the most probable."""
    return np.float32(np.log(min_p) if min_p > 0.0 else -np.inf)


def pick(weights: Floats, u: float) -> int:
    """Index at quantile `u` in [0, 1) of unnormalised `weights`; never one whose weight is 0."""
    first = 0
    target = u
    if len(weights) > 2 * _BLOCK and len(weights) % _BLOCK == 0:
        block, target = _find(weights.reshape(-1, _BLOCK).sum(axis=1), u)
        first = block * _BLOCK
        weights = weights[first : first + _BLOCK]
    return first + _find(weights, target)[0]


def _find(weights: Floats, u: float) -> tuple[int, float]:
    """The index at quantile `u`, and the quantile of `u` inside that element."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    total = cumulative[-1]
    # Clipping guards against rounding of u * total up to the total itself.
    last = int(np.searchsorted(cumulative, total, side="left"))
    index = min(int(np.searchsorted(cumulative, u * total, side="right")), last)
    before = float(cumulative[index - 1]) if index else 0.0
    return index, min(max((u * float(total) - before) / (float(cumulative[index]) - before), 0.0), 1.0)


def head(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest of float32 `values` [vocab], largest first, ties by id. -inf is never among them."""
    size = len(values)
    count = min(count, size)
    share = next((share for share in _SHARES if 4 * count * share <= size), 0)
    if share:
        groups = values[: size // share * share].reshape(share, -1).max(axis=0)
        # `count` groups have a member at or above the count-th largest group maximum, so it bounds the cut from below.
        bound = np.partition(groups, len(groups) - count)[len(groups) - count]
    else:
        bound = np.partition(values, size - count)[size - count]
    ids = np.flatnonzero(values >= bound if bound > -np.inf else values > bound)  # masked tokens are nobody's choice
    return ids[np.argsort(-values[ids], kind="stable")[:count]]


def _cut(weights: Floats, top_p: float, total: float) -> int:
    """Length of the shortest head of `weights`, sorted downwards, that holds `top_p` of `total`; at least 1."""
    if top_p >= 1.0:
        return len(weights)
    return int(np.searchsorted(np.cumsum(weights, dtype=np.float64), top_p * total, side="left")) + 1


def _nucleus(values: Floats, weights: Floats, top_p: float) -> tuple[Ids | None, Floats]:
    """Indices and weights of the top_p set; indices None: all, where the weights outside the set have become 0."""
    total = float(weights.sum())
    ids = head(values, _NUCLEUS_GUESS)
    likely = weights[ids]
    if float(likely.sum(dtype=np.float64)) >= top_p * total:
        count = _cut(likely, top_p, total)
        return ids[:count], likely[:count]
    # A flat distribution: find the bucket of values in which the sum crosses top_p, and sort only that bucket.
    depth = min(max(-float(values.min()), 1e-6), _DEEPEST)
    bucket = np.minimum(values * np.float32(-_BUCKETS / depth), _BUCKETS - 1).astype(np.int64)
    before = np.cumsum(np.bincount(bucket, weights=weights, minlength=_BUCKETS))
    crossing = min(int(np.searchsorted(before, top_p * total, side="left")), _BUCKETS - 1)
    ids = np.flatnonzero(bucket == crossing)
    ids = ids[np.argsort(-values[ids], kind="stable")]
    rest = top_p * total - (before[crossing - 1] if crossing else 0.0)
    count = int(np.searchsorted(np.cumsum(weights[ids], dtype=np.float64), rest, side="left")) + 1
    np.multiply(weights, bucket <= crossing, out=weights)
    weights[ids[count:]] = 0.0
    return None, weights

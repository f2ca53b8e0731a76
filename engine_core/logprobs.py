"""Log-probabilities of the raw model distribution, as messages carry them. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_core.truncation import head
from ipc.messages import TokenLogprobs

LOWEST = -9999.0  # in place of -inf and NaN, which JSON cannot hold


def token_logprobs(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    """The log-probability and rank of `token`, and the `top` most probable tokens, under float32 `logits` [vocab].

    Every value is finite and at least `LOWEST`. Equal logits rank by token id.
    """
    own = logits[token]
    rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token] == own))
    ids = head(logits, top) if top else np.empty(0, np.int64)
    values = _clamped(np.append(logits[ids], own), logits)
    return TokenLogprobs(
        logprob=float(values[-1]),
        rank=rank,
        top_ids=ids.astype("<i4").tobytes(),
        top_logprobs=values[:-1].astype("<f4").tobytes(),
    )


def _clamped(chosen: NDArray[np.float32], logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """log_softmax(logits) at the values `chosen`."""
    highest = float(logits.max())
    if not np.isfinite(highest):
        return np.full(len(chosen), LOWEST)
    with np.errstate(over="ignore"):  # a difference beyond float32 is -inf, whose weight is 0
        log_total = float(np.log(np.exp(logits - np.float32(highest)).sum()))
    values = chosen.astype(np.float64) - highest - log_total
    return np.clip(values, LOWEST, 0.0)

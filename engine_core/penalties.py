"""What a request does to its logits before sampling: bias, allowed ids, min_tokens, penalties. numpy only.

Penalties touch only tokens already seen, so their state is a list of those ids, not a vocabulary-sized row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_core.request import Request
from ipc.sampling import SamplingParams

Floats = NDArray[np.float32]


class LogitEdits:
    """The edits of one request. Made when it is first sampled in a slot, dropped when it leaves the slot."""

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self._sampling = sampling
        self._bias_ids = np.fromiter(sampling.logit_bias.keys(), np.int64, len(sampling.logit_bias))
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float32, len(sampling.logit_bias))
        allowed = sampling.allowed_token_ids
        self._allowed = None if allowed is None else np.unique(np.asarray(allowed, np.int64))
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
        self._ends = np.asarray(sorted(ends), np.int64)
        self._seen = SeenTokens(request.prompt_ids) if sampling.penalises else None

    def apply(self, row: Floats, position: int, output_ids: list[int]) -> None:
        """Edit float32 `row` [vocab] in place for the token at output `position`.

        `output_ids` are the committed ones; those from there to `position` were told to `took`.
        """
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias
        if self._allowed is not None:
            kept = row[self._allowed]
            row.fill(-np.inf)
            row[self._allowed] = kept
        if position < self._sampling.min_tokens:
            row[self._ends[self._ends < len(row)]] = -np.inf
        if self._seen is not None:
            self._seen.catch_up(position, output_ids)
            self._seen.penalise(row, self._sampling)

    def took(self, position: int, token: int) -> None:
        """The token at `position` was sampled; a later step may be sampled before it is committed."""
        if self._seen is not None:
            self._seen.append(position, token)


class SeenTokens:
    """The distinct tokens of a prompt and of its output so far, and how often each is in the output."""

    def __init__(self, prompt_ids: Sequence[int] | NDArray[np.int32]) -> None:
        self._prompt = np.unique(np.asarray(prompt_ids, np.int64))
        self._reset()

    def _reset(self) -> None:
        self._counted: list[int] = []  # the output tokens counted, of which the first `_committed` are settled
        self._committed = 0
        self._place: dict[int, int] = {}  # output token -> its index in the two arrays
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        self._everything = self._prompt  # prompt and output together, sorted, each token once

    def append(self, position: int, token: int) -> None:
        """Count `token`, sampled for output `position`."""
        if position == len(self._counted):
            self._count(token)

    def catch_up(self, position: int, output_ids: list[int]) -> None:
        """Count exactly output tokens [0, position), whatever was counted before.

        The committed ones are `output_ids`; a token after them is known by `append` alone.
        """
        known = min(position, len(output_ids))
        settled = output_ids[self._committed : known]
        guessed = self._counted[self._committed : known]
        # A token that was sampled but then discarded, or replaced, must leave no trace.
        if len(self._counted) > position or guessed != settled[: len(guessed)]:
            self._reset()
        for token in output_ids[len(self._counted) : known]:
            self._count(token)
        self._committed = known

    def _count(self, token: int) -> None:
        self._counted.append(token)
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
            at = int(np.searchsorted(self._everything, token))
            if at == len(self._everything) or self._everything[at] != token:
                self._everything = np.insert(self._everything, at, token)
        self._counts[place] += 1.0

    def penalise(self, row: Floats, sampling: SamplingParams) -> None:
        """Repetition over prompt and output, then frequency and presence over the output, in place."""
        repetition = np.float32(sampling.repetition_penalty)
        if repetition != 1.0:
            values = row[self._everything]
            row[self._everything] = np.where(values > 0, values / repetition, values * repetition)
        if sampling.presence_penalty or sampling.frequency_penalty:
            size = len(self._place)
            penalty = self._counts[:size] * np.float32(sampling.frequency_penalty)
            row[self._ids[:size]] -= penalty + np.float32(sampling.presence_penalty)

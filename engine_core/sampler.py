"""Logits to tokens. Order: logit bias, allowed ids, min_tokens; penalties; temperature; min_p; top_k; top_p; draw.

A token is a pure function of the request's seed, its output position and its logits: the draw uses counter-based
randomness, and each row is worked on alone. So it does not matter what else is in the batch, how the prompt was
chunked, or whether the request was preempted.

This is the host's sampler: the interface hands logits over and gets `StepTokens`, and asks for nothing in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.kernels.cpu_elementwise import Largest, argmax
from engine_core.logprobs import token_logprobs
from engine_core.penalties import LogitEdits
from engine_core.plan import ScheduledRow, StepTokens
from engine_core.request import Request
from engine_core.truncation import Truncation, uniform
from ipc.messages import TokenLogprobs

Floats = NDArray[np.float32]


class Sampler:
    """Samples for up to `max_num_seqs` requests, each in its own slot.

    Only requests that edit their logits have state here. A slot's state belongs to one request and is never read for
    another, also when `release` was not called in between.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.max_num_seqs = max_num_seqs
        self._edits: dict[int, tuple[Request, LogitEdits]] = {}  # slot -> its owner, and its state
        self._truncation = Truncation(vocab_size)
        self._edited_row = np.empty(vocab_size, np.float32)

    def sample(self, logits: Tensor | None, rows: Sequence[ScheduledRow], largest: Largest | None = None) -> StepTokens:
        """One token after each of `rows`, from float32 `logits` [rows, vocab_size], which are not changed.

        `largest` are those of the logits, which the CPU's program tells with them; without it, they are looked for
        here. No logits are needed beside them if all rows take their likeliest token. Rows whose logits hold NaN or
        +inf, or in which every token is masked, are in `failed` (with token id 0) and leave the other rows alone.
        """
        on_host = None
        if largest is None:
            assert logits is not None
            on_host = _host(logits)
            largest = argmax(on_host)
        step = StepTokens(largest.indices.tolist())
        for index, (row, value) in enumerate(zip(rows, largest.values.tolist(), strict=True)):
            request = row.request
            if request.takes_largest and isfinite(value):
                continue  # it has its token, as most of them
            if not value < inf:
                step.token_ids[index], step.failed[index] = 0, "the model's logits hold NaN or infinity"
                continue
            if on_host is None and logits is not None:
                on_host = _host(logits)
            token = -1
            if on_host is not None:
                best, position = step.token_ids[index], row.stop - request.num_prompt_tokens
                token = self._sample_row(on_host[index], best, request, position)
            if token < 0:
                step.token_ids[index], step.failed[index] = 0, "no token is allowed: every one of them is masked"
                continue
            step.token_ids[index] = token
            if on_host is not None and request.sampling.logprobs is not None:
                step.logprobs[index] = token_logprobs(on_host[index], token, request.sampling.logprobs)
        return step

    def prompt_logprobs(self, logits: Tensor, next_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """For each row of float32 `logits` [rows, vocab_size]: the value of the token that follows in the prompt."""
        return [token_logprobs(row, token, top) for row, token in zip(_host(logits), next_ids, strict=True)]

    def release(self, request: Request) -> None:
        """Forget what is kept of `request`. Safe to call for any request at any time."""
        for slot in [slot for slot, (owner, _) in self._edits.items() if owner is request]:
            del self._edits[slot]

    def _sample_row(self, row: Floats, best: int, request: Request, position: int) -> int:
        """The token for one row, or -1 if every token is masked."""
        sampling = request.sampling
        edits = self._edits_of(request, position)
        if edits is not None:
            np.copyto(self._edited_row, row)
            row = self._edited_row
            edits.apply(row, position, request.output_ids)
            best = int(row.argmax())
        if not -np.inf < row[best] < np.inf:
            return -1
        token = best
        if not sampling.greedy:
            u = uniform(request.seed, position)
            token = self._truncation.draw(
                row, float(row[best]), sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p, u
            )
        if edits is not None:
            edits.took(position, token)
        return token

    def _edits_of(self, request: Request, position: int) -> LogitEdits | None:
        if not request.sampling.edits_logits:
            return None
        entry = self._edits.get(request.slot)
        if entry is None or entry[0] is not request:
            entry = self._edits[request.slot] = (request, LogitEdits(request))
        return entry[1]


def _host(logits: Tensor) -> Floats:
    """float32 rows in this process's memory; no copy if they are there already."""
    rows: Floats = logits.detach().to("cpu", torch.float32).contiguous().numpy()
    return rows

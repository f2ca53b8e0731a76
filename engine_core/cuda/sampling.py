"""Sampling on the device: the settings of each slot, and which kernels draw a step's tokens.

    edit (bias, allowed ids, min_tokens, penalties) -> survey -> cut (min_p, top_k, top_p) -> draw -> count, rank

Nothing here waits for the device. A step runs the smallest set of kernels that all its rows can be drawn with; in a
larger set a row that needs less passes through unchanged, so its token is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from engine_core.cuda.edits import EditState, edit_flags
from engine_core.cuda.results import ResultRing
from engine_core.cuda.state import Staging
from engine_core.kernels import triton_cut, triton_draw, triton_edits, triton_logprobs, triton_survey
from engine_core.kernels import triton_slots as cells
from engine_core.request import Request

# Cells of a slot's record, in the order in which `DeviceSampler._records` makes their values.
_INTEGERS = "FLAGS SEED_LOW SEED_HIGH TOP_K MIN_LENGTH NUM_BIASED NUM_LOGPROBS"
_FLOATS = "TEMPERATURE TOP_P MIN_P_LOG REPETITION PRESENCE FREQUENCY"
TRUNCATED, LOGPROBS = cells.TRUNCATED.value, cells.LOGPROBS.value
INTEGERS, FLOATS = ([getattr(cells, name).value for name in names.split()] for names in (_INTEGERS, _FLOATS))


class Needs(IntEnum):
    """What a step must be able to do, each including those before."""

    GREEDY = 0
    RANDOM = 1  # temperature
    TRUNCATED = 2  # top_k, top_p, min_p
    FULL = 3  # edited logits, log-probabilities


class DeviceSampler:
    """Samples for up to `max_num_seqs` requests, each in its own slot; one slot more is for padding."""

    def __init__(self, vocab_size: int, max_num_seqs: int, rows: int, device: torch.device) -> None:
        """`rows`: the most that a step samples, padding included."""
        self._vocab_size, self._slots, self._device = vocab_size, max_num_seqs + 1, device
        self._settings = torch.zeros(self._slots, cells.WIDTH.value, dtype=torch.int32, device=device)
        self._needs = np.zeros(self._slots, np.int8)
        self._edits: EditState | None = None
        self._news = Staging(self._slots * (2 + cells.WIDTH.value) + 4, device)
        self.last_tokens = torch.zeros(self._slots, dtype=torch.int32, device=device)
        self.results = ResultRing(rows, device)

    def enter(self, requests: Sequence[Request]) -> None:
        """These requests have come to their slots, or back to one: take their settings and what they have output."""
        needs, records = self._records(requests)
        slots = np.array([request.slot for request in requests], np.int64)
        self._needs[slots] = needs
        if Needs.FULL in needs:
            self.results.allocate_logprobs()
            if self._edits is None:
                self._edits = EditState(self._slots, self._vocab_size, self._device)
            for request in requests:
                self._edits.enter(request)
        where, values = self._news.send([slots.view(np.int32), records.ravel()])
        self._settings.index_copy_(0, where.view(torch.int64), values.view(records.shape))

    def needs(self, slots: Sequence[int]) -> Needs:
        """What a step that samples for these slots must be able to do."""
        return Needs(int(self._needs[list(slots)].max(initial=0)))

    def _records(self, requests: Sequence[Request]) -> tuple[list[Needs], np.ndarray]:
        """What each needs; int32 [requests, cells.WIDTH]."""
        needs: list[Needs] = []
        integers, floats = [], []
        for request in requests:
            sampling, seed = request.sampling, request.seed % 2**64
            top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
            flags = edit_flags(request) | (LOGPROBS if sampling.logprobs is not None else 0)
            needed = Needs.FULL if flags else Needs.GREEDY if sampling.greedy else Needs.RANDOM
            if not sampling.greedy and (top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0):
                flags |= TRUNCATED
                needed = max(needed, Needs.TRUNCATED)
            needs.append(needed)
            integers.append(
                (
                    flags,
                    seed % 2**32,
                    seed >> 32,
                    top_k,
                    min(request.num_prompt_tokens + sampling.min_tokens, 2**31 - 1),
                    len(sampling.logit_bias),
                    sampling.logprobs or 0,
                )
            )
            floats.append(
                (
                    0.0 if sampling.greedy else sampling.temperature,
                    sampling.top_p,
                    math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
                    sampling.repetition_penalty,
                    sampling.presence_penalty,
                    sampling.frequency_penalty,
                )
            )
        records = np.zeros((len(requests), cells.WIDTH.value), np.int32)
        records.view(np.uint32)[:, INTEGERS] = np.array(integers, np.uint32)
        records.view(np.float32)[:, FLOATS] = np.array(floats, np.float32)
        return needs, records

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, turn: torch.Tensor, needs: Needs
    ) -> None:
        """One token per row of float32 logits [rows, vocabulary], into the result ring and `last_tokens`.

        slots, lengths (of the context sampled after): int32 [rows]; turn: int32 [1].
        """
        settings, results = self._settings, self.results
        edits = truncation = None
        sampled_from = logits
        if needs >= Needs.FULL:
            state = self._edits
            assert state is not None
            sampled_from = triton_edits.edit(
                logits, slots, lengths, settings, state.seen, state.allowed, state.ends, state.bias_ids, state.biases
            )
            edits = triton_draw.Edits(sampled_from, state.seen)
        if needs >= Needs.TRUNCATED:
            found = triton_survey.survey(logits, sampled_from, slots, settings, logprobs=needs >= Needs.FULL)
            cut = triton_cut.cut(logits, sampled_from, slots, settings, found)
            truncation = triton_draw.Truncation(cut, found.groups[0])
        triton_draw.draw(
            logits,
            slots,
            lengths,
            settings if needs >= Needs.RANDOM else None,
            self.last_tokens,
            results.tokens,
            turn,
            edits,
            truncation,
        )
        if needs >= Needs.FULL:
            assert results.logprobs is not None
            triton_logprobs.best(logits, slots, settings, found, results.logprobs, turn)
            triton_logprobs.rank(logits, slots, settings, found, results.tokens, results.logprobs, turn)

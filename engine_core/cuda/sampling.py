"""Sampling on the device: the settings of each slot, and which kernels draw a step's tokens.

    edit (bias, allowed ids, min_tokens, penalties) -> survey -> cut (min_p, top_k, top_p) -> draw -> count, rank

Nothing here waits for the device. A step runs the smallest set of kernels that all its rows can be drawn with; in a
larger set a row that needs less passes through unchanged, so its token is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from engine_core.cuda.edits import EditState, edit_flags
from engine_core.cuda.results import ResultRing
from engine_core.cuda.state import send
from engine_core.kernels import triton_cut, triton_draw, triton_edits, triton_logprobs, triton_survey
from engine_core.kernels import triton_slots as cells
from engine_core.request import Request


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
        self.last_tokens = torch.zeros(self._slots, dtype=torch.int32, device=device)
        self.results = ResultRing(rows, device)

    def enter(self, requests: Sequence[Request]) -> None:
        """These requests have come to their slots, or back to one: take their settings and what they have output."""
        records = np.stack([self._record(request) for request in requests])
        flags = records[:, cells.FLAGS.value]
        slots = np.array([request.slot for request in requests], np.int64)
        random = records[:, cells.TEMPERATURE.value] != 0
        truncated = flags & cells.TRUNCATED.value != 0
        full = flags & (cells.EDITED.value | cells.LOGPROBS.value) != 0
        self._needs[slots] = np.select([full, truncated, random], [Needs.FULL, Needs.TRUNCATED, Needs.RANDOM], 0)
        if full.any():
            self.results.allocate_logprobs()
            if self._edits is None:
                self._edits = EditState(self._slots, self._vocab_size, self._device)
            for request in requests:
                self._edits.enter(request)
        self._settings[send(slots, self._device)] = send(records, self._device)

    def needs(self, slots: Sequence[int]) -> Needs:
        """What a step that samples for these slots must be able to do."""
        return Needs(int(self._needs[list(slots)].max(initial=0)))

    def _record(self, request: Request) -> np.ndarray:
        """int32 [cells.WIDTH]."""
        sampling = request.sampling
        record = np.zeros(cells.WIDTH.value, np.int32)
        floats = record.view(np.float32)
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        flags = edit_flags(request)
        if not sampling.greedy:
            floats[cells.TEMPERATURE.value] = sampling.temperature
            if top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0:
                flags |= cells.TRUNCATED.value
        if sampling.logprobs is not None:
            flags |= cells.LOGPROBS.value
            record[cells.NUM_LOGPROBS.value] = sampling.logprobs
        record[cells.FLAGS.value] = flags
        seed = request.seed % 2**64
        record.view(np.uint32)[[cells.SEED_LOW.value, cells.SEED_HIGH.value]] = seed % 2**32, seed >> 32
        record[cells.TOP_K.value] = top_k
        floats[cells.TOP_P.value] = sampling.top_p
        floats[cells.MIN_P_LOG.value] = np.log(sampling.min_p) if sampling.min_p > 0.0 else -np.inf
        floats[cells.REPETITION.value] = sampling.repetition_penalty
        floats[cells.PRESENCE.value] = sampling.presence_penalty
        floats[cells.FREQUENCY.value] = sampling.frequency_penalty
        record[cells.MIN_LENGTH.value] = min(request.num_prompt_tokens + sampling.min_tokens, 2**31 - 1)
        record[cells.NUM_BIASED.value] = len(sampling.logit_bias)
        return record

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

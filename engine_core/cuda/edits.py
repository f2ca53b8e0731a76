"""What requests do to their logits, on the device: one row per slot of bias, allowed ids, ends and tokens seen."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.cuda.state import send
from engine_core.kernels.triton_slots import ALLOWED, BIASED, MIN_TOKENS, PENALISED
from engine_core.request import Request
from ipc.sampling import MAX_TOKEN_LIST


def edit_flags(request: Request) -> int:
    """Which of the edits a request wants, as bits of its slot's flags."""
    sampling = request.sampling
    flags = PENALISED.value if sampling.penalises else 0
    flags |= ALLOWED.value if sampling.allowed_token_ids is not None else 0
    flags |= MIN_TOKENS.value if sampling.min_tokens > 0 else 0
    return flags | (BIASED.value if sampling.logit_bias else 0)


class EditState:
    """Allocated when the first request comes that edits its logits: two bytes per slot and token of the vocabulary.

    A slot's rows belong to the request that entered it last, and only those that its flags name are filled.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        words = -(-vocab_size // 32)
        # Twice the count in the output, plus 1 if the token is in the prompt. The kernel that draws counts on.
        self.seen = torch.zeros(slots, vocab_size, dtype=torch.int16, device=device)
        self.allowed = torch.zeros(slots, words, dtype=torch.int32, device=device)  # one bit per token
        self.ends = torch.zeros(slots, words, dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros(slots, MAX_TOKEN_LIST, dtype=torch.int32, device=device)
        self.biases = torch.zeros(slots, MAX_TOKEN_LIST, dtype=torch.float32, device=device)

    def enter(self, request: Request) -> None:
        """Fill the rows of the request's slot. All tokens sampled for it so far must be committed."""
        sampling, slot, flags = request.sampling, request.slot, edit_flags(request)
        if flags & PENALISED.value:
            row = self.seen[slot]
            row.zero_()
            row.index_fill_(0, send(np.array(request.prompt_ids, np.int64), self._device), 1)
            if request.output_ids:
                ids, counts = np.unique(np.array(request.output_ids, np.int64), return_counts=True)
                row.index_add_(
                    0, send(ids, self._device), send((2 * counts).clip(max=32764).astype(np.int16), self._device)
                )
        if sampling.allowed_token_ids is not None:
            self.allowed[slot] = send(self._bits(sampling.allowed_token_ids), self._device)
        if flags & MIN_TOKENS.value:
            ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else request.eos_token_ids)
            self.ends[slot] = send(self._bits(ends), self._device)
        if sampling.logit_bias:
            count = len(sampling.logit_bias)
            self.bias_ids[slot, :count] = send(np.fromiter(sampling.logit_bias.keys(), np.int32, count), self._device)
            self.biases[slot, :count] = send(np.fromiter(sampling.logit_bias.values(), np.float32, count), self._device)

    def _bits(self, ids: Iterable[int]) -> NDArray[np.int32]:
        """int32 [words] with a bit for each of `ids` that is in the vocabulary."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[[token for token in ids if token < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view("<i4")

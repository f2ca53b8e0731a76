"""Log-probabilities of prompt tokens, from the hidden states of a step: the host's way. A GPU's own kernels have
`cuda/prompt_logprobs.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine_core.plan import ScheduledRow
from engine_core.sampler import Sampler
from ipc.messages import TokenLogprobs

ROWS = 256  # positions whose logits are held at a time


def wants_prompt_logprobs(row: ScheduledRow) -> bool:
    """Whether this step computes a position that is followed by a prompt token whose value was asked for."""
    return row.request.sampling.prompt_logprobs is not None and row.start < row.request.num_prompt_tokens - 1


@torch.inference_mode()
def prompt_logprobs(
    row: ScheduledRow, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], sampler: Sampler
) -> list[TokenLogprobs]:
    """Values of the row's positions that are followed by a prompt token. `hidden` begins at its first token."""
    values: list[TokenLogprobs] = []
    stop = min(row.stop, row.request.num_prompt_tokens - 1)
    top = row.request.sampling.prompt_logprobs or 0
    for start in range(row.start, stop, ROWS):
        end = min(start + ROWS, stop)
        part = logits(hidden[start - row.start : end - row.start])
        values += sampler.prompt_logprobs(part, row.request.prompt_ids[start + 1 : end + 1].tolist(), top)
    return values

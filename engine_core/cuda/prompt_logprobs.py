"""Log-probabilities of prompt tokens: records for the host, made by the kernels of sampled tokens'. Nothing waits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine_core.cuda.state import send
from engine_core.kernels import triton_logprobs, triton_slots, triton_survey
from engine_core.plan import ScheduledRow
from engine_core.prompt_logprobs import ROWS

CELLS = triton_slots.WIDTH.value


def prompt_records(
    row: ScheduledRow, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """int32 [positions, cells], on its way: of the row's positions that are followed by a prompt token, in the form
    that `results.read_records` reads. `hidden` begins at the row's first token."""
    request, device = row.request, hidden.device
    next_ids = request.prompt_ids[row.start + 1 : row.stop + 1]
    settings = np.zeros(CELLS, np.int32)  # of a slot that asks for this and nothing else
    settings[triton_slots.FLAGS.value] = triton_slots.LOGPROBS.value
    settings[triton_slots.NUM_LOGPROBS.value] = request.sampling.prompt_logprobs or 0
    given = send(np.concatenate((settings, next_ids)), device)
    slot, tokens = given[:CELLS].view(1, CELLS), given[CELLS:]
    zeros = torch.zeros(min(ROWS, len(tokens)), dtype=torch.int32, device=device)  # the slot of each row; the turn
    records = torch.full((len(tokens), triton_logprobs.record_width()), -1, dtype=torch.int32, device=device)
    for start in range(0, len(tokens), ROWS):
        part = slice(start, min(start + ROWS, len(tokens)))
        values, ring, own = logits(hidden[part]), records[None, part], tokens[None, part]
        slots = zeros[: len(values)]
        found = triton_survey.survey(values, values, slots, slot, logprobs=True)
        triton_logprobs.best(values, slots, slot, found, ring, zeros[:1])
        triton_logprobs.rank(values, slots, slot, found, own, ring, zeros[:1])
    return records

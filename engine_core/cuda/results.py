"""Tokens and log-probabilities on their way to the host: rings on the device, copied to pinned memory beside the next
step. Waiting for a step is waiting for its copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.cuda.state import aligned
from engine_core.kernels import triton_logprobs
from engine_core.kernels.triton_draw import MASKED
from engine_core.kernels.triton_logprobs import AHEAD, IDS, LOGITS, OWN, SUM, TOP
from engine_core.logprobs import LOWEST
from engine_core.plan import ScheduledRow, StepTokens
from engine_core.request import Request
from ipc.messages import TokenLogprobs

TIMES = 4  # int32 cells of a step's two times
TURNS = 4  # results that may be on their way to the host at once; more than the engine ever has in flight
NOT_FINITE = "the model's logits hold NaN or infinity"
ALL_MASKED = "no token is allowed: every one of them is masked"


class Scored(NamedTuple):
    """A request's prompt tokens with their log-probabilities."""

    request: Request
    records: torch.Tensor  # int32 [tokens, cells]


@dataclass(slots=True)
class CudaStep:
    """A step on its way."""

    done: torch.cuda.Event
    times: NDArray[np.int64]  # pinned [2]: when it began and ended, in ns of the device's clock, if it was told to say
    tokens: torch.Tensor  # pinned int32 [sampling rows]
    logprobs: dict[int, int]  # index of a row that wants log-probabilities -> how many alternatives
    records: torch.Tensor | None  # pinned, if there are such rows
    scored: Sequence[tuple[Scored, torch.Tensor]] = ()  # as the device has it, which must not be freed yet, and pinned
    # Called once it is complete with whether it was waited for and `times`: when that was in the host's time, if known.
    seen: Callable[[bool, int, int], tuple[int, int] | None] = lambda *_: None

    def wait(self) -> StepTokens:
        waited = not self.done.query()
        self.done.synchronize()
        begin, end = self.times.tolist()
        result = StepTokens([], span=self.seen(waited, begin, end))
        ids: list[int] = self.tokens.tolist()
        for index, token in enumerate(ids):
            if token < 0:
                ids[index] = 0
                result.failed[index] = ALL_MASKED if token == MASKED else NOT_FINITE
        result.token_ids.extend(ids)
        if self.records is not None:
            counts = {index: count for index, count in self.logprobs.items() if index not in result.failed}
            values = read_records(self.records.numpy()[list(counts)], list(counts.values()))
            result.logprobs.update(zip(counts, values, strict=True))
        for (request, _), host in self.scored:
            asked = [request.sampling.prompt_logprobs or 0] * len(host)
            result.prompt_logprobs[request.request_id] = read_records(host.numpy(), asked)
        return result


class ResultRing:
    """`tokens`: int32 [TURNS, rows]; `times`: int64 [TURNS, 2]; `logprobs`: int32 [TURNS, rows, cells], once a request
    has wanted them."""

    def __init__(self, rows: int, device: torch.device) -> None:
        # Times and tokens in one, so that they come to the host in one copy.
        self._cells = torch.zeros(TURNS, TIMES + aligned(rows), dtype=torch.int32, device=device)
        self._host_cells = _pinned_like(self._cells)
        self.tokens = self._cells[:, TIMES : TIMES + rows]
        self.times = self._cells.view(torch.int64)[:, :2]
        self._host_times = self._host_cells.view(torch.int64)[:, :2].numpy()
        self.logprobs: torch.Tensor | None = None
        self._host_logprobs: torch.Tensor | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = [torch.cuda.Event() for _ in range(TURNS if self._copies else 0)]
        self._turn = 0

    def next_turn(self) -> int:
        self._turn = (self._turn + 1) % TURNS
        return self._turn

    def allocate_logprobs(self) -> None:
        if self.logprobs is None:
            shape = (*self.tokens.shape, triton_logprobs.record_width())
            self.logprobs = torch.zeros(shape, dtype=torch.int32, device=self.tokens.device)
            self._host_logprobs = _pinned_like(self.logprobs)

    def fetch(
        self,
        turn: int,
        sampling: Sequence[ScheduledRow],
        ended: torch.cuda.Event,
        with_logprobs: bool,
        with_times: bool,
        scored: Sequence[Scored],
    ) -> CudaStep:
        """Start the copy of what a step has sampled, once it has `ended`, beside whatever comes after it."""
        count, done = len(sampling), ended
        wanted: dict[int, int] = {}
        if with_logprobs:
            asked = ((index, row.request.sampling.logprobs) for index, row in enumerate(sampling))
            wanted = {index: number for index, number in asked if number is not None}
        cells, records = self._host_cells[turn, : TIMES + count], None
        prompts = [(found, _pinned_like(found.records)) for found in scored]
        if count or with_times or scored:
            assert self._copies is not None
            self._copies.wait_event(ended)
            with torch.cuda.stream(self._copies):
                cells.copy_(self._cells[turn, : TIMES + count], non_blocking=True)
                if wanted:
                    assert self.logprobs is not None
                    assert self._host_logprobs is not None
                    records = self._host_logprobs[turn, :count]
                    records.copy_(self.logprobs[turn, :count], non_blocking=True)
                for found, host in prompts:
                    host.copy_(found.records, non_blocking=True)
                done = self._copied[turn]
                done.record(self._copies)
        return CudaStep(done, self._host_times[turn], cells[TIMES:], wanted, records, prompts)


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return host.pin_memory() if tensor.device.type == "cuda" else host


def read_records(records: NDArray[np.int32], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The values of some rows [rows, cells], each with up to so many alternatives, from the cells that the kernels of
    `triton_logprobs` have filled. All at once, since a prompt has thousands."""
    cells, most = records.view(np.float32), max(counts, default=0)
    ids = records[:, IDS.value : IDS.value + most].astype("<i4")
    found = ((ids >= 0) & (np.arange(most) < np.array(counts, int)[:, None])).sum(1)
    logits = np.hstack((cells[:, LOGITS.value : LOGITS.value + most], cells[:, [OWN.value]])).astype(np.float64)
    top, total = cells[:, [TOP.value]].astype(np.float64), cells[:, [SUM.value]].astype(np.float64)
    values = np.nan_to_num(logits - top - np.log(total), nan=LOWEST)  # NaN: of a prompt's row with no finite logits
    values = np.clip(values, LOWEST, 0.0)
    top_values, ranks = values[:, :-1].astype("<f4"), 1 + records[:, AHEAD.value :].sum(1)
    return [
        TokenLogprobs(logprob, rank, ids[row, :count].tobytes(), top_values[row, :count].tobytes())
        for row, (logprob, rank, count) in enumerate(
            zip(values[:, -1].tolist(), ranks.tolist(), found.tolist(), strict=True)
        )
    ]

"""What the host makes of the cells that a step has left for it."""

from __future__ import annotations

import numpy as np
import torch

from engine_core.cuda.results import CudaStep, Scored, read_records
from engine_core.kernels.triton_logprobs import AHEAD, IDS, LOGITS, OWN, SUM, TOP, record_width
from engine_core.logprobs import LOWEST
from engine_core.request import Request
from ipc.messages import TokenLogprobs
from ipc.sampling import SamplingParams


class _Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def record(own: float, best: dict[int, float]) -> np.ndarray:
    """Of logits that are 2 at most and whose exponentials sum to e ** 3; three tokens are ahead."""
    cells = np.full(record_width(), -1, np.int32)
    floats = cells.view(np.float32)
    floats[[OWN.value, TOP.value, SUM.value]] = own, 2.0, np.e
    cells[IDS.value : IDS.value + len(best)] = list(best)
    floats[LOGITS.value : LOGITS.value + len(best)] = list(best.values())
    cells[AHEAD.value :] = [1, 2] + [0] * (record_width() - AHEAD.value - 2)
    return cells


def not_finite() -> np.ndarray:
    """Of a row with NaN or infinity, in which nothing is found."""
    cells = np.full(record_width(), -1, np.int32)
    cells[AHEAD.value :] = 0
    return cells


def values(value: TokenLogprobs) -> tuple[float, int, list[int], list[float]]:
    ids, logprobs = np.frombuffer(value.top_ids, "<i4"), np.frombuffer(value.top_logprobs, "<f4")
    return round(value.logprob, 5), value.rank, ids.tolist(), [round(logprob, 5) for logprob in logprobs.tolist()]


def test_each_record_has_as_many_alternatives_as_were_asked_for_and_found() -> None:
    best = {7: 2.0, 5: 1.0, 9: -np.inf}
    rows = np.stack([record(1.0, best), record(0.0, {}), not_finite(), record(-np.inf, best)])
    found = [values(value) for value in read_records(rows, [2, 3, 3, 0])]
    assert found[:2] == [(-2.0, 4, [7, 5], [-1.0, -2.0]), (-3.0, 4, [], [])]
    assert found[2:] == [(LOWEST, 1, [], []), (LOWEST, 4, [], [])]
    assert read_records(rows[:0], []) == []


def test_a_step_tells_of_rows_that_did_not_fail_and_of_prompts() -> None:
    records = torch.from_numpy(np.stack([record(1.0, {7: 2.0}), not_finite(), record(0.0, {7: 2.0})]))
    request = Request(3, [1, 2, 3], SamplingParams(prompt_logprobs=1))
    scored = [(Scored(request, records[:2]), records[:2])]
    ids = torch.tensor([4, -1, 6], dtype=torch.int32)
    tokens = CudaStep(_Done(), np.zeros(2, np.int64), ids, {0: 0, 1: 1, 2: 1}, records, scored).wait()  # type: ignore[arg-type]
    assert tokens.token_ids == [4, 0, 6]
    assert list(tokens.failed) == [1]
    assert {row: values(value)[2] for row, value in tokens.logprobs.items()} == {0: [], 2: [7]}
    assert [values(value)[:3] for value in tokens.prompt_logprobs[3]] == [
        (-2.0, 4, [7]),
        (LOWEST, 1, []),
    ]

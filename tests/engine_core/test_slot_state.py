"""What the GPU is told of block tables, with tensors on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from engine_core.cuda import state
from engine_core.cuda.state import SlotState, Staging
from engine_core.plan import ScheduledRow
from engine_core.request import Request
from ipc.sampling import SamplingParams

CPU = torch.device("cpu")


@pytest.mark.parametrize("most_blocks", [4, 16_384])
def test_the_device_knows_each_block_that_a_step_uses(most_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MOST_BLOCKS", most_blocks)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng, entered, expected = random.Random(seed), list[Request](), list[Request]()
    tables = SlotState(6, 20, CPU, entered.extend)
    owners: dict[int, Request] = {}
    for number in range(100):
        rows, decode = [], rng.random() < 0.5
        for slot in rng.sample(range(6), rng.randint(1, 6)):
            request = owners.get(slot)
            if request is None or len(request.block_ids) == 20 or rng.random() < 0.2:
                if request is not None:
                    tables.forget(request)
                request = owners[slot] = Request(number, [0], SamplingParams(), slot=slot)
                expected.append(request)
            start = 4 * len(request.block_ids)
            grown = 1 if decode else rng.randint(1, 20 - len(request.block_ids))
            request.block_ids += [rng.randrange(1, 1000) for _ in range(grown)]
            rows.append(ScheduledRow(request, start, 1 if decode else 4 * grown - rng.randrange(4), True))
        if decode:
            for row, block in zip(rows, tables.new_blocks(rows, 4), strict=True):
                if block >= 0:  # the step's own kernel writes it
                    tables.tables[row.request.slot, row.start // 4] = block
        else:
            tables.upload(rows, 4)
        assert entered == expected
        for row in rows:
            used = -(-row.stop // 4)
            assert tables.tables[row.request.slot, :used].tolist() == row.request.block_ids[:used]
    assert not tables.tables[tables.pad].any()


def test_arrays_are_staged_one_after_the_other_and_aligned() -> None:
    staging = Staging(64, CPU)
    for _ in range(2 * state.STAGES):
        arrays = [torch.randint(1 << 30, (count,), dtype=torch.int32) for count in (5, 8, 3)]
        found = staging.send([array.numpy() for array in arrays])
        assert [part.storage_offset() for part in found] == [0, 8, 16]
        assert all(torch.equal(*pair) for pair in zip(arrays, found, strict=True))

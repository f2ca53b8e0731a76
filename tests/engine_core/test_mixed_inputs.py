"""The inputs of steps with prompt tokens in them, against their definitions token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine_core.attention.base import AttentionSpec
from engine_core.cuda.mixed import MixedInputs, mixed_inputs
from engine_core.kernels.triton_attention import query_tile
from engine_core.plan import ScheduledRow
from engine_core.request import Request
from ipc.sampling import SamplingParams


def random_row(rng: random.Random, slot: int, block_size: int) -> ScheduledRow:
    """A decode row, a chunk of any size or a whole prompt, with or without a token that only the device knows."""
    request = Request(100 + slot, [rng.randrange(1000) for _ in range(rng.choice((1, 5, 17, 90)))], SamplingParams())
    request.slot, request.num_pending = slot, rng.randint(0, 1)
    request.output_ids = [rng.randrange(1000) for _ in range(rng.choice((0, 1, 7)))]
    request.block_ids = [rng.randrange(1, 10_000) for _ in range(-(-request.num_tokens // block_size) + 1)]
    stop = rng.randint(1, request.num_tokens)
    start = rng.choice((0, stop - 1, rng.randrange(stop)))
    return ScheduledRow(request, start, stop - start, rng.random() < 0.7)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("tile_all", [False, True])
def test_each_token_has_its_id_its_place_and_its_tile(block_size: int, tile_all: bool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    spec = AttentionSpec(1, 9, 3, 64, block_size, torch.bfloat16, torch.device("cpu"))
    for _ in range(30):
        plan = [random_row(rng, slot, block_size) for slot in rng.sample(range(64), rng.randint(1, 20))]
        sampling = [row for row in plan if row.samples]
        rows = sorted(plan, key=lambda row: row.count > 1)
        host = mixed_inputs(rows, sampling, spec, 3, tile_all)
        assert all(array.dtype == np.int32 for array in host.arrays)
        found = MixedInputs(*(torch.from_numpy(array) for array in host.arrays))
        tokens = [(row, position) for row in rows for position in range(row.start, row.stop)]
        ids = [(row.request.known_ids(position, position + 1) or [-1])[0] for row, position in tokens]
        assert found.ids.tolist() == ids
        assert found.token_slots.tolist() == [row.request.slot for row, _ in tokens]
        assert found.positions.tolist() == [position for _, position in tokens]
        places = [
            row.request.block_ids[position // block_size] * block_size + position % block_size
            for row, position in tokens
        ]
        assert found.slot_mapping.tolist() == places
        starts = [sum(row.count for row in rows[:index]) for index in range(len(rows) + 1)]
        assert found.query_starts.tolist() == host.query_starts == starts
        assert found.lengths.tolist() == [row.stop for row in rows]
        tiled = [index for index, row in enumerate(rows) if tile_all or row.count > 1]
        tiles = [(index, first) for index in tiled for first in range(0, rows[index].count, query_tile(spec))]
        assert list(zip(found.tile_rows.tolist(), found.tile_starts.tolist(), strict=True)) == tiles
        assert found.logits_rows.tolist() == [starts[rows.index(row) + 1] - 1 for row in sampling]
        assert found.logits_slots.tolist() == [row.request.slot for row in sampling]
        assert found.logits_lengths.tolist() == [row.stop for row in sampling]

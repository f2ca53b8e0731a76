"""The inputs of graphs, and which are captured ahead. That they compute what they should is tested in tests/gpu."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from engine_core.attention.base import AttentionSpec
from engine_core.cuda.graphs import LADDER, PREPARED, TOKEN_LADDER, DecodeGraphs, GraphCache, MixedGraphs
from engine_core.cuda.mixed import MixedLayout, mixed_inputs
from engine_core.cuda.sampling import Needs
from engine_core.plan import ScheduledRow
from engine_core.request import Request
from ipc.sampling import SamplingParams


def is_aligned(part: torch.Tensor, buffer: torch.Tensor) -> bool:
    return (part.data_ptr() - buffer.data_ptr()) % 16 == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 255, 256])
def test_inputs_of_decode_graphs_are_where_they_are_read_and_aligned(rows: int) -> None:
    graphs = DecodeGraphs(GraphCache(), lambda *_: None, rows, 99, torch.device("cpu"))
    assert graphs.sizes == [*(size for size in LADDER if size < rows), rows]
    for size in graphs.sizes:
        count = max(1, size - 1)
        inputs = graphs.inputs(count)
        values = graphs.host_inputs(range(count), range(10, 10 + count), range(20, 20 + count), 3)
        inputs.buffer.copy_(torch.from_numpy(values))
        padding = len(inputs.slots) - count
        assert inputs.slots.tolist() == [*range(count), *[99] * padding]
        assert inputs.lengths.tolist() == [*range(10, 10 + count), *[1] * padding]
        assert inputs.new_blocks.tolist() == [*range(20, 20 + count), *[-1] * padding]
        assert inputs.order.tolist() == [*reversed(range(count)), *range(count, count + padding)]
        assert inputs.turn.tolist() == [3]
        for part in (inputs.slots, inputs.lengths, inputs.new_blocks, inputs.order, inputs.turn):
            assert is_aligned(part, inputs.buffer)


def test_inputs_of_mixed_graphs_are_aligned_and_hold_the_step() -> None:
    spec = AttentionSpec(1, 9, 3, 64, 16, torch.bfloat16, torch.device("cpu"))
    requests = [
        Request(slot, [slot] * n, SamplingParams(), block_ids=[1, 2], slot=slot) for slot, n in enumerate((1, 5))
    ]
    rows = [ScheduledRow(request, 0, request.num_prompt_tokens, True) for request in requests]
    host = mixed_inputs(rows, rows, spec, 2, tile_all=True)
    layout = MixedLayout(8, 99, torch.device("cpu"))
    lengths = layout.lengths(16, 32)
    padded = torch.from_numpy(layout.padded(host.arrays, 16, 32))
    assert len(padded) == sum(lengths)
    parts = padded.split(lengths)
    assert all(is_aligned(part, padded) for part in parts)
    for array, part in zip(host.arrays, parts, strict=True):
        assert part[: len(array)].tolist() == np.asarray(array).tolist()
    assert set(parts[6][2:].tolist()) == {6}  # padding rows begin where the last real one ends


class Recording(GraphCache):
    """Keeps the keys of what it is told to capture."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.captured: list[Any] = []

    def _capture(self, step: Any, inputs: torch.Tensor, padding: torch.Tensor) -> Any:
        assert padding.shape == inputs.shape
        self.captured.append(step)


def test_graphs_are_captured_ahead_one_by_one_and_none_twice() -> None:
    cache = Recording()
    cpu = torch.device("cpu")
    decode = DecodeGraphs(cache, lambda *_: None, 6, 6, cpu)
    mixed = MixedGraphs(cache, lambda *_: None, MixedLayout(8, 6, cpu))
    assert cache.prepare(*decode._graph(3, 300, Needs.RANDOM))  # a request needed it before
    work = itertools.chain(mixed.prepare(), decode.prepare(700))
    for count, _ in enumerate(work, 1):
        assert len(cache.captured) == count + 1
    sizes, lengths = (1, 2, 4, 6), (256, 512, 1024)
    expected = {("mixed", size, needs) for size in TOKEN_LADDER for needs in PREPARED}
    expected |= {("decode", *key) for key in itertools.product(sizes, lengths, PREPARED)}
    assert cache._graphs.keys() == expected
    assert len(cache.captured) == len(expected)
    assert not any(True for _ in decode.prepare(700))

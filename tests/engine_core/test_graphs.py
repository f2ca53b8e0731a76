"""The inputs of graphs, and which are captured ahead. That they compute what they should is tested in tests/gpu."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from bench.shapes import SHAPES
from engine_core.attention.base import AttentionSpec
from engine_core.costs import ModelCosts
from engine_core.cuda.graphs import LADDER, PREPARED, DecodeGraphs, GraphCache
from engine_core.cuda.mixed import MixedLayout, mixed_inputs
from engine_core.cuda.mixed_graphs import FEW_ROWS, MAX_UNSPLIT_CONTEXT, MixedGraphs, MixedSize
from engine_core.cuda.sampling import Needs
from engine_core.cuda.step_times import StepTimes
from engine_core.models.config import from_hf
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
    assert [len(array) for array in host.arrays[9:11]] == [1, 1]  # the one decode row
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

    def _has_room(self) -> bool:
        return True

    def _capture(self, step: Any, inputs: torch.Tensor, padding: torch.Tensor) -> Any:
        assert padding.shape == inputs.shape
        self.captured.append(step)
        return "a graph"


def make_mixed(cache: GraphCache, max_rows: int, max_tokens: int, pays: bool = True) -> MixedGraphs:
    layout = MixedLayout(8, max_rows, torch.device("cpu"))
    return MixedGraphs(cache, lambda *_: None, layout, max_rows, max_tokens, lambda *_: pays)


def test_graphs_are_captured_ahead_one_by_one_and_none_twice() -> None:
    cache = Recording()
    decode = DecodeGraphs(cache, lambda *_: None, 6, 6, torch.device("cpu"))
    mixed = make_mixed(cache, 6, 64)
    assert cache.prepare(*decode._graph(3, 300, Needs.RANDOM))  # a request needed it before
    work = itertools.chain(mixed.prepare(), decode.prepare(700))
    for count, _ in enumerate(work, 1):
        assert len(cache.captured) == count + 1
    sizes, lengths = (1, 2, 4, 6), (256, 512, 1024)
    expected: set[tuple[Any, ...]]
    expected = {("mixed", MixedSize(tokens, FEW_ROWS), needs) for tokens in (16, 32, 64) for needs in PREPARED}
    expected |= {("decode", *key) for key in itertools.product(sizes, lengths, PREPARED)}
    assert cache._graphs.keys() == expected
    assert len(cache.captured) == len(expected)
    assert not any(True for _ in decode.prepare(700))


class Full(Recording):
    """Has no memory for any."""

    def _capture(self, step: Any, inputs: torch.Tensor, padding: torch.Tensor) -> Any:
        super()._capture(step, inputs, padding)


def test_a_graph_there_is_no_memory_for_is_run_as_launches_from_then_on() -> None:
    cache, ran = Full(), []
    decode = DecodeGraphs(cache, lambda inputs, *_: ran.append(len(inputs.slots)), 6, 6, torch.device("cpu"))
    decode.replay(2, 100, Needs.GREEDY)
    decode.replay(2, 100, Needs.GREEDY)
    assert ran == [2, 2]
    assert len(cache.captured) == 1
    mixed, rows = make_mixed(cache, 6, 64), scheduled((0, 9))
    size = mixed.size_for(rows, 9, Needs.GREEDY)
    assert size is not None
    mixed.replay(size, Needs.GREEDY)
    assert mixed.size_for(rows, 9, Needs.GREEDY) is None  # without a graph it need not be padded
    assert mixed.size_for(rows, 9, Needs.RANDOM) is not None


def test_captures_ahead_end_with_the_first_that_there_is_no_memory_for() -> None:
    cache = Full()
    decode = DecodeGraphs(cache, lambda *_: None, 6, 6, torch.device("cpu"))
    work = itertools.chain(make_mixed(cache, 6, 64).prepare(), decode.prepare(700))
    assert next(work, "the end") == "the end"
    assert len(cache.captured) == 1


def scheduled(*rows: tuple[int, int], **sampling: Any) -> list[ScheduledRow]:
    requests = [Request(slot, [0] * stop, SamplingParams(**sampling), slot=slot) for slot, (_, stop) in enumerate(rows)]
    return [
        ScheduledRow(request, start, stop - start, True) for request, (start, stop) in zip(requests, rows, strict=True)
    ]


@pytest.mark.parametrize(
    ("max_rows", "max_tokens"), [(1, 1), (6, 64), (31, 100), (32, 2048), (256, 2048), (512, 20000)]
)
def test_steps_have_a_size_that_holds_them(max_rows: int, max_tokens: int) -> None:
    graphs = make_mixed(GraphCache(), max_rows, max_tokens)
    for one in graphs.sizes:
        assert one.tokens >= one.num_decodes
        assert one.rows <= graphs.max_rows
        assert graphs.inputs(one)[1].logits_rows.shape[0] <= graphs.max_rows  # what results have room for
    for count in {1, min(31, max_rows), min(33, max_rows), max_rows}:
        for tokens in {count, max(count, max_tokens // 3), max(count, max_tokens)}:
            size = graphs.size_for(scheduled((0, tokens - count + 1), *[(8, 9)] * (count - 1)), tokens, Needs.GREEDY)
            assert size is not None
            assert size.rows > count  # padding has a row of its own
            assert size.tokens >= tokens
            assert size.num_decodes == 0 or size.rows > FEW_ROWS


def test_steps_that_no_graph_is_for() -> None:
    graphs = make_mixed(GraphCache(), 256, 2048)
    long = (MAX_UNSPLIT_CONTEXT, MAX_UNSPLIT_CONTEXT + 1)
    assert graphs.size_for(scheduled((0, 9), long), 10, Needs.GREEDY) is None  # nobody would split it
    assert graphs.size_for(scheduled((0, 9), long, *[(3, 4)] * 40), 50, Needs.GREEDY) == MixedSize(64, 64)
    assert graphs.size_for(scheduled((0, 9), prompt_logprobs=1), 9, Needs.GREEDY) is None
    assert make_mixed(GraphCache(), 256, 2048, pays=False).size_for(scheduled((0, 9)), 9, Needs.GREEDY) is None


def test_graphs_are_for_steps_that_would_wait_for_the_host() -> None:
    """On an H200 a step of 8,192 tokens takes 15 ms of kernels for 0.6B and 175 for 8B, and 20 ms of launches."""
    small, large = (ModelCosts(from_hf(SHAPES[name]), 2, 2) for name in ("qwen3-0.6b", "qwen3-8b"))
    few, many = StepTimes(small, 132 * 4.2e12), StepTimes(large, 132 * 4.2e12)
    whole, fourteen, chunk = scheduled((0, 8192)), scheduled(*[(0, 562)] * 14), scheduled((512, 1024))
    assert few.graph_pays(fourteen, 8192)
    assert few.graph_pays(scheduled((0, 4096)), 4096)
    assert not few.graph_pays(whole, 8192)  # cuDNN is worth more
    assert few.graph_pays(chunk, 512)
    assert not many.graph_pays(fourteen, 8192)  # its kernels keep the GPU busy by themselves
    assert not many.graph_pays(whole, 8192)
    assert many.graph_pays(chunk, 512)

"""Kernels compile side by side ahead of their first launch, here for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.attention.base import AttentionSpec
from engine_core.cuda.graphs import LADDER, DecodeGraphs, GraphCache
from engine_core.cuda.mixed import MixedLayout, mixed_inputs
from engine_core.plan import ScheduledRow
from engine_core.request import Request
from ipc.sampling import SamplingParams

# A driver that knows the GPU's name and nothing else: what is launched would raise.
SCRIPT = """
import threading
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
from engine_core.kernels import triton_draw
from engine_core.kernels.triton_compile import compile_only

def draw(logits, ring):
    slots = torch.arange(4, dtype=torch.int32)
    last = torch.full((5,), -7, dtype=torch.int32)
    triton_draw.draw(logits, slots, slots, None, last, ring, slots[:1])
    return last

def launch(errors):
    try:
        draw(torch.randn(4, 1000), torch.zeros(1, 4, dtype=torch.int32))
    except Exception as error:
        errors.append(error)

ring = torch.full((1, 4), -7, dtype=torch.int32)
shares, errors = [], []
with compile_only(shares.append):
    for _ in range(3):  # the second and third time the kernels are on their way
        assert draw(torch.randn(4, 1000), ring).eq(-7).all() and ring.eq(-7).all()
    other = threading.Thread(target=launch, args=(errors,))  # another engine of this process goes on as ever
    other.start()
    other.join()
assert errors, "a launch of another thread was swallowed"
assert shares[-1] == 1.0 and shares == sorted(shares)
with compile_only(shares.append):
    draw(torch.randn(4, 1000), ring)
kernels = triton_draw._draw_part.device_caches[0][0]
assert len(kernels) == 1 and "cubin" in next(iter(kernels.values())).asm
errors.clear()
launch(errors)
assert errors, "launches are still swallowed"
"""


def test_launches_compile_and_do_not_run(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


def is_aligned(part: torch.Tensor, buffer: torch.Tensor) -> bool:
    return (part.data_ptr() - buffer.data_ptr()) % 16 == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 255, 256])
def test_inputs_of_decode_graphs_are_where_they_are_read_and_aligned(rows: int) -> None:
    graphs = DecodeGraphs(GraphCache(), lambda *_: torch.empty(0), rows, 99, torch.device("cpu"))
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
        assert inputs.turn.tolist() == [3]
        for part in (inputs.slots, inputs.lengths, inputs.new_blocks, inputs.turn):
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

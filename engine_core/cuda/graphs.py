"""Steps as CUDA graphs, captured when first needed. A graph reads its inputs from one fixed buffer that one copy fills.

A decode step takes the next larger size of a ladder; the rows left over belong to the padding slot and write to block
0, which holds nothing. A graph is right for any context length, since the kernels read lengths on the device: its
length class only sets over how many programs a sequence's KV is split.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_core.cuda.sampling import Needs
from engine_core.cuda.state import aligned
from engine_core.memory import is_out_of_memory

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
LENGTH_CLASSES = (256, 512, 1024, 4096, 16384, 1 << 30)

logger = logging.getLogger(__name__)

Step = Callable[[], None]  # reads the inputs it was made for, and draws the tokens
Graph = tuple[Hashable, Step, torch.Tensor, Callable[[], np.ndarray]]  # the arguments of `GraphCache.replay`
PREPARED = (Needs.RANDOM, Needs.GREEDY, Needs.TRUNCATED)  # what requests mostly need


class GraphCache:
    """Graphs by key, in one memory pool: only one runs at a time. Not `enabled`: the same steps, launch by launch.

    What passes between a step's kernels is held twice once there are graphs: by their pool, and by the allocator for
    steps without one. `reserve` is what the largest step takes there; a capture must leave as much.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.reserve = 0  # bytes
        self.full = False  # a capture was refused for want of memory
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._refused: set[Hashable] = set()
        self._pool: Any = None  # torch's opaque handle
        self._stream: torch.cuda.Stream | None = None  # one for all captures: cuBLAS keeps a workspace for each

    def replay(self, key: Hashable, step: Step, inputs: torch.Tensor, padding: Callable[[], np.ndarray]) -> None:
        """Run `step` on what is in `inputs` now.

        `padding`: inputs of a step made of padding alone, to compile and capture with.
        """
        if key in self._graphs or self.prepare(key, step, inputs, padding):
            self._graphs[key].replay()
        else:
            step()

    def prepare(self, key: Hashable, step: Step, inputs: torch.Tensor, padding: Callable[[], np.ndarray]) -> bool:
        """Capture what `replay` would capture with the same arguments. False: there was nothing to do, or no memory."""
        if not self.enabled or key in self._graphs or key in self._refused:
            return False
        graph = self._capture(step, inputs, torch.from_numpy(padding())) if self._has_room() else None
        if graph is None:
            logger.info("no memory for a graph of %s: such steps run without", key)
            self._refused.add(key)
            self.full = True
            return False
        self._graphs[key] = graph
        return True

    def refused(self, key: Hashable) -> bool:
        """There was no memory for this graph."""
        return key in self._refused

    def forget(self) -> None:
        """Capture all anew: what the steps launch has changed."""
        self._graphs.clear()
        self._refused.clear()
        self.full = False
        self._pool = None  # it lives no longer than the graphs in it

    def _has_room(self) -> bool:
        """For the graph, which may need as much as the largest step, and for that step beside it."""
        torch.cuda.empty_cache()  # as a capture does anyway
        return torch.cuda.mem_get_info()[0] >= 2 * self.reserve

    def _capture(self, step: Step, inputs: torch.Tensor, padding: torch.Tensor) -> torch.cuda.CUDAGraph | None:
        """None: there was no memory after all."""
        torch.cuda.synchronize()  # the padded step writes where results of earlier steps may still be copied from
        given = inputs.clone()
        inputs.copy_(padding)
        current = torch.cuda.current_stream()
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                step()  # compiles kernels and makes library handles, which a capture cannot
            torch.cuda.synchronize()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # one that fails at once is no news
                with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                    step()
            self._pool = self._pool or graph.pool()
        except RuntimeError as error:  # torch's own, or that of a library or the driver
            torch.cuda.set_stream(current)  # a capture that fails at its end does not
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            torch.cuda.synchronize()  # the padded step may have been left on its way
            inputs.copy_(given)
        return graph


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """int32 views of one buffer: per row, and one cell with the turn of the result ring."""

    buffer: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    new_blocks: torch.Tensor
    order: torch.Tensor  # rows from the longest to the shortest
    turn: torch.Tensor

    @staticmethod
    def allocate(rows: int, device: torch.device) -> DecodeInputs:
        width = aligned(rows)
        buffer = torch.zeros(4 * width + 1, dtype=torch.int32, device=device)
        slots, lengths, new_blocks, order = (part[:rows] for part in buffer[:-1].split(width))
        return DecodeInputs(buffer, slots, lengths, new_blocks, order, buffer[-1:])


DecodeStep = Callable[[DecodeInputs, int, Needs], None]  # inputs, longest context, what its rows are drawn with


class DecodeGraphs:
    def __init__(self, cache: GraphCache, step: DecodeStep, max_rows: int, pad_slot: int, device: torch.device) -> None:
        self._cache, self._step, self._pad_slot, self._device = cache, step, pad_slot, device
        self.sizes = [size for size in LADDER if size < max_rows] + [max_rows]
        self._inputs = {size: DecodeInputs.allocate(size, device) for size in self.sizes}

    def host_inputs(
        self, slots: Sequence[int], lengths: Sequence[int], new_blocks: Sequence[int], turn: int
    ) -> np.ndarray:
        """int32 in the layout of `DecodeInputs`, padded to the next size of the ladder."""
        rows = len(slots)
        size = self.size_for(rows)
        values = np.empty(4 * aligned(size) + 1, np.int32)
        parts = values[:-1].reshape(4, -1)
        for part, given, padding in zip(parts, (slots, lengths, new_blocks), (self._pad_slot, 1, -1), strict=False):
            part[:rows], part[rows:] = given, padding
        parts[3, :size] = np.argsort(-parts[1, :size], kind="stable")
        values[-1] = turn
        return values

    def inputs(self, rows: int) -> DecodeInputs:
        return self._inputs[self.size_for(rows)]

    def size_for(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)

    def replay(self, rows: int, longest: int, needs: Needs) -> None:
        """Run the step whose inputs are in `inputs(rows)`."""
        self._cache.replay(*self._graph(rows, longest, needs))

    def prepare(self, max_context: int) -> Iterator[None]:
        """Capture the graphs for contexts up to `max_context`, one for each `next`."""
        longest = next(length for length in LENGTH_CLASSES if length >= max_context)
        for length in LENGTH_CLASSES[: LENGTH_CLASSES.index(longest) + 1]:
            for rows, needs in itertools.product(self.sizes, PREPARED):
                if self._cache.full:
                    return
                if self._cache.prepare(*self._graph(rows, length, needs)):
                    yield

    def _graph(self, rows: int, longest: int, needs: Needs) -> Graph:
        inputs = self.inputs(rows)
        longest = next(length for length in LENGTH_CLASSES if length >= longest)
        size = len(inputs.slots)

        def padding() -> np.ndarray:
            return self.host_inputs([self._pad_slot] * size, [1] * size, [-1] * size, 0)

        key = ("decode", size, longest, needs)
        return key, lambda: self._step(inputs, longest, needs), inputs.buffer, padding

"""Steps with prompt tokens in them as CUDA graphs, in sizes that hold any mix of decode rows, prompts and chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine_core.cuda.graphs import PREPARED, Graph, GraphCache
from engine_core.cuda.mixed import MixedInputs, MixedLayout
from engine_core.cuda.sampling import Needs
from engine_core.cuda.state import aligned
from engine_core.plan import ScheduledRow

TOKEN_LADDER = (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROW_LADDER = (64, 128, 256, 512)
FEW_ROWS = 32  # fewer rows than this: decode rows are prompts of one token, which saves kernels
# Such a decode row is not split over programs: with a longer context than this it would be the slowest part.
MAX_UNSPLIT_CONTEXT = 4096
LARGE_TOKENS = 1024  # steps of more have no kernels of their own


class MixedSize(NamedTuple):
    """Tokens and rows, with those for padding."""

    tokens: int
    rows: int

    @property
    def num_decodes(self) -> int:
        """Rows that paged decode attention computes. It may take rows that are not decode rows: it gets padding for
        them, and what it leaves in their place is overwritten by the prefill kernel."""
        return 0 if self.rows <= FEW_ROWS else self.rows


class MixedGraphs:
    def __init__(
        self,
        cache: GraphCache,
        step: Callable[[MixedInputs, MixedSize, Needs], None],
        layout: MixedLayout,
        max_rows: int,
        max_tokens: int,
        pays: Callable[[Sequence[ScheduledRow], int], bool],
    ) -> None:
        """`max_rows`, `max_tokens`: of a step, without padding. `pays`: `StepTimes.graph_pays`."""
        self._cache, self._step, self._layout, self._pays = cache, step, layout, pays
        self._inputs: dict[MixedSize, tuple[torch.Tensor, MixedInputs]] = {}
        row_ladder = [FEW_ROWS, *(rows for rows in ROW_LADDER if FEW_ROWS < rows < max_rows)]
        if max_rows >= FEW_ROWS:
            row_ladder.append(aligned(max_rows + 1))
        self.max_rows = row_ladder[-1]  # of a step, with padding
        most = max(max_tokens, TOKEN_LADDER[0])
        token_ladder = [tokens for tokens in TOKEN_LADDER if tokens < most] + [most]
        # Padding needs a row of its own, and paged decode attention a token for each row.
        self.sizes = [
            MixedSize(tokens, rows)
            for rows, tokens in itertools.product(row_ladder, token_ladder)
            if rows == FEW_ROWS or tokens >= rows
        ]

    def compiled_sizes(self) -> list[MixedSize]:
        """A few that need every kernel that any needs, and one for the decode rows of a step without a graph."""
        first = {size.rows: size for size in reversed(self.sizes)}
        small = [size for size in self.sizes if size.rows == FEW_ROWS and size.tokens <= LARGE_TOKENS]
        return [*small, *first.values(), self.sizes[-1], MixedSize(2 * FEW_ROWS, FEW_ROWS + 1)]

    def size_for(self, rows: Sequence[ScheduledRow], tokens: int, needs: Needs) -> MixedSize | None:
        """The size that holds this step, or None if it should run without a graph, as it is."""
        fits = (size for size in self.sizes if size.rows > len(rows) and size.tokens >= tokens)
        size = next(fits, None)
        if size is None or self._cache.refused(_key(size, needs)):
            return None
        for row in rows:
            unsplit = row.count == 1 and size.num_decodes == 0
            if (unsplit and row.stop > MAX_UNSPLIT_CONTEXT) or row.request.sampling.prompt_logprobs is not None:
                return None
        return size if self._pays(rows, size.tokens) else None

    def inputs(self, size: MixedSize) -> tuple[torch.Tensor, MixedInputs]:
        """The fixed buffer of this size, and its parts."""
        if size not in self._inputs:
            lengths = self._layout.lengths(size.tokens, size.rows)
            buffer = torch.zeros(sum(lengths), dtype=torch.int32, device=self._layout.device)
            self._inputs[size] = buffer, MixedInputs(*buffer.split(lengths))
        return self._inputs[size]

    def replay(self, size: MixedSize, needs: Needs) -> None:
        """Run the step whose inputs are in `inputs(size)`."""
        self._cache.replay(*self._graph(size, needs))

    def prepare(self) -> Iterator[None]:
        """Capture the graphs that may pay, one for each `next`."""
        for size, needs in itertools.product(self.sizes, PREPARED):
            if self._cache.full:
                return
            if self._pays((), size.tokens) and self._cache.prepare(*self._graph(size, needs)):
                yield

    def _graph(self, size: MixedSize, needs: Needs) -> Graph:
        buffer, inputs = self.inputs(size)

        def padding() -> np.ndarray:
            return self._layout.padding(size.tokens, size.rows)

        return _key(size, needs), lambda: self._step(inputs, size, needs), buffer, padding


def _key(size: MixedSize, needs: Needs) -> Hashable:
    return "mixed", size, needs

"""A plan as tensors: what one forward pass reads, passed explicitly. Made anew each step, or kept while rows decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engine_core.plan import ScheduledRow, StepPlan

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_SPARE_BLOCKS = 16  # that rows may enter before their tables need another tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of all rows one after the other: row i owns [query_starts[i], query_starts[i + 1]).

    The tensors live on the model's device; the lists and arrays of row sizes stay on the host, where launches are
    decided. What they hold may be moved on from step to step: see `Batches`.
    """

    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slot_mapping: torch.Tensor  # int64 [tokens]: block * block_size + offset, where the token's K and V go
    block_tables: torch.Tensor  # int32 [rows, widest table or more], padded with 0
    query_starts: Int32Array  # [rows + 1]
    query_lens: Int32Array  # [rows]: tokens computed in this step
    context_lens: Int64Array  # [rows]: tokens in the KV pool once this step's are written
    logits_rows: torch.Tensor  # int64 [sampling rows]: the token indices whose logits are needed to sample

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)


def make_batch(
    plan: StepPlan, block_size: int, device: torch.device, pending: Sequence[int] | Int64Array = ()
) -> ForwardBatch:
    """The tensors of `plan`.

    `pending[slot]` is the last id sampled for that slot, which may not be committed yet.
    """
    rows = plan.rows
    counts = np.array([row.count for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int64)
    if len(rows) == plan.num_tokens:  # one each, most often
        query_starts = np.arange(len(rows) + 1, dtype=np.int32)
        token_row, positions = query_starts[:-1], starts
    else:
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        token_row = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(query_starts[-1], dtype=np.int64) + (starts - query_starts[:-1])[token_row]
    context_lens = starts + counts
    tables = _block_tables(rows, block_size)
    slots = tables[token_row, positions // block_size].astype(np.int64) * block_size + positions % block_size
    samples = np.array([row.samples for row in rows], np.bool_)
    return ForwardBatch(
        token_ids=torch.from_numpy(_token_ids(plan, int(query_starts[-1]), pending)).to(device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        query_starts=query_starts,
        query_lens=counts,
        context_lens=context_lens,
        logits_rows=torch.from_numpy((query_starts[1:] - 1)[samples].astype(np.int64)).to(device),
    )


class Batches:
    """The batches of plans on the CPU, in the order of launch, by a runner that is done with each before the next.

    A plan often takes the next token of just the rows that the last one had. Then the last batch comes again, *the same
    object*: each of its rows is one token further, and all else is as it was: who they are, in which order, and where
    the tensors lie.
    """

    def __init__(self, block_size: int, pending: Int64Array) -> None:
        """`pending`: as for `make_batch`, at all times."""
        self._block_size, self._pending = block_size, pending
        self._decoding: _Decoding | None = None

    def of(self, plan: StepPlan) -> ForwardBatch:
        """The tensors of `plan`, valid until the next call."""
        if self._decoding is not None and self._decoding.advance(plan):
            return self._decoding.batch
        batch = make_batch(plan, self._block_size, torch.device("cpu"), self._pending)
        self._decoding = None
        if plan.num_decodes == len(plan.rows):
            self._decoding = _Decoding(batch, plan.rows, self._block_size, self._pending)
            batch = self._decoding.batch
        return batch


class _Decoding:
    """The batch of decode rows alone, to be moved on from step to step.

    A request with decode rows at positions p and p + 1 in two steps on end has kept its blocks, but for one that may
    have joined them, and its slot: whoever loses them comes back with a chunk.
    """

    def __init__(
        self, batch: ForwardBatch, rows: tuple[ScheduledRow, ...], block_size: int, pending: Int64Array
    ) -> None:
        self._rows, self._block_size, self._pending = rows, block_size, pending
        self._request_slots = np.array([row.request.slot for row in rows], np.int64)
        self._token_ids = batch.token_ids.numpy()
        width = batch.block_tables.shape[1]
        self._tables = np.zeros((len(rows), width + _SPARE_BLOCKS), np.int32)
        self._tables[:, :width] = batch.block_tables.numpy()
        # In one array, to be moved on by one addition.
        self._places = np.stack([batch.positions.numpy(), batch.slot_mapping.numpy(), batch.context_lens])
        self._ones = np.ones_like(self._places)  # of the same shape: a number would be made an array each time
        positions, slots = torch.from_numpy(self._places[:2])
        self.batch = replace(
            batch,
            positions=positions,
            slot_mapping=slots,
            context_lens=self._places[2],
            block_tables=torch.from_numpy(self._tables),
        )

    def advance(self, plan: StepPlan) -> bool:
        """Become the batch of `plan`. False: it is no such plan, or a block table has outgrown the tensor."""
        rows, size, room = plan.rows, self._block_size, self._tables.shape[1] * self._block_size
        if len(rows) != len(self._rows) or plan.num_decodes != len(rows):
            return False
        entering: list[tuple[int, ScheduledRow]] = []  # another block, and their indices
        for index, (row, last) in enumerate(zip(rows, self._rows, strict=True)):
            if row.request is not last.request or row.start != last.start + 1 or row.samples != last.samples:
                return False
            if not row.start % size:
                if row.start == room:
                    return False
                entering.append((index, row))
        self._rows = rows
        self._pending.take(self._request_slots, out=self._token_ids, mode="clip")  # with "raise" it would be buffered
        self._places += self._ones
        for index, row in entering:
            block = row.request.block_ids[row.start // size]
            self._tables[index, row.start // size] = block
            self._places[1, index] = block * size
        return True


def _token_ids(plan: StepPlan, count: int, pending: Sequence[int] | Int64Array) -> Int64Array:
    """int64 [count]. A decode row's is the last id sampled for its slot, committed or not."""
    ids = np.empty(count, np.int64)
    at = plan.num_decodes if len(pending) else 0
    if at:
        ids[:at] = np.asarray(pending, np.int64)[[row.request.slot for row in plan.rows[:at]]]
    for row in plan.rows[at:]:
        known = row.request.known_array(row.start, row.stop)
        ids[at : at + len(known)] = known
        at += row.count
        if len(known) < row.count:
            ids[at - 1] = pending[row.request.slot]
    return ids


def _block_tables(rows: Sequence[ScheduledRow], block_size: int) -> Int32Array:
    """[rows, widest], each row's blocks up to the one that holds its last token."""
    widths = [-(-row.stop // block_size) for row in rows]
    tables = np.zeros((len(rows), max(widths, default=0)), np.int32)
    for i, (row, width) in enumerate(zip(rows, widths, strict=True)):
        tables[i, :width] = row.request.block_ids[:width]
    return tables

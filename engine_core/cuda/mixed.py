"""The inputs of a step with prompt tokens in it: one int32 buffer, one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine_core.attention.base import AttentionSpec
from engine_core.cuda.state import aligned
from engine_core.kernels.triton_attention import query_tile
from engine_core.plan import ScheduledRow


class MixedInputs(NamedTuple):
    """int32 on the device. `ids` of -1 stand for the last token sampled for the slot in `token_slots`."""

    ids: torch.Tensor  # [tokens]
    token_slots: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slot_mapping: torch.Tensor  # [tokens]
    row_slots: torch.Tensor  # [rows]: which block table
    lengths: torch.Tensor  # [rows]: context with this step's tokens
    query_starts: torch.Tensor  # [rows + 1]
    tile_rows: torch.Tensor  # [tiles]: row and first query token of each program of the prefill kernel
    tile_starts: torch.Tensor  # [tiles]
    decode_slots: torch.Tensor  # [decode rows]: slots and lengths of those that decode attention takes
    decode_lengths: torch.Tensor
    logits_rows: torch.Tensor  # [sampling rows]: token index, slot and length of each, in the order of the plan
    logits_slots: torch.Tensor
    logits_lengths: torch.Tensor
    turn: torch.Tensor  # [1]


@dataclass(frozen=True, slots=True)
class MixedHost:
    """The same on the host, and what launches are decided by."""

    arrays: tuple[np.ndarray, ...]
    query_starts: list[int]
    num_decodes: int
    longest_decode: int
    longest_prompt: int = 0  # context
    whole: bool = False  # every prompt row holds its whole context
    fresh: bool = False  # and they are long enough for cuDNN to win


# Below this many tokens a prompt, cuDNN's launches, one for each prompt and layer, take longer than all the prompts
# together in the paged kernel.
FRESH_MIN_TOKENS = 2048


def mixed_inputs(
    rows: Sequence[ScheduledRow], sampling: Sequence[ScheduledRow], spec: AttentionSpec, turn: int, tile_all: bool
) -> MixedHost:
    """`rows`: the decode rows, then the others. `sampling`: the rows that sample, in the order of the plan.

    `tile_all`: the prefill kernel takes the decode rows as well.
    """
    block_size = spec.block_size
    slot_list = [row.request.slot for row in rows]
    slots = np.array(slot_list, np.int32)
    counts = np.array([row.count for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    lengths = starts + counts
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    decodes = int((counts == 1).sum())
    prompts = rows[decodes:]
    whole = bool(prompts) and all(row.start == 0 for row in prompts)

    ids, blocks = _ids_and_blocks(rows, query_starts, block_size)
    positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], counts)
    first, last = starts // block_size, (lengths - 1) // block_size
    block_zero = np.cumsum(last - first + 1, dtype=np.int32) - last - 1  # where it would be among a row's `blocks`
    block = positions // block_size
    mapping = blocks[block + np.repeat(block_zero, counts)] * block_size + positions - block * block_size
    first_row = 0 if tile_all else decodes
    tile_rows, tile_starts = _tiles(counts[first_row:], query_tile(spec))
    row_of = dict(zip(slot_list, range(len(rows)), strict=True))
    chosen = np.array([row_of[row.request.slot] for row in sampling], np.int32)
    return MixedHost(
        arrays=(
            ids,
            np.repeat(slots, counts),
            positions,
            mapping,
            slots,
            lengths,
            query_starts,
            tile_rows + np.int32(first_row),
            tile_starts,
            slots[:decodes],
            lengths[:decodes],
            query_starts[1:][chosen] - 1,
            slots[chosen],
            lengths[chosen],
            np.array([turn], np.int32),
        ),
        query_starts=query_starts.tolist(),
        num_decodes=decodes,
        longest_decode=int(lengths[:decodes].max(initial=0)),
        longest_prompt=int(lengths[decodes:].max(initial=0)),
        whole=whole,
        fresh=whole and sum(row.count for row in prompts) >= FRESH_MIN_TOKENS * len(prompts),
    )


def _ids_and_blocks(
    rows: Sequence[ScheduledRow], query_starts: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [tokens], -1 for those that are on their way; and of each row the blocks that it writes to, one row after
    the other."""
    ids, blocks = np.full(query_starts[-1], -1, np.int32), list[int]()
    for row, at in zip(rows, query_starts.tolist(), strict=False):
        request, start, count = row.request, row.start, row.count
        outputs = start - request.num_prompt_tokens
        if count == 1 and outputs >= 0:  # the most, and seldom known
            blocks.append(request.block_ids[start // block_size])
            if outputs < len(request.output_ids):
                ids[at] = request.output_ids[outputs]
        else:
            blocks += request.block_ids[start // block_size : (start + count - 1) // block_size + 1]
            known = request.known_array(start, start + count)
            ids[at : at + len(known)] = known
    return ids, np.array(blocks, np.int32)


def _tiles(counts: np.ndarray, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and first query token of each tile of `tile` tokens, int32; rows have `counts` tokens."""
    tiles = -(-counts // tile)
    firsts = np.cumsum(tiles, dtype=np.int32) - tiles
    starts = np.arange(tiles.sum(), dtype=np.int32) - np.repeat(firsts, tiles)
    return np.repeat(np.arange(len(counts), dtype=np.int32), tiles), starts * tile


@dataclass(frozen=True, slots=True)
class MixedLayout:
    """The inputs of a step of fixed size, which a graph can read: arrays padded to `tokens` and `rows`."""

    tile: int  # query tokens per program of the prefill kernel
    pad_slot: int
    device: torch.device

    def lengths(self, tokens: int, rows: int) -> list[int]:
        tiles = -(-tokens // self.tile) + rows
        lengths = [tokens] * 4 + [rows, rows, rows + 1, tiles, tiles] + [rows] * 5 + [1]
        return [aligned(length) for length in lengths]

    def padded(self, arrays: Sequence[np.ndarray], tokens: int, rows: int) -> np.ndarray:
        """One int32 array. Needs fewer real rows than `rows`: the last one is padding, and owns the tiles left over."""
        lengths = self.lengths(tokens, rows)
        values = np.repeat(self._fill(rows, int(arrays[6][-1])), lengths)
        start = 0
        for array, length in zip(arrays, lengths, strict=True):
            values[start : start + len(array)] = array
            start += length
        return values

    def padding(self, tokens: int, rows: int) -> np.ndarray:
        empty = np.zeros(0, np.int32)
        return self.padded([*[empty] * 6, np.zeros(1, np.int32), *[empty] * 8], tokens, rows)

    def _fill(self, rows: int, last: int) -> np.ndarray:
        """The value of each array's padding. `last`: where the last real row ends."""
        pad = self.pad_slot
        return np.array((-1, pad, 0, 0, pad, 1, last, rows - 1, 0, pad, 1, 0, pad, 1, 0), np.int32)

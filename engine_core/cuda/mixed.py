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
    counts = np.array([row.count for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    slots = np.array([row.request.slot for row in rows], np.int32)
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = (np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[row_of]).astype(np.int32)
    ids = np.full(query_starts[-1], -1, np.int32)
    mapping = np.empty(query_starts[-1], np.int32)
    for row, at in zip(rows, query_starts.tolist(), strict=False):
        known = row.request.known_array(row.start, row.stop)
        ids[at : at + len(known)] = known
        where = positions[at : at + row.count]
        blocks = np.array(row.request.block_ids[row.start // block_size : -(-row.stop // block_size)], np.int32)
        mapping[at : at + row.count] = (
            blocks[where // block_size - row.start // block_size] * block_size + where % block_size
        )
    decodes = int((counts == 1).sum())
    tile = query_tile(spec)
    tiles = [
        (index, first)
        for index in range(0 if tile_all else decodes, len(rows))
        for first in range(0, int(counts[index]), tile)
    ]
    index_of = {row.request.request_id: index for index, row in enumerate(rows)}
    chosen = np.array([index_of[row.request.request_id] for row in sampling], np.int32)
    prompts = rows[decodes:]
    whole = bool(prompts) and all(row.start == 0 for row in prompts)
    return MixedHost(
        arrays=(
            ids,
            slots[row_of],
            positions,
            mapping,
            slots,
            starts + counts,
            query_starts,
            np.array([tile[0] for tile in tiles], np.int32),
            np.array([tile[1] for tile in tiles], np.int32),
            slots[:decodes],
            (starts + counts)[:decodes],
            query_starts[1:][chosen] - 1,
            slots[chosen],
            (starts + counts)[chosen],
            np.array([turn], np.int32),
        ),
        query_starts=query_starts.tolist(),
        num_decodes=decodes,
        longest_decode=int((starts + counts)[:decodes].max(initial=0)),
        longest_prompt=int((starts + counts)[decodes:].max(initial=0)),
        whole=whole,
        fresh=whole and sum(row.count for row in prompts) >= FRESH_MIN_TOKENS * len(prompts),
    )


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
        last = arrays[6][-1]
        pad = self.pad_slot
        fill = (-1, pad, 0, 0, pad, 1, last, rows - 1, 0, pad, 1, 0, pad, 1, 0)
        parts = []
        for array, length, value in zip(arrays, self.lengths(tokens, rows), fill, strict=True):
            parts += [array, np.full(length - len(array), value, np.int32)]
        return np.concatenate(parts)

    def padding(self, tokens: int, rows: int) -> np.ndarray:
        empty = np.zeros(0, np.int32)
        return self.padded([*[empty] * 6, np.zeros(1, np.int32), *[empty] * 8], tokens, rows)

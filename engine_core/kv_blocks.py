"""The pool of KV blocks: who holds which, and what may be given out next. Knows numbers of blocks, not their contents.

A block is in exactly one of three states, so `num_free + num_cached + num_in_use == total`:

    free    nobody holds it, its contents are worth nothing
    cached  nobody holds it, but the prefix cache can still find it; taken back when the free ones are used up
    in use  `ref_counts[block]` holders

Block 0 is never given out: padded rows and the unused ends of block tables point at it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine_core.prefix_cache import PrefixCache


class BlockPool:
    """`num_blocks` counts block 0. Blocks whose contents `cache` knows outlive their last holder until reallocated."""

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs block 0 and at least one more, got {num_blocks} blocks")
        self.total = num_blocks - 1
        self.ref_counts = [0] * num_blocks
        self._cache = cache
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the block freed last is warm, and goes out first
        self._reusable: OrderedDict[int, None] = OrderedDict()  # cached blocks, the least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._reusable)

    @property
    def num_in_use(self) -> int:
        return self.total - len(self._free) - len(self._reusable)

    @property
    def num_available(self) -> int:
        """How many `allocate` can give."""
        return len(self._free) + len(self._reusable)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each and contents that nobody else can find.

        Raises RuntimeError, and takes nothing, if there are fewer.
        """
        if count > self.num_available:
            raise RuntimeError(f"{count} KV blocks asked for, {self.num_available} available")
        free, counts = self._free, self.ref_counts
        rest = max(0, len(free) - count)
        blocks = free[rest:]
        blocks.reverse()
        del free[rest:]
        if len(blocks) < count:
            oldest = self._reusable.popitem
            reused = [oldest(last=False)[0] for _ in range(count - len(blocks))]
            self._cache.discard(reused)
            blocks += reused
        for block in blocks:
            counts[block] = 1
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these, which are in use or cached."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._reusable[block]
            self.ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder less for each block of this table.

        The end of a prefix is useless without its beginning, so the last blocks become the first to be reallocated.
        """
        counts, is_cached = self.ref_counts, self._cache.holds
        for block in reversed(blocks):
            holders = counts[block] - 1
            if holders < 0:
                raise RuntimeError(f"KV block {block} released more often than held")
            counts[block] = holders
            if not holders:
                if is_cached(block):
                    self._reusable[block] = None
                else:
                    self._free.append(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """The contents of these blocks are not to be found again, by anyone."""
        self._cache.discard(blocks)
        for block in blocks:
            if block in self._reusable:
                del self._reusable[block]
                self._free.append(block)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these are cached and not in use: acquiring them takes that many from `num_available`."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless every block is in one state and has as many holders as `tables` name it."""
        holders = Counter(block for table in tables for block in table)
        free, cached = set(self._free), set(self._reusable)
        in_use = {block for block, count in enumerate(self.ref_counts) if count}
        if len(free) != len(self._free):
            raise AssertionError("a block is twice in the free list")
        if 0 in free | cached | in_use | set(holders):
            raise AssertionError("block 0 was given out")
        if free & cached or (free | cached) & in_use or len(free) + len(cached) + len(in_use) != self.total:
            raise AssertionError(f"{len(free)} free + {len(cached)} cached + {len(in_use)} in use != {self.total}")
        if holders != Counter({block: self.ref_counts[block] for block in in_use}):
            raise AssertionError(f"reference counts differ from holders {holders}")
        if any(self._cache.holds(block) for block in free) or not all(self._cache.holds(block) for block in cached):
            raise AssertionError("cached blocks are not those that the prefix cache knows")

"""The KV of requests: blocks from the pool, prefixes from the cache. The scheduler decides, this carries it out."""

from __future__ import annotations

import sys

from engine_core.kv_blocks import BlockPool
from engine_core.limits import Limits
from engine_core.outcome import wants_prompt_logprobs
from engine_core.prefix_cache import BlockHasher, PrefixCache
from engine_core.request import Request


class KvManager:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cache = PrefixCache()
        self.pool = BlockPool(limits.num_blocks, self.cache)
        self._hasher = BlockHasher(limits.block_size)
        self._in_flight: dict[int, set[bytes]] = {}  # step -> hashes of the blocks whose ends it computes

    def find_prefix(self, request: Request) -> list[int] | None:
        """Cached blocks to start from. None: a step in flight computes more of them, so better wait for it."""
        if not self.limits.prefix_caching or wants_prompt_logprobs(request):
            return []
        found = self.cache.match(request, self._hasher)
        missing = request.block_hashes[len(found) : (request.num_tokens - 1) // self.limits.block_size]
        awaited = missing and any(missing[0] in hashes for hashes in self._in_flight.values())
        return None if awaited else found

    def fits(self, request: Request, found: list[int], reserve: int) -> bool:
        """Whether all its tokens do, with `reserve` blocks to spare."""
        needed = self.limits.blocks_for(request.num_tokens) - len(found) + self.pool.num_idle(found)
        return needed + reserve <= self.pool.num_available

    def take(self, request: Request, found: list[int]) -> None:
        """Blocks for all its tokens, so that it needs no other before it decodes. Those in `found` are computed."""
        size = self.limits.block_size
        self.pool.acquire(found)
        request.block_ids = found + self.pool.allocate(self.limits.blocks_for(request.num_tokens) - len(found))
        request.num_computed_tokens = len(found) * size
        request.register_at = request.num_computed_tokens + size if self.limits.prefix_caching else sys.maxsize
        self._set_horizon(request)

    def num_own_blocks(self, request: Request) -> int:
        """How many become available when it gives its blocks back."""
        return sum(self.pool.ref_counts[block] == 1 for block in request.block_ids)

    def grow(self, request: Request) -> bool:
        """One more block. False: there is none."""
        if not self.pool.num_available:
            return False
        request.block_ids += self.pool.allocate(1)
        self._set_horizon(request)
        return True

    def _set_horizon(self, request: Request) -> None:
        # The last token a request may have is sampled, never computed.
        last = request.num_prompt_tokens + request.max_output_tokens - 1
        request.horizon = min(len(request.block_ids) * self.limits.block_size, last)

    def announce(self, request: Request, start: int, stop: int, step: int) -> None:
        """`step` computes positions [start, stop): whoever needs the blocks that end there may wait for them."""
        if self.limits.prefix_caching:
            size = self.limits.block_size
            self._hasher.extend(request, stop)
            if hashes := request.block_hashes[start // size : stop // size]:
                self._in_flight.setdefault(step, set()).update(hashes)

    def register(self, request: Request, num_computed: int) -> None:
        """Let others find the full blocks among the first `num_computed` tokens, whose KV is in the pool."""
        if num_computed < request.register_at:
            return
        size = self.limits.block_size
        self._hasher.extend(request, num_computed)
        full = slice(request.register_at // size - 1, num_computed // size)
        self.cache.insert(request.block_hashes[full], request.block_ids[full])
        request.register_at = (num_computed // size + 1) * size

    def forget(self, request: Request) -> None:
        """What this request computed is not to be found by anyone."""
        known = [self.cache.find(block_hash) for block_hash in request.block_hashes]
        self.pool.forget([block for block in known if block is not None])

    def settle(self, step: int) -> None:
        """Step `step` and all before it are done."""
        for done in [end for end in self._in_flight if end <= step]:
            del self._in_flight[done]

    @property
    def idle(self) -> bool:
        """Nobody holds a block and nothing is being computed."""
        return not self.pool.num_in_use and not self._in_flight

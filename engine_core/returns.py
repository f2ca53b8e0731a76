"""What requests leave behind when they end or are preempted: it goes back once no step in flight uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine_core.kv_blocks import BlockPool
from engine_core.request import Request
from engine_core.slots import Slots


class Returns:
    """`release` is called with a request just before its slot can go to another."""

    def __init__(self, pool: BlockPool, slots: Slots, release: Callable[[Request], None]) -> None:
        self._pool, self._slots, self._release = pool, slots, release
        self._held: dict[int, list[tuple[Request, list[int]]]] = {}  # step -> what its end gives back

    def __bool__(self) -> bool:
        """Whether something is still to come back."""
        return bool(self._held)

    def __iter__(self) -> Iterator[tuple[Request, list[int]]]:
        return (entry for entries in self._held.values() for entry in entries)

    def vacate(self, request: Request, done: int) -> None:
        """Take slot and blocks from a request. `done` is the newest step that is committed."""
        blocks, request.block_ids = request.block_ids, []
        if request.last_plan > done:
            self._held.setdefault(request.last_plan, []).append((request, blocks))
        else:
            self._give_back(request, blocks)

    def settle(self, step: int) -> None:
        """Step `step` and all before it are committed."""
        for request, blocks in self._held.pop(step, ()):
            self._give_back(request, blocks)

    def _give_back(self, request: Request, blocks: list[int]) -> None:
        self._release(request)
        self._slots.give_back(request.slot)
        request.slot = -1
        self._pool.release(blocks)

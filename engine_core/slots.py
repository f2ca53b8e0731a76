"""Rows of per-request device state: `capacity` numbers, each with one owner or none."""

from __future__ import annotations

import heapq


class Slots:
    """Gives out the lowest free number, so that the rows in use stay close together."""

    def __init__(self, capacity: int) -> None:
        self._free = list(range(capacity))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Raises IndexError if none is free."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

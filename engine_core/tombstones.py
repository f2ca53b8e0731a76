"""Aborts that came before their request: the abort goes straight to the engine, the request by way of the tokenizer."""

from __future__ import annotations

from collections import OrderedDict


class Tombstones:
    """Remembers the newest `capacity` ids. Most are of requests that had just ended, and are never asked for."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, request_id: int) -> None:
        self._ids[request_id] = None
        self._ids.move_to_end(request_id)
        if len(self._ids) > self._capacity:
            self._ids.popitem(last=False)

    def take(self, request_id: int) -> bool:
        """Whether `request_id` was added; it is forgotten."""
        return self._ids.pop(request_id, self) is None

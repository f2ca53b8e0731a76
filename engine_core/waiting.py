"""Requests that wait for blocks and a slot, in the order in which they are to be served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from engine_core.request import Request

_order = attrgetter("order")


class WaitingQueue:
    """Sorted by `Request.order`, which is unique. A preempted request comes back to its old place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order)

    def remove(self, request: Request) -> None:
        """Raises ValueError if it is not here."""
        index = bisect_left(self._requests, request.order, key=_order)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id} is not waiting")
        del self._requests[index]

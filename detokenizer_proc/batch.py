"""Collects one step's output for one frontend: one row per request, details only for the rows that have any."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ipc.messages import Deltas, Detail, Ended, Opened, TextLogprob


@dataclass(slots=True)
class _Detail:
    opened: Opened | None = None
    logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_logprobs: list[TextLogprob | None] = field(default_factory=list)
    ended: Ended | None = None


class DeltaBatch:
    __slots__ = ("_details", "_num_tokens", "_rows", "_texts")

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # request id -> row
        self._num_tokens: list[int] = []
        self._texts: list[str] = []
        self._details: dict[int, _Detail] = {}

    def add(self, request_id: int, num_tokens: int, text: str) -> None:
        """Append to the request's row of this step, or start it."""
        new = len(self._texts)
        row = self._rows.setdefault(request_id, new)
        if row == new:
            self._num_tokens.append(num_tokens)
            self._texts.append(text)
        else:
            self._num_tokens[row] += num_tokens
            self._texts[row] += text

    def detail(self, request_id: int) -> _Detail:
        """The details of the request's row, which is made if there is none."""
        self.add(request_id, 0, "")
        return self._details.setdefault(self._rows[request_id], _Detail())

    def message(self) -> Deltas:
        return Deltas(
            request_ids=array("q", self._rows).tobytes(),
            num_tokens=self._num_tokens,
            texts=self._texts,
            details=[
                Detail(row, item.opened, item.logprobs, item.prompt_logprobs, item.ended)
                for row, item in self._details.items()
            ],
        )

"""Finds stop strings in text that arrives in pieces, and lets no character of one out before it is sure.

The result does not depend on where the pieces are cut: of all matches in the whole text the one that starts first
wins, and of two that start together the shorter. Text is held back only while it may be the beginning of a match that
would win. Each character costs one automaton step per stop string, and nothing at all where no stop string can start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(slots=True)
class _Pattern:
    """Knuth-Morris-Pratt over one stop string, with a failure table that grows only as far as text has matched.

    A border of a text is what it both begins and ends with: after a mismatch the search goes on from there.
    """

    text: str
    failure: list[int]  # failure[k]: length of the longest proper border of text[:k + 1]
    matched: int = 0  # how much of `text` the input now ends with

    def step(self, char: str) -> bool:
        """Take one character. True if the whole pattern ends here; `matched` is then reset to its border."""
        text, k = self.text, self.matched
        while k and text[k] != char:
            k = self._border(k)
        if text[k] == char:
            k += 1
        if k == len(text):
            self.matched = self._border(k)
            return True
        self.matched = k
        return False

    def _border(self, length: int) -> int:
        text, failure = self.text, self.failure
        while len(failure) < length:
            k, char = failure[-1], text[len(failure)]
            while k and text[k] != char:
                k = failure[k - 1]
            failure.append(k + 1 if text[k] == char else 0)
        return failure[length - 1]


@lru_cache(maxsize=1024)
def _char_class(chars: str) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(chars)}]")


class StopFinder:
    """One request's stop strings. After a match, `stop` is that string and no more text comes out."""

    __slots__ = ("_best", "_held", "_include", "_length", "_may_begin", "_patterns", "stop")

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        self._patterns = [_Pattern(stop, [0]) for stop in dict.fromkeys(stops)]
        self._may_begin = _char_class("".join(stop[0] for stop in stops)).search
        self._include = include_in_output
        self._held = ""  # the end of the text so far that may belong to a match
        self._length = 0  # characters seen
        self._best: tuple[int, str] | None = None  # a complete match (start, stop) that an earlier start may still beat
        self.stop: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """Take new text, return the text that is safe to send. `may_stop` False: matches that end in it don't count."""
        if self.stop is not None:
            return ""
        if not self._held and self._may_begin(text) is None:
            self._length += len(text)
            return text
        origin = self._length - len(self._held)  # position of the first character of `pending`
        pending = self._held + text
        for char in text:
            self._length += 1
            self._step(char, may_stop)
            if (best := self._best) is not None and self._earliest_open() >= best[0]:
                return self._cut(best, pending, origin)
        safe = self._earliest_open() if self._best is None else min(self._earliest_open(), self._best[0])
        self._held = pending[safe - origin :]
        return pending[: safe - origin]

    def flush(self) -> str:
        """No more text will come: settle an open match, or let go of what was held."""
        origin = self._length - len(self._held)
        if (best := self._best) is not None:
            return self._cut(best, self._held, origin)
        text, self._held = self._held, ""
        return text

    def _step(self, char: str, may_stop: bool) -> None:
        for pattern in self._patterns:
            if pattern.step(char) and may_stop:
                match = (self._length - len(pattern.text), pattern.text)
                if self._best is None or (match[0], len(match[1])) < (self._best[0], len(self._best[1])):
                    self._best = match

    def _earliest_open(self) -> int:
        return self._length - max(pattern.matched for pattern in self._patterns)

    def _cut(self, best: tuple[int, str], pending: str, origin: int) -> str:
        start, self.stop = best
        self._best, self._held = None, ""
        return pending[: start - origin + (len(self.stop) if self._include else 0)]

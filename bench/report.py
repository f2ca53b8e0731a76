"""Where the results of a long measurement go: printed and kept at once, so that nothing is lost when a part fails."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

LEAST_S = 5.0  # no part is begun with less than this


class TooLate(Exception):
    """A part took longer than it may. No OSError, as TimeoutError is: who expects those of sockets must not see it."""


class Report:
    """Lines of JSON, printed and appended to `out`, with the fields `about` there; and a `summary` for people, to be
    printed at the end. Nothing is begun after `budget_s`."""

    def __init__(self, out: Path | None, budget_s: float, about: Mapping[str, Any]) -> None:
        self.summary: list[str] = []
        self._out, self._about = out, about
        self._deadline = time.monotonic() + budget_s

    def emit(self, what: str, **fields: Any) -> None:
        line = {"what": what, **fields}
        print(_json(line), flush=True)
        if self._out is not None:
            with self._out.open("a", encoding="utf-8") as file:
                file.write(_json({**line, **self._about}) + "\n")

    def say(self, text: str) -> None:
        self.summary.append(text)

    def attempt(self, what: str, limit_s: float, work: Callable[[], T]) -> T | None:
        """`work`'s result, or None: what goes wrong, or takes too long, costs this part alone."""
        begin = time.monotonic()
        limit_s = min(limit_s, self._deadline - begin)
        if limit_s < LEAST_S:
            self.emit("left out", part=what, why="the budget is spent")
            return None
        try:
            with alarm(limit_s):
                return work()
        except Exception as error:
            traceback.print_exc()
            self.emit("failed", part=what, error=f"{type(error).__name__}: {error}"[:2000])
            return None
        finally:
            self.emit("took", part=what, s=round(time.monotonic() - begin, 2))


def _json(line: dict[str, Any]) -> str:
    return msgspec.json.encode(line).decode()  # what is not a number becomes null


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises `TooLate` in here after so long. In the main thread only."""

    def ring(*_: object) -> None:
        raise TooLate(f"not done after {seconds:.0f} s")

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def rounded(values: Sequence[float], digits: int = 5) -> list[float]:
    return [round(value, digits) for value in values]


def missed(met: bool) -> str:
    return "" if met else ", MISSED"

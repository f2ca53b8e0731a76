"""Progress on a terminal, for the library. Prints nothing where standard error is not one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from engine_core.plan import ProgressCallback

if TYPE_CHECKING:
    from engine_core.collect import Collector

_REFRESH = 0.1  # seconds


def _shown(wanted: bool) -> bool:
    return wanted and sys.stderr.isatty()


@contextmanager
def load_progress(wanted: bool) -> Iterator[ProgressCallback]:
    """A callback for the phases of loading."""
    if not _shown(wanted):
        yield lambda phase, fraction: None
        return
    with _bar() as bar:
        task = bar.add_task("loading", total=None)
        yield lambda phase, fraction: bar.update(
            task, description=phase, total=None if fraction is None else 1.0, completed=fraction or 0.0
        )


class BatchProgress:
    """How many of the prompts are answered, and at how many tokens a second."""

    def __init__(self, num_prompts: int, wanted: bool) -> None:
        self._num_prompts = num_prompts
        self._bar = _bar("{task.fields[rate]}") if num_prompts and _shown(wanted) else None
        self._next = 0.0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("prompts", total=self._num_prompts, rate="")
            self._began = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, collectors: Sequence[Collector]) -> None:
        if self._bar is None or (now := time.monotonic()) < self._next:
            return
        self._next = now + _REFRESH
        tokens = sum(collector.num_tokens for collector in collectors)
        done = sum(collector.done for collector in collectors)
        rate = f"{tokens / max(now - self._began, 1e-9):.0f} tokens/s"
        self._bar.update(self._task, completed=done, rate=rate)


def _bar(*columns: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shown = [TextColumn("{task.description}"), BarColumn(bar_width=32), *map(TextColumn, columns), TimeElapsedColumn()]
    if columns:
        shown.insert(2, MofNCompleteColumn())
    return Progress(*shown, console=Console(stderr=True), transient=True)

"""Shows what a slow start is doing: one live line per phase on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_EVERY = 5.0  # seconds between plain lines of one phase


class Reporter:
    """Context manager whose `progress(phase, fraction)` any thread may call. Writes to stderr.

    A phase ends when the next one of the same lane begins; `close` ends all.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}  # lane -> its line
        self._phases: dict[str, str] = {}
        self._last: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

            self._live = Progress(
                SpinnerColumn(finished_text="✓"),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def progress(self, phase: str, fraction: float | None, lane: str = "") -> None:
        """`lane` keeps apart what happens at the same time: one lane per process."""
        if self._live is not None:
            self._show(self._live, phase, fraction, lane)
        else:
            self._print(phase, fraction, lane)

    def line(self, text: str) -> None:
        """A line of its own, above the live ones."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def _show(self, live: Progress, phase: str, fraction: float | None, lane: str) -> None:
        text = f"{lane}: {phase}" if lane else phase
        total = None if fraction is None else 1.0
        if lane not in self._tasks:
            self._tasks[lane] = live.add_task(text, total=total)
        elif self._phases.get(lane) != phase:
            live.reset(self._tasks[lane], description=text, total=total)
        live.update(self._tasks[lane], total=total, completed=fraction or 0.0)
        self._phases[lane] = phase

    def _print(self, phase: str, fraction: float | None, lane: str) -> None:
        now = time.monotonic()
        fresh = self._phases.get(lane) != phase
        if not fresh and (fraction is None or now - self._last[lane] < PLAIN_EVERY):
            return
        self._phases[lane], self._last[lane] = phase, now
        share = f" {fraction:.0%}" if fraction is not None and not fresh else ""
        print(f"{lane}: {phase}{share}" if lane else f"{phase}{share}", file=self._stream, flush=True)

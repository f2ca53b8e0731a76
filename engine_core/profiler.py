"""Turns the capture of NVIDIA's profilers on and off: on request, or from one step to another. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable

from ipc.errors import UserError

NO_DEVICE = (
    "there is no CUDA device here, so no profiler's capture can be started or stopped; "
    "nsys profile --trace=nvtx records the CPU's side from start to end"
)


class NothingToProfile(UserError):
    """There is no CUDA device."""


class Profiler:
    """`start` and `stop` are cudaProfilerStart and cudaProfilerStop, None without a CUDA device.

    `steps` is "A:B": capture from before the launch of step A until step B is done. Raises `UserError` if it is not
    that, `NothingToProfile` if it is and there is no device.
    """

    def __init__(
        self, steps: str | None = None, start: Callable[[], None] | None = None, stop: Callable[[], None] | None = None
    ) -> None:
        self._start, self._stop = start, stop
        self._first, self._last = (0, 0) if steps is None else parse_steps(steps)
        if steps is not None and start is None:
            raise NothingToProfile(f"--profile-steps {steps}: {NO_DEVICE}")

    def start(self) -> None:
        """Raises `NothingToProfile`."""
        if self._start is None:
            raise NothingToProfile(NO_DEVICE)
        self._start()

    def stop(self) -> None:
        """Raises `NothingToProfile`."""
        if self._stop is None:
            raise NothingToProfile(NO_DEVICE)
        self._stop()

    def before(self, step: int) -> None:
        """`step` is about to be launched."""
        if step == self._first and step:
            self.start()

    def after(self, step: int) -> None:
        """`step` is done; its tokens are on the host."""
        if step == self._last and step:
            self.stop()


def parse_steps(text: str) -> tuple[int, int]:
    """(A, B) of "A:B". Raises `UserError`."""
    first, colon, last = text.partition(":")
    if colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) < 2**31:
        return int(first), int(last)
    raise UserError(f"--profile-steps must be two numbers of steps like 100:200, the first at least 1, got {text!r}")

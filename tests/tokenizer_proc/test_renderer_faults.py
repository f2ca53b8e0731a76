"""What may come between any two lines of the renderer's client, at each of them in turn."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import msgspec
import pytest

from ipc import frames
from ipc.codec import pack_ids
from tokenizer_proc.renderer import client
from tokenizer_proc.renderer.client import Renderer, Reply

Processes = list["subprocess.Popen[bytes]"]
StartInstead = Callable[[list[str]], Processes]


class AtLine:
    """A trace function that calls `act` before line `n` of those that the client runs, `close` excepted."""

    def __init__(self, n: int, act: Callable[[], None]) -> None:
        self._n, self._act = n, act
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> AtLine | None:
        code = frame.f_code
        if code.co_filename not in (client.__file__, frames.__file__) or code.co_name == "close":
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self._n:
                self._act()
        return self


@contextlib.contextmanager
def tracing(function: AtLine) -> Iterator[None]:
    sys.settrace(function)
    try:
        yield
    finally:
        sys.settrace(None)


@pytest.fixture
def start_instead(monkeypatch: pytest.MonkeyPatch) -> StartInstead:
    """Lets the client start another command; gives the processes it starts."""
    popen = subprocess.Popen

    def replace(command: list[str]) -> Processes:
        processes: Processes = []

        def start(_: object, **options: Any) -> subprocess.Popen[bytes]:
            processes.append(popen(command, **options))
            return processes[-1]

        monkeypatch.setattr("subprocess.Popen", start)
        return processes

    return replace


def echoed(ids: list[int]) -> msgspec.Raw:
    """A prompt to which `cat` answers with `ids`."""
    return msgspec.Raw(msgspec.msgpack.encode(Reply(pack_ids(ids))))


def test_whatever_fails_nobody_gets_the_ids_of_another(start_instead: StartInstead) -> None:
    def fail() -> None:
        raise MemoryError

    processes = start_instead(["cat"])
    n, reached = 0, True
    while reached:
        n, reached = n + 1, False
        renderer = Renderer("model", None)
        for ids in ([1, 2], [3]):  # of a process just started, and of one that has answered
            fault = AtLine(n, fail)
            with tracing(fault), contextlib.suppress(MemoryError):
                renderer.encode(echoed(ids))
            reached |= fault.seen >= n
            assert renderer.encode(echoed([n, 7])) == [n, 7], f"after an error before line {n}"
        renderer.close()
    assert n > 20
    assert all(process.returncode is not None for process in processes)

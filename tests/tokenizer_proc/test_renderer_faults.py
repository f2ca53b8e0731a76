"""What may come between any two lines of the renderer's client, at each of them in turn."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from ipc import frames
from ipc.actor import Envelope
from ipc.codec import pack_ids
from ipc.messages import Encode, Shutdown
from tokenizer_proc.errors import PromptError
from tokenizer_proc.lane import Answered, Lane, Work
from tokenizer_proc.renderer import client
from tokenizer_proc.renderer.client import Renderer, Reply

DEADLINE_S = 30.0
MODEL = msgspec.msgpack.encode(Reply())  # which `cat` answers with a reply
Processes = list[subprocess.Popen[bytes]]
StartInstead = Callable[[list[str]], Processes]


class AtLine:
    """A trace function that calls `act` before line `n` of those that the client runs, `close` excepted."""

    def __init__(self, n: int, act: Callable[[], None]) -> None:
        self._n, self._act = n, act
        self.seen, self.answers = 0, 0  # how many lines, and answers waited for

    def __call__(self, frame: FrameType, event: str, _: Any) -> AtLine | None:
        code = frame.f_code
        if code.co_filename not in (client.__file__, frames.__file__) or code.co_name == "close":
            return None
        self.answers += event == "call" and code.co_name == "read_frame"
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
def start_instead(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartInstead]:
    """Lets the client start another command; gives the processes it starts."""
    popen, processes = subprocess.Popen, Processes()

    def replace(command: list[str]) -> Processes:
        def start(_: object, **options: Any) -> subprocess.Popen[bytes]:
            processes.append(popen(command, **options))
            return processes[-1]

        monkeypatch.setattr("subprocess.Popen", start)
        return processes

    yield replace
    for process in processes:
        process.kill()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)


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
        renderer = Renderer(MODEL)
        for ids in ([1, 2], [3]):  # of a process just started, and of one that has answered
            fault = AtLine(n, fail)
            with tracing(fault), contextlib.suppress(MemoryError):
                renderer.encode(echoed(ids))
            reached |= fault.seen >= n
            assert renderer.encode(echoed([n, 7])) == [n, 7], f"after an error before line {n}"
        renderer.close()
    assert n > 20
    assert all(process.returncode is not None for process in processes)


@pytest.mark.parametrize("leave", [lambda lane: lane.drop(frozenset([1])), Lane.close], ids=["drop", "close"])
def test_whenever_its_client_leaves_the_work_ends(
    start_instead: StartInstead, leave: Callable[[Lane], None], tmp_path: Path
) -> None:
    """The process never answers: a lost interrupt would let the work go on for ever."""
    (tmp_path / "ready").write_bytes(frames.frame(MODEL))
    processes = start_instead(["sh", "-c", 'cat "$0"; exec sleep 600', str(tmp_path / "ready")])
    renderer, posted, ended = Renderer(MODEL), list[Answered](), queue.SimpleQueue[type[Exception]]()

    def handle(_: list[Work]) -> list[Envelope]:
        with tracing(departure), pytest.raises(PromptError) as raised:
            renderer.encode(echoed([1]))
        ended.put(raised.type)
        return [("engine", Shutdown())]

    def begin() -> None:
        lane.put(Encode(call_id=1, frontend=0, prompt=echoed([1])))

    lane = Lane("large chats", handle, posted.append, renderer)
    departure = AtLine(0, lambda: None)
    begin()
    until(lambda: departure.answers == 2)  # it waits for the second, or will soon
    time.sleep(0.1)
    lines = departure.seen
    assert lines > 10
    leave(lane)
    ended.get(timeout=DEADLINE_S)
    for n in range(1, lines + 1):
        departure = AtLine(n, lambda: leave(lane))
        begin()
        ended.get(timeout=DEADLINE_S)
        assert departure.seen >= n, "it was not begun"
        assert all(process.returncode is not None for process in processes)
        assert len(processes) <= n, "one was started for nobody"
    assert not posted

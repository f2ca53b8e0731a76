"""A thread that works through messages in order, one at a time, and forgets those whose client has left."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ipc.actor import Envelope
from ipc.messages import Decode, Encode, Submit

logger = logging.getLogger(__name__)
IDLE_S = 60.0  # after which a helper is closed
_NICE = 10  # where cores are few, the engine's steps and short prompts come first

Work = Submit | Encode | Decode


@dataclass(frozen=True, slots=True)
class Answered:
    """What a lane made of a message; never leaves the process."""

    envelopes: list[Envelope]


class Helper(Protocol):
    """What `handle` of a lane makes use of."""

    def begin(self) -> None:
        """Called before `handle`, never during an `interrupt`: those that came before were not meant for this work."""

    def interrupt(self) -> None:
        """Called from another thread when nobody wants what `handle` is at, or is about to be. It may fail then."""

    def close(self) -> None:
        """Called in the lane's thread when there was nothing to do for a while; it may be used again."""


class Lane:
    """`put` and `drop` belong to one thread; `handle` and `post` are called in the lane's own, started when it is first
    needed. An exception in there ends the process."""

    def __init__(
        self,
        name: str,
        handle: Callable[[list[Work]], list[Envelope]],
        post: Callable[[Answered], None],
        helper: Helper | None = None,
    ) -> None:
        self._name, self._handle, self._post, self._helper = name, handle, post, helper
        self._waiting: dict[int, Work] = {}  # by its first id, in order
        self._current: Work | None = None  # None also if nobody wants its answer
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, work: Work) -> None:
        with self._changed:
            self._waiting[_ids(work)[0]] = work
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def drop(self, gone: frozenset[int]) -> None:
        """Nobody wants these any more. What is worked on is not answered, what waits is never begun."""
        with self._changed:
            for request_id in gone & self._waiting.keys():
                if gone.issuperset(_ids(self._waiting[request_id])):
                    del self._waiting[request_id]
            if self._current is not None and gone.issuperset(_ids(self._current)):
                self._interrupt()

    def close(self) -> None:
        """Nobody wants anything any more, and nothing is posted from now on."""
        with self._changed:
            self._waiting.clear()
            self._interrupt()

    def _interrupt(self) -> None:
        self._current = None
        if self._helper is not None:
            self._helper.interrupt()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            while True:
                self._work()
        # A panic of the libraries in Rust is no `Exception`. In the process's own thread it would end the process.
        except BaseException:
            logger.critical("the lane of %s failed", self._name, exc_info=True)
            os._exit(1)

    def _work(self) -> None:
        """One message. A function of its own so that nothing of it is held while the lane waits for the next."""
        with self._changed:
            idle = not self._changed.wait_for(lambda: self._waiting, None if self._helper is None else IDLE_S)
            if not idle:
                work = self._current = self._waiting.pop(next(iter(self._waiting)))
                if self._helper is not None:
                    self._helper.begin()
        if idle:
            assert self._helper is not None
            self._helper.close()
            return
        envelopes = self._handle([work])
        with self._changed:
            if self._current is work:
                self._post(Answered(envelopes))
            self._current = None


def _ids(work: Work) -> Sequence[int]:
    return work.request_ids if isinstance(work, Submit) else [work.call_id]

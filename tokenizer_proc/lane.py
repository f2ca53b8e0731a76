"""A thread that works through messages in order, one at a time, and forgets those whose client has left."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ipc.actor import Envelope
from ipc.messages import Decode, Encode, Submit

logger = logging.getLogger(__name__)
_NICE = 10  # where cores are few, the engine's steps and short prompts come first

Work = Submit | Encode | Decode


@dataclass(frozen=True, slots=True)
class Answered:
    """What a lane made of a message; never leaves the process."""

    envelopes: list[Envelope]


class Lane:
    """`put` and `drop` belong to one thread; `handle` and `post` are called in the lane's own, started when it is first
    needed. An exception in there ends the process."""

    def __init__(
        self, name: str, handle: Callable[[list[Work]], list[Envelope]], post: Callable[[Answered], None]
    ) -> None:
        self._name, self._handle, self._post = name, handle, post
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
                self._current = None

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
            self._changed.wait_for(lambda: self._waiting)
            work = self._current = self._waiting.pop(next(iter(self._waiting)))
        envelopes = self._handle([work])
        with self._changed:
            wanted, self._current = self._current is work, None
        if wanted:
            self._post(Answered(envelopes))


def _ids(work: Work) -> Sequence[int]:
    return work.request_ids if isinstance(work, Submit) else [work.call_id]

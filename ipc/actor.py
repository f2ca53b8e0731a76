"""The blocking driver of an actor: drain the inbox, let the actor handle the batch, send what it returns."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from ipc.channel import Receiver
from ipc.mailbox import Inbox, Outbox
from ipc.messages import Message, Shutdown
from ipc.recorder.events import WAIT
from ipc.recorder.ring import Recorder

logger = logging.getLogger(__name__)

T = TypeVar("T")

Envelope = tuple[str, Message]  # (name of an outbox, message)


class Actor(Protocol[T]):
    """State and a function of messages; knows nothing of sockets. An exception ends the process: an actor answers a
    bad message with a message."""

    def handle(self, batch: list[T]) -> Iterable[Envelope]: ...


def run(
    actor: Actor[Any],
    inbox: Inbox[Any],
    outboxes: Mapping[str, Outbox],
    *,
    limit: int = 1024,
    recorder: Recorder | None = None,
) -> None:
    """Drive `actor` until Shutdown arrives, or SIGTERM, which counts as one. Idle means blocked in a poll.

    What was in the inbox before the Shutdown is still handled. A message to an outbox that is not there (a forged
    frontend index) is logged and dropped.
    """
    recorder = recorder or Recorder()
    with shutdown_on_sigterm(inbox):
        stopping = False
        while not stopping:
            batch = inbox.drain(limit)
            if not batch:
                began = recorder.begin(WAIT)
                inbox.wait()
                recorder.end(WAIT, began)
                continue
            stopping = any(isinstance(message, Shutdown) for message in batch)
            work = [message for message in batch if not isinstance(message, Shutdown)]
            for name, message in actor.handle(work) if work else ():
                outbox = outboxes.get(name)
                if outbox is None:
                    logger.warning("dropped %s to unknown outbox %r", type(message).__name__, name)
                else:
                    outbox.send(message)


@contextlib.contextmanager
def shutdown_on_sigterm(inbox: Inbox[Any]) -> Iterator[None]:
    """While inside, SIGTERM puts a `Shutdown` into `inbox`. Does nothing outside the main thread (Python allows signal
    handlers only there)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handler = signal.signal(signal.SIGTERM, lambda *_: inbox.post(Shutdown()))
    old_fd = signal.set_wakeup_fd(inbox.wake_fd, warn_on_full_buffer=False) if isinstance(inbox, Receiver) else None
    try:
        yield
    finally:
        if old_fd is not None:
            signal.set_wakeup_fd(old_fd)
        signal.signal(signal.SIGTERM, old_handler)

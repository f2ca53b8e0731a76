"""Long texts are encoded in a thread of their own, in order, so that short ones need not wait for them.

    message ─▶ short ─▶ actor in the process's own thread ─▶ envelopes
             └ long ──▶ actor in the lane ─▶ Answered, posted to the inbox ─▶ envelopes

Encoding releases Python's lock. Nothing is cut: ids of pieces are those of the whole only at borders that depend on the
tokenizer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ipc.actor import Envelope
from ipc.messages import ChatPrompt, Decode, Prompt, Shutdown, TextPrompt, TokenizerMessage
from tokenizer_proc.actor import TokenizerActor
from tokenizer_proc.encode import LONG_CHARS
from tokenizer_proc.template_limits import weight

logger = logging.getLogger(__name__)
LONG_IDS_BYTES = 4 * 65_536
_NICE = 10  # where cores are few, the engine's steps and short prompts come first


@dataclass(frozen=True, slots=True)
class Answered:
    """What the lane made of a message; never leaves the process."""

    envelopes: list[Envelope]


class TwoLanes:
    """The tokenizer actor twice: one for the caller's thread, one for the lane's. They share no template engine, whose
    lock would join the lanes again."""

    def __init__(self, short: TokenizerActor, long: TokenizerActor, post: Callable[[Answered], None]) -> None:
        """`post` puts a message into the inbox that `handle` is fed from, and is called in the lane's thread."""
        self._short, self._long, self._post = short, long, post
        self._waiting: queue.SimpleQueue[TokenizerMessage] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # started when it is first needed

    def handle(self, batch: list[TokenizerMessage | Answered]) -> list[Envelope]:
        envelopes: list[Envelope] = []
        for message in batch:
            if isinstance(message, Answered):
                envelopes += message.envelopes
            elif is_long(message):
                self._waiting.put(message)
                self._start()
            else:
                envelopes += self._short.handle([message])
        return envelopes

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="long texts", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            while True:
                self._post(Answered(self._long.handle([self._waiting.get()])))
        except (
            BaseException
        ):  # a panic of the libraries in Rust is no `Exception`; in the other lane it ends the process
            logger.critical("the lane of long texts failed", exc_info=True)
            os._exit(1)


def is_long(message: TokenizerMessage) -> bool:
    """Whether it may take more than some 10 ms."""
    match message:
        case Shutdown():
            return False
        case Decode():
            return len(message.ids) > LONG_IDS_BYTES
        case _:
            return _is_long(message.prompt)


def _is_long(prompt: Prompt) -> bool:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) > LONG_CHARS
    if isinstance(prompt, ChatPrompt):
        return weight([prompt.messages, prompt.tools, prompt.template_kwargs], LONG_CHARS) > LONG_CHARS
    return len(prompt.ids) > LONG_IDS_BYTES

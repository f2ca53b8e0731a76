"""Long texts are encoded in a thread of their own, in order, so that short ones need not wait for them.

    message ─▶ short ─▶ actor in the process's own thread ─▶ envelopes
             └ long ──▶ actor in the lane ─▶ Answered, posted to the inbox ─▶ envelopes

Encoding releases Python's lock. Nothing is cut: ids of pieces are those of the whole only at borders that depend on the
tokenizer. So what an `Abort` finds waiting is forgotten, and what is being encoded only loses its answer.
"""

from __future__ import annotations

from collections.abc import Callable

from ipc.actor import Envelope
from ipc.messages import Abort, ChatPrompt, Decode, Prompt, Shutdown, TextPrompt, TokenizerMessage
from tokenizer_proc.actor import TokenizerActor
from tokenizer_proc.encode import LONG_CHARS
from tokenizer_proc.lane import Answered, Lane, Work
from tokenizer_proc.template_limits import weight

LONG_IDS_BYTES = 4 * 65_536


class TwoLanes:
    """The tokenizer actor twice: one for the caller's thread, one for the lane's. They share no template engine, whose
    lock would join the lanes again."""

    def __init__(self, short: TokenizerActor, long: TokenizerActor, post: Callable[[Answered], None]) -> None:
        """`post` puts a message into the inbox that `handle` is fed from, and is called in the lane's thread."""
        self._short = short
        self._long = Lane("long texts", long.handle, post)

    def handle(self, batch: list[TokenizerMessage | Answered]) -> list[Envelope]:
        envelopes: list[Envelope] = []
        for message in batch:
            match message:
                case Answered():
                    envelopes += message.envelopes
                case Abort():
                    self._long.drop(frozenset(message.request_ids))
                case Shutdown():  # the driver's
                    pass
                case _ if is_long(message):
                    self._long.put(message)
                case _:
                    envelopes += self._short.handle([message])
        return envelopes


def is_long(message: Work) -> bool:
    """Whether it may take more than some 10 ms."""
    if isinstance(message, Decode):
        return len(message.ids) > LONG_IDS_BYTES
    return _is_long(message.prompt)


def _is_long(prompt: Prompt) -> bool:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) > LONG_CHARS
    if isinstance(prompt, ChatPrompt):
        return weight([prompt.messages, prompt.tools, prompt.template_kwargs], LONG_CHARS) > LONG_CHARS
    return len(prompt.ids) > LONG_IDS_BYTES

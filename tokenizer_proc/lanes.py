"""What takes long is worked on beside the process's own thread, so that what is short need not wait for it.

    message ─▶ short ─▶ actor in the process's own thread ──▶ envelopes
             ├ long ──▶ actor in a lane ─────────▶ Answered, posted to the inbox ─▶ envelopes
             └ large ─▶ actor in a lane that asks another process ─▶ Answered ────▶ envelopes

Long texts: encoding them releases Python's lock. Nothing is cut: ids of pieces are those of the whole only at borders
that depend on the tokenizer. Large chats hold the lock from decoding to rendering, so their prompts are not even
decoded here, but in a process of their own.

What an `Abort` finds waiting is forgotten, what is being encoded only loses its answer, the other process is stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ipc.actor import Envelope
from ipc.codec import prompt_kind
from ipc.messages import Abort, Decode, Shutdown, TokenizerMessage
from tokenizer_proc.actor import TokenizerActor
from tokenizer_proc.lane import Answered, Helper, Lane, Work

LONG_BYTES = 1 << 14  # of a prompt as its message carries it
LONG_IDS_BYTES = 4 * 65_536
LARGE_CHAT_BYTES = 1 << 18  # the worst of them take some 40 ms to decode


class Lanes:
    """The tokenizer actor three times, of which only the large one asks `renderer`. Short and long share no template
    engine, whose lock would join the lanes again.

    `post` puts a message into the inbox that `handle` is fed from, and is called in the lanes' threads.
    """

    def __init__(
        self,
        short: TokenizerActor,
        long: TokenizerActor,
        large: TokenizerActor,
        renderer: Helper,
        post: Callable[[Answered], None],
    ) -> None:
        self._short = short
        self._long = Lane("long texts", long.handle, post)
        self._large = Lane("large chats", large.handle, post, renderer)

    def handle(self, batch: list[TokenizerMessage | Answered]) -> list[Envelope]:
        envelopes: list[Envelope] = []
        for message in batch:
            match message:
                case Answered():
                    envelopes += message.envelopes
                case Abort():
                    gone = frozenset(message.request_ids)
                    self._long.drop(gone)
                    self._large.drop(gone)
                case Shutdown():  # the driver's
                    pass
                case _:
                    match size_of(message):
                        case "short":
                            envelopes += self._short.handle([message])
                        case "long":
                            self._long.put(message)
                        case "large":
                            self._large.put(message)
        return envelopes

    def close(self) -> None:
        """Nothing is posted any more."""
        self._long.close()
        self._large.close()


def size_of(message: Work) -> Literal["short", "long", "large"]:
    """Short: it takes some 10 ms at most."""
    if isinstance(message, Decode):
        return "long" if len(message.ids) > LONG_IDS_BYTES else "short"
    size = len(memoryview(message.prompt))
    if size <= LONG_BYTES:
        return "short"
    match prompt_kind(message.prompt):
        case "ids":
            return "long" if size > LONG_IDS_BYTES else "short"
        case "chat" if size > LARGE_CHAT_BYTES:
            return "large"
    return "long"

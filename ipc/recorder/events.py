"""What the processes record. A *span* has a duration, a *mark* has none. Codes are part of the file format.

Plain ints, because they are used a few times per step: looking up a member of an enum costs as much as the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# frontend
PARSE: Final = 1  # body to Submit
NAMED: Final = 2  # the id that the client knows
DELIVER: Final = 3  # one batch of messages from the others
WRITE: Final = 4  # a piece of an answer to its connection
LEFT: Final = 5  # nobody waits for a choice any more: refused, failed, or its client is gone
# tokenizer_proc
ENCODE: Final = 10  # template and tokenizer
# engine_core
INTAKE: Final = 20  # messages that arrived since the last step
RECEIVED: Final = 21  # a request has reached the engine
SCHEDULE: Final = 22
LAUNCH: Final = 23
GPU: Final = 24  # the step on its device
COLLECT: Final = 25  # waiting for the device's tokens
COMMIT: Final = 26  # applying them
PUBLISH: Final = 27  # the step's message
FIRST_TOKEN: Final = 28  # of a request: from its first time in a step to its first token
FINISHED: Final = 29  # a request has left the engine
PREPARE: Final = 30  # what can wait, done while there is nothing to do
# detokenizer_proc
DECODE: Final = 40  # a step's ids to text
# any process
WAIT: Final = 60  # nothing to do: blocked in a poll
GC: Final = 61  # Python's garbage collector

STEP_MASK: Final = 0x7FFF_FFFF  # of a step's number where it is a value, which has 32 bits; as an `id` it is whole


def name_words(name: str) -> tuple[int, int]:
    """What NAMED keeps of an id like `chatcmpl-0123…`: the first 64 bits after the dash, as two int32."""
    digits = int(name.rpartition("-")[2][:16] or "0", 16)
    return (digits >> 32) - (1 << 31), (digits & 0xFFFF_FFFF) - (1 << 31)


@dataclass(frozen=True, slots=True)
class Kind:
    """`id` is what a record's `id` means: a request, a step of the engine, or nothing. `values` name a, b and c."""

    name: str
    id: str
    values: tuple[str, ...] = ()
    mark: bool = False


KINDS: Final[dict[int, Kind]] = {
    PARSE: Kind("parse", "request", ("bytes",)),
    NAMED: Kind("named", "request", ("name_0", "name_1", "choices"), mark=True),
    DELIVER: Kind("deliver", "", ("messages",)),
    WRITE: Kind("write", "request", ("bytes", "events")),
    LEFT: Kind("left", "request", mark=True),
    ENCODE: Kind("encode", "request", ("prompt_tokens", "choices")),
    INTAKE: Kind("intake", "", ("messages",)),
    RECEIVED: Kind("received", "request", ("prompt_tokens",), mark=True),
    SCHEDULE: Kind("schedule", "step", ("tokens", "rows", "decodes")),
    LAUNCH: Kind("launch", "step"),
    GPU: Kind("gpu step", "step", ("tokens", "rows", "on_cpu")),  # the last is 1 where the CPU is the device
    COLLECT: Kind("collect", "step"),
    COMMIT: Kind("commit", "step", ("running", "waiting", "kv_blocks_used")),
    PUBLISH: Kind("publish", "output", ("rows",)),
    FIRST_TOKEN: Kind("first token", "request", ("output", "prompt_tokens", "cached_tokens")),
    FINISHED: Kind("finished", "request", ("output", "output_tokens"), mark=True),
    PREPARE: Kind("prepare", ""),
    DECODE: Kind("decode", "output", ("rows",)),
    WAIT: Kind("wait", ""),
    GC: Kind("gc", "", ("generation", "collected")),
}

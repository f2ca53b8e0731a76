"""Recordings made by hand: what four processes would have left, with times that a test knows."""

from __future__ import annotations

import random
from collections import defaultdict

from ipc.recorder import events
from ipc.recorder.events import KINDS, STEP_MASK
from ipc.recorder.reader import Record, Recording
from ipc.recorder.ring import HEADER, HEADER_BYTES, MAGIC, RECORD, VERSION

FRONTEND, TOKENIZER, ENGINE, DETOKENIZER = "frontend", "tokenizer_proc", "engine_core", "detokenizer_proc"
PIDS = {FRONTEND: 101, TOKENIZER: 102, ENGINE: 103, DETOKENIZER: 104}
US = 1000
START = 5_000_000_000


class Tape:
    """Times are microseconds after `START`."""

    def __init__(self) -> None:
        self._records: dict[str, list[Record]] = defaultdict(list)

    def span(self, process: str, code: int, begin: float, end: float, id: int = 0, *values: int) -> None:
        a, b, c = (*values, 0, 0, 0)[:3]
        records = self._records[process]
        began = START + round(begin * US)
        records.append(Record(len(records) + 1, code, began, START + round(end * US) - began, id, a, b, c))

    def mark(self, process: str, code: int, at: float, id: int = 0, *values: int) -> None:
        assert KINDS[code].mark
        self.span(process, code, at, at, id, *values)

    def recordings(self) -> list[Recording]:
        return [
            Recording(name, PIDS[name], found, 0, 0, START, START + 10**18) for name, found in self._records.items()
        ]

    def step(
        self, number: int, at: float, gpu: float = 500.0, *, schedule: float = 20.0, launch: float = 30.0
    ) -> float:
        """One step that begins to be planned at `at`, on a device beside the engine; returns when it is published."""
        self.span(ENGINE, events.SCHEDULE, at, at + schedule, number, 4, 4, 4)
        begin = at + schedule + launch
        self.span(ENGINE, events.LAUNCH, at + schedule, begin, number)
        self.span(ENGINE, events.GPU, begin, begin + gpu, number, 4, 4)
        self.span(ENGINE, events.COLLECT, begin, begin + gpu, number)
        self.span(ENGINE, events.COMMIT, begin + gpu, begin + gpu + 10, number, 4, 0, 12)
        self.span(ENGINE, events.PUBLISH, begin + gpu + 10, begin + gpu + 20, number, 4)
        self.span(DETOKENIZER, events.DECODE, begin + gpu + 60, begin + gpu + 90, number, 4)
        return begin + gpu + 20


def one_request(
    tape: Tape, request_id: int, at: float, tokens: int = 3, first_step: int = 1, choices: int = 1
) -> float:
    """A request that arrives at `at` and gets a token in each of `tokens` steps. Returns when it has ended."""
    tape.span(FRONTEND, events.PARSE, at, at + 100, request_id, 500)
    tape.mark(FRONTEND, events.NAMED, at + 101, request_id, request_id, 7, choices)
    tape.span(TOKENIZER, events.ENCODE, at + 150, at + 350, request_id, 20, choices)
    for choice in range(choices):
        tape.mark(ENGINE, events.RECEIVED, at + 400 + choice, request_id + choice, 20)
    now = at + 420
    scheduled, first = now + 10, 0.0
    for index in range(tokens):
        now = tape.step(first_step + index, now)
        if not index:
            first = now - 20
        tape.span(FRONTEND, events.WRITE, now + 120, now + 150, request_id, 80, 1)
    last = (first_step + tokens - 1) & STEP_MASK
    for choice in range(choices):
        tape.span(ENGINE, events.FIRST_TOKEN, scheduled, first + 5, request_id + choice, first_step & STEP_MASK, 20, 0)
        tape.mark(ENGINE, events.FINISHED, now - 15, request_id + choice, last, tokens)
    return now + 150


def ring_bytes(recording: Recording, num_records: int = 1 << 10) -> bytes:
    """The file that the process would have written."""
    data = bytearray(HEADER_BYTES + num_records * RECORD.size)
    times = recording.monotonic_ns, recording.realtime_ns
    HEADER.pack_into(data, 0, MAGIC, VERSION, RECORD.size, num_records, recording.pid, *times, recording.name.encode())
    for number, code, begin, duration, *values in recording.records:
        assert number < num_records
        RECORD.pack_into(
            data, HEADER_BYTES + number * RECORD.size, number, duration << 16 | code, begin, *values, number
        )
    return bytes(data)


def busy_server(seed: int, requests: int = 12) -> list[Recording]:
    """Many requests, one after the other, with collections and overlapping writes among them."""
    draw, tape, at, step = random.Random(seed), Tape(), 0.0, 1
    for index in range(requests):
        tokens = draw.randrange(1, 6)
        end = one_request(tape, 1000 + 10 * index, at, tokens, step, draw.choice([1, 1, 3]))
        tape.span(FRONTEND, events.WRITE, end - 40, end + draw.randrange(10, 400), 1000 + 10 * index, 80, 1)
        tape.span(FRONTEND, events.GC, end + 500, end + 530)
        tape.span(ENGINE, events.WAIT, end - 125, end + 600)
        step += tokens
        at = end + draw.randrange(200, 3000)
    return tape.recordings()

"""Server-sent events of a streamed answer, made from bytes prepared once and one encoded string per chunk.

The order clients rely on: role with the first token, content, a finish chunk of its own, usage if asked for, [DONE].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from frontend.errors import from_error
from frontend.handle import Event
from frontend.http import Connection
from frontend.openai.answer import Identity, Tally
from frontend.openai.job import Job
from frontend.openai.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from ipc.messages import Detail, Ended, Error, TextLogprob

HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_PLAIN_END = b',"logprobs":null,"finish_reason":null}]}\n\n'


class Chunks:
    """Turns events into the bytes to send. One per streamed answer."""

    def __init__(self, job: Job, identity: Identity) -> None:
        self._job = job
        self._chat = job.kind == "chat"
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        shared = _encode({"id": identity.id, "object": kind, "created": identity.created, "model": identity.model})
        self._head = b"data: " + shared[:-1]
        count = job.num_choices
        # Per choice: everything in front of the text, then (for chat) the brace that closes the delta.
        field = b'"delta":{"content":' if self._chat else b'"text":'
        self._before = [self._head + b',"choices":[{"index":%d,' % i + field for i in range(count)]
        self._after = b"}" if self._chat else b""
        self._plain_end = self._after + _PLAIN_END
        self._opened = [False] * count
        self._tally = Tally(job)
        self._unfinished = count
        self._offsets = [CompletionLogprobs(job.sampling.logprobs or 0) for _ in range(count)]

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def text(self, choice: int, text: str) -> bytes:
        """The chunk of plain text in the middle of an answer."""
        return b"".join((self._before[choice], _encode(text), self._plain_end))

    def render(self, events: Iterable[Event]) -> bytes:
        """Bytes of all chunks for `events`, up to [DONE] once the last choice has ended. None of them is an error."""
        parts: list[bytes] = []
        for choice, text, _, detail in coalesce(events):
            if not self._opened[choice]:
                self._opened[choice] = True
                parts += self._opening(choice, detail)
            if detail is None:
                if text:
                    parts.append(self.text(choice, text))
                continue
            rows = self._rows(detail)
            if text or rows:
                parts += (self._before[choice], _encode(text), self._after, self._logprobs(choice, rows, detail))
            if detail.ended is not None:
                parts += self._finish(choice, detail.ended)
        if self._unfinished == 0:
            parts += self._closing()
        return b"".join(parts)

    def _opening(self, choice: int, detail: Detail | None) -> list[bytes]:
        extra = b""
        if detail is not None and detail.prompt_logprobs and self._job.show_prompt_logprobs:
            entries = prompt_logprobs(detail.prompt_logprobs, self._job.sampling.prompt_logprobs or 0)
            extra = b',"prompt_logprobs":' + _encode(entries)
        if self._chat:
            role = b'%s,"choices":[{"index":%d,"delta":{"role":"assistant","content":""}' % (self._head, choice)
            return [role, extra, _PLAIN_END]
        if extra:
            return [self._before[choice], b'""', extra, _PLAIN_END]
        return []

    def _rows(self, detail: Detail) -> list[TextLogprob | None]:
        if self._job.sampling.logprobs is None:
            return []
        echoed = detail.prompt_logprobs if self._job.echo else []
        return [*echoed, *detail.logprobs]

    def _logprobs(self, choice: int, rows: list[TextLogprob | None], detail: Detail) -> bytes:
        if not rows:
            return _PLAIN_END
        if self._chat:
            value: Any = chat_logprobs(detail.logprobs, self._job.sampling.logprobs or 0)
        else:
            value = self._offsets[choice].render(rows)
        return b',"logprobs":' + _encode(value) + b',"finish_reason":null}]}\n\n'

    def _finish(self, choice: int, ended: Ended) -> list[bytes]:
        self._unfinished -= 1
        self._tally.add(choice, ended)
        end = _encode({"logprobs": None, "finish_reason": ended.reason, "stop_reason": ended.stop_reason})
        empty = b'"delta":{}' if self._chat else b'"text":""'
        return [self._head, b',"choices":[{"index":%d,' % choice, empty, b",", end[1:], b"]}\n\n"]

    def _closing(self) -> list[bytes]:
        if not self._job.include_usage:
            return [DONE]
        return [self._head, b',"choices":[],"usage":', _encode(self._tally.usage()), b"}\n\n", DONE]


class DirectText:
    """Plain text straight to a connection: at most one write for each wake-up of the process, and in it one event per
    choice. What arrives together goes out together, so the cost per token falls as the load grows."""

    __slots__ = ("_chunks", "_connection", "_texts")

    def __init__(self, chunks: Chunks, connection: Connection) -> None:
        self._chunks, self._connection = chunks, connection
        self._texts: dict[int, str] = {}

    @property
    def blocked(self) -> bool:
        return self._connection.blocked

    def add(self, choice: int, text: str) -> bool:
        texts = self._texts
        first = not texts
        texts[choice] = texts[choice] + text if choice in texts else text
        return first

    def flush(self) -> None:
        texts = self._texts
        data = [self._chunks.text(choice, text) for choice, text in texts.items() if text]
        texts.clear()
        if data:
            self._connection.write_chunk(data[0] if len(data) == 1 else b"".join(data))

    def take_back(self) -> list[tuple[int, str]]:
        texts = list(self._texts.items())
        self._texts.clear()
        return texts


def error_events(error: Error) -> bytes:
    """The end of a stream that failed after its headers were sent."""
    return b"data: " + from_error(error).body() + b"\n\n" + DONE


def coalesce(events: Iterable[Event]) -> list[Event]:
    """Join texts that piled up while a client was slow, per choice; order within a choice is kept."""
    merged: list[Event] = []
    open_at: dict[int, int] = {}  # choice -> its latest event in `merged`, if more text may join it
    for event in events:
        at = open_at.get(event.choice)
        if at is not None and event.detail is None:
            before = merged[at]
            merged[at] = Event(event.choice, before.text + event.text, before.num_tokens + event.num_tokens, None)
            continue
        if event.detail is None:
            open_at[event.choice] = len(merged)
        else:
            open_at.pop(event.choice, None)
        merged.append(event)
    return merged

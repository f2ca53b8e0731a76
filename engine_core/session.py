"""An engine and a detokenizer driven in this process: requests in, deltas out to whoever asked. One step at a time.

`LLM` calls `step` from the caller's thread, `AsyncLLM` from a thread of its own; both see the same requests end in the
same way, because everything that a step means for a request is decided here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine_core.outputs import Alternative, TokenLogprob
from engine_core.plan import ModelFacts
from engine_core.text_side import Detokenizer, TextSide
from ipc.codec import pack_ids, unpack_ids, unpack_request_ids
from ipc.messages import (
    Ended,
    EngineStats,
    Finished,
    Generate,
    PromptLogprobs,
    StepOutput,
    TextLogprob,
    TokenLogprobs,
    Usage,
)
from ipc.recorder.events import DECODE
from ipc.recorder.ring import Recorder
from ipc.sampling import SamplingParams


# A msgspec struct for the same reason as `ScheduledRow`.
class Delta(msgspec.Struct, eq=False, gc=False):
    """What one step means for one request. The last one has `ended`."""

    choice: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] | None = None
    ended: Ended | None = None


Sink = Callable[[Delta], None]


class EngineLike(Protocol):
    @property
    def facts(self) -> ModelFacts: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def recorder(self) -> Recorder: ...

    def add(self, message: Generate) -> None: ...

    def abort(self, request_ids: Iterable[int], *, stop_string: bool = False) -> None: ...

    def step(self) -> StepOutput: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class _Live:
    choice: int
    sink: Sink
    with_text: bool


class Session:
    """Not safe to use from two threads at once."""

    def __init__(self, engine: EngineLike, text: TextSide) -> None:
        self.engine = engine
        self._text = text
        self._detokenizer: Detokenizer | None = None  # once a request wants text
        self._live: dict[int, _Live] = {}
        self._ids = itertools.count(1)

    def open(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        sink: Sink,
        *,
        with_text: bool,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[int]:
        """Start `sampling.n` requests and return their ids; `sink` gets their deltas during later steps."""
        if with_text and self._detokenizer is None:
            self._detokenizer = self._text.detokenizer()
        prompt, arrival = pack_ids(prompt_ids), time.monotonic_ns()
        spec = self._text.spec(prompt_ids, sampling) if with_text else b""
        eos = self._text.model.eos_token_ids if with_text else ()
        opened = []
        for choice in range(sampling.n):
            request_id = next(self._ids)
            self._live[request_id] = _Live(choice, sink, with_text)
            opened.append(request_id)
            self.engine.add(
                Generate(
                    request_id=request_id,
                    frontend=0,
                    prompt_ids=prompt,
                    sampling=sampling.for_choice(choice),
                    arrival=arrival,
                    eos_token_ids=eos,
                    priority=priority,
                    cache_salt=cache_salt,
                    text=spec,
                )
            )
        return opened

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> None:
        """One engine step; sinks are called before it returns."""
        output = self.engine.step()
        deltas = _Deltas(self._live)
        deltas.add_tokens(unpack_request_ids(output.request_ids), unpack_ids(output.token_ids))
        if self._detokenizer is not None:
            self._add_text(self._detokenizer, output, deltas)
        _add_without_text(output, deltas)
        for request_id, delta in deltas.items():
            live = self._live[request_id]
            if delta.ended is not None:
                del self._live[request_id]
            live.sink(delta)

    def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests; their sinks hear no more of them. Those that have ended are left alone."""
        ids = [request_id for request_id in request_ids if self._live.pop(request_id, None) is not None]
        if ids:
            self.engine.abort(ids)
        while not self._live and self.engine.has_work:  # nobody else will: let engine and detokenizer forget them
            self.step()

    def abort_all(self) -> None:
        self.abort(list(self._live))

    def _add_text(self, detokenizer: Detokenizer, output: StepOutput, deltas: _Deltas) -> None:
        began = self.engine.recorder.begin(DECODE)
        outcome = detokenizer.handle(output)
        self.engine.recorder.end(DECODE, began, output.step, len(output.token_ids) // 4)
        if outcome.abort is not None:
            self.engine.abort(outcome.abort.request_ids, stop_string=outcome.abort.stop_string)
        message = outcome.deltas.get(0)
        if message is None:
            return
        request_ids = unpack_request_ids(message.request_ids)
        for request_id, text in zip(request_ids, message.texts, strict=True):
            if (delta := deltas.of(request_id, with_text=True)) is not None:
                delta.text += text
        for detail in message.details:
            if (delta := deltas.of(request_ids[detail.row], with_text=True)) is not None:
                delta.logprobs += [_from_text(value) for value in detail.logprobs]
                if detail.prompt_logprobs:
                    delta.prompt_logprobs = [_from_text(value) for value in detail.prompt_logprobs if value]
                delta.ended = detail.ended


def _add_without_text(output: StepOutput, deltas: _Deltas) -> None:
    """Requests of ids alone: what the detokenizer would have told."""
    if output.logprobs:
        request_ids, token_ids = unpack_request_ids(output.request_ids), unpack_ids(output.token_ids)
        for row in output.logprobs:
            if (delta := deltas.of(request_ids[row.row], with_text=False)) is not None:
                delta.logprobs.append(_from_ids(token_ids[row.row], row.value))
    for prompt in output.prompt_logprobs:
        if (delta := deltas.of(prompt.request_id, with_text=False)) is not None:
            delta.prompt_logprobs = _prompt_from_ids(prompt)
    for finished in output.finished:
        if (delta := deltas.of(finished.request_id, with_text=False)) is not None:
            delta.ended = _ended(finished)


class _Deltas:
    """The deltas of one step, made as they are asked for. Requests that are no longer live have none."""

    def __init__(self, live: dict[int, _Live]) -> None:
        self._live = live
        self._deltas: dict[int, Delta] = {}

    def of(self, request_id: int, with_text: bool | None = None) -> Delta | None:
        """`with_text`: only if the request is of that kind."""
        live = self._live.get(request_id)
        if live is None or with_text not in (None, live.with_text):
            return None
        delta = self._deltas.get(request_id)
        if delta is None:
            delta = self._deltas[request_id] = Delta(live.choice)
        return delta

    def add_tokens(self, request_ids: Iterable[int], token_ids: Iterable[int]) -> None:
        """What most deltas are: one token of a request that had no other in this step."""
        all_live, deltas = self._live, self._deltas
        for request_id, token in zip(request_ids, token_ids, strict=True):
            live = all_live.get(request_id)
            if live is not None:
                deltas[request_id] = Delta(live.choice, "", [token])

    def items(self) -> Iterable[tuple[int, Delta]]:
        return self._deltas.items()


def _ended(finished: Finished) -> Ended:
    usage = Usage(finished.num_prompt_tokens, finished.num_output_tokens, finished.num_cached_tokens)
    return Ended(finished.reason, usage, None if finished.stop_token_is_eos else finished.stop_token, finished.error)


def _from_text(value: TextLogprob) -> TokenLogprob:
    top = tuple(Alternative(token_id, logprob, text) for token_id, text, _, logprob in value.top)
    return TokenLogprob(value.token_id, value.logprob, value.rank, value.text, top)


def _from_ids(token_id: int, value: TokenLogprobs) -> TokenLogprob:
    logprobs = memoryview(value.top_logprobs).cast("f").tolist()
    top = tuple(Alternative(*pair) for pair in zip(unpack_ids(value.top_ids), logprobs, strict=True))
    return TokenLogprob(token_id, value.logprob, value.rank, None, top)


def _prompt_from_ids(prompt: PromptLogprobs) -> list[TokenLogprob]:
    pairs = zip(unpack_ids(prompt.ids), prompt.values, strict=True)
    return [
        TokenLogprob(token_id, None, 0) if value is None else _from_ids(token_id, value) for token_id, value in pairs
    ]

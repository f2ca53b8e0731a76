"""Turns engine steps into text for the frontends, a whole step at a time. Knows nothing of sockets and processes.

    open     first token of a request: start a text stream from its TextSpec
    row      one token: text that became certain, cut at a stop string
    finish   flush what was held back, send the one terminal event

Who ends a request: the engine (EOS, length, abort, failure), or this class when it finds a stop string or cannot go on.
In the second case the terminal event is sent at once, the id is put into `Outcome.abort` for the engine, and whatever
the engine still says about it is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer

from detokenizer_proc.batch import DeltaBatch
from detokenizer_proc.incremental import TextDecoder, TextStream
from detokenizer_proc.logprobs import prompt_text_logprobs, text_logprob
from detokenizer_proc.stop import StopFinder
from ipc.messages import (
    Abort,
    Deltas,
    Ended,
    Error,
    Finished,
    Opened,
    PromptLogprobs,
    StepOutput,
    TextSpec,
    Usage,
)

log = logging.getLogger(__name__)

# Requests ended here of which the engine's Finished has not come. The engine's steps in flight bound their number;
# the limit only keeps a broken engine from growing it for ever.
MAX_AWAITED = 65_536


class Outcome(NamedTuple):
    deltas: dict[int, Deltas]  # frontend index -> its message
    abort: Abort | None  # to the engine


class _Request:
    """An open request."""

    __slots__ = ("frontend", "num_tokens", "opened", "push_plain", "spec", "stops", "stream")

    def __init__(self, opened: Opened, spec: TextSpec, decoder: TextDecoder) -> None:
        self.opened = opened
        self.frontend = opened.frontend
        self.spec = spec
        self.num_tokens = 0
        prompt_ids = memoryview(spec.prompt_ids).cast("i")
        self.stream: TextStream = decoder.stream(prompt_ids, spec.skip_special_tokens)
        self.push_plain = self.stream.push
        self.stops = StopFinder(spec.stop, spec.include_stop_str_in_output) if spec.stop else None

    def push(self, token: int, silent: bool = False) -> str:
        """`silent`: the token counts but makes no text."""
        self.num_tokens += 1
        text = "" if silent else self.stream.push(token)
        if self.stops is None:
            return text
        return self.stops.push(text, may_stop=self.num_tokens >= self.spec.min_tokens)

    def flush(self) -> str:
        text = self.stream.flush()
        if self.stops is None:
            return text
        return self.stops.push(text, may_stop=self.num_tokens >= self.spec.min_tokens) + self.stops.flush()

    def usage(self) -> Usage:
        return Usage(self.opened.num_prompt_tokens, self.num_tokens, self.opened.num_cached_tokens)


class Detokenizer:
    """State of all open requests. Feed it every `StepOutput` of one engine, in order.

    Of `count` detokenizers it is number `index`: requests whose id is not `index` modulo `count` are others'.
    """

    def __init__(self, tokenizer: Tokenizer, index: int = 0, count: int = 1) -> None:
        self._index, self._count = index, count
        self._decoder = TextDecoder(tokenizer)
        self._spec = msgspec.msgpack.Decoder(TextSpec)
        self._requests: dict[int, _Request] = {}
        self._awaited: dict[int, None] = {}  # ended here, the engine's Finished still to come (a dict keeps order)

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._requests)

    def handle(self, output: StepOutput) -> Outcome:
        """Never raises for the sake of one request: that request then ends with an error of its own."""
        return self.handle_all((output,))

    def handle_all(self, outputs: Iterable[StepOutput]) -> Outcome:
        """What these steps mean together."""
        step = _Step()
        for output in outputs:
            self._handle(step, output)
        return step.outcome()

    def _handle(self, step: _Step, output: StepOutput) -> None:
        ids = memoryview(output.request_ids).cast("q").tolist()
        tokens = memoryview(output.token_ids).cast("i").tolist()
        for opened in output.opened:
            if opened.request_id % self._count == self._index:
                self._open(step, opened)
        silent = self._silent_rows(ids, output.finished) if output.finished else frozenset()
        logprobs = {item.row: item.value for item in output.logprobs}
        requests, batches = self._requests, step.batches
        for row, (request_id, token) in enumerate(zip(ids, tokens, strict=True)):
            if (request := requests.get(request_id)) is None:
                continue
            try:
                # The plain case first: this loop is what the process spends its time on.
                if (stops := request.stops) is None and not silent:
                    request.num_tokens += 1
                    text = request.push_plain(token)
                else:
                    text = request.push(token, row in silent)
                batch = batches.get(request.frontend) or step.batch(request.frontend)
                batch.add(request_id, 1, text)
                if logprobs and row in logprobs:
                    value = text_logprob(self._decoder, token, logprobs[row])
                    batch.detail(request_id).logprobs.append(value)
                if stops is not None and stops.stop is not None:
                    self._end_here(step, request, Ended("stop", request.usage(), stops.stop))
            except Exception as error:
                self._fail(step, request, error)
        for prompt in output.prompt_logprobs:
            self._add_prompt_logprobs(step, prompt)
        for finished in output.finished:
            if finished.request_id % self._count == self._index:
                self._finish(step, finished)

    def _open(self, step: _Step, opened: Opened) -> None:
        detail = step.batch(opened.frontend).detail(opened.request_id)
        detail.opened = msgspec.structs.replace(opened, text=b"")
        try:
            spec = self._spec.decode(opened.text) if opened.text else TextSpec()
            request = _Request(opened, spec, self._decoder)
        except Exception as error:
            self._fail(step, _Request(opened, TextSpec(), self._decoder), error)
            return
        self._requests[opened.request_id] = request
        if spec.echo:
            step.batch(opened.frontend).add(opened.request_id, 0, spec.echo)

    def _silent_rows(self, ids: list[int], finished: list[Finished]) -> frozenset[int]:
        """Rows whose token ended its request and is not part of the answer's text."""
        last_row = {request_id: row for row, request_id in enumerate(ids)}
        return frozenset(
            last_row[item.request_id]
            for item in finished
            if item.stop_token is not None
            and item.request_id in last_row
            and (request := self._requests.get(item.request_id)) is not None
            and not request.spec.include_stop_str_in_output
        )

    def _add_prompt_logprobs(self, step: _Step, prompt: PromptLogprobs) -> None:
        if (request := self._requests.get(prompt.request_id)) is None:
            return
        try:
            values = prompt_text_logprobs(self._decoder, prompt)
            step.batch(request.frontend).detail(prompt.request_id).prompt_logprobs = values
        except Exception as error:
            self._fail(step, request, error)

    def _finish(self, step: _Step, finished: Finished) -> None:
        request_id = finished.request_id
        if request_id in self._awaited:
            del self._awaited[request_id]
            step.aborts.pop(request_id, None)
            return
        batch = step.batch(finished.frontend)
        reason = finished.reason
        stop_reason: int | str | None = None if finished.stop_token_is_eos else finished.stop_token
        if (request := self._requests.pop(request_id, None)) is not None:
            batch.add(request_id, 0, request.flush())
            if request.stops is not None and request.stops.stop is not None and reason in ("stop", "length"):
                reason, stop_reason = "stop", request.stops.stop
        usage = Usage(finished.num_prompt_tokens, finished.num_output_tokens, finished.num_cached_tokens)
        batch.detail(request_id).ended = Ended(reason, usage, stop_reason, finished.error)

    def _end_here(self, step: _Step, request: _Request, ended: Ended) -> None:
        request_id = request.opened.request_id
        step.batch(request.frontend).detail(request_id).ended = ended
        step.aborts[request_id] = None
        self._requests.pop(request_id, None)
        self._awaited[request_id] = None
        if len(self._awaited) > MAX_AWAITED:
            del self._awaited[next(iter(self._awaited))]

    def _fail(self, step: _Step, request: _Request, error: Exception) -> None:
        log.error("request %d failed in the detokenizer", request.opened.request_id, exc_info=error)
        reason = Error(500, f"decoding the answer failed: {error}", "server_error", code="detokenizer_error")
        self._end_here(step, request, Ended("error", request.usage(), error=reason))


class _Step:
    """What one `handle` call has produced so far."""

    __slots__ = ("aborts", "batches")

    def __init__(self) -> None:
        self.batches: dict[int, DeltaBatch] = {}
        self.aborts: dict[int, None] = {}

    def batch(self, frontend: int) -> DeltaBatch:
        batch = self.batches.get(frontend)
        if batch is None:
            batch = self.batches[frontend] = DeltaBatch()
        return batch

    def outcome(self) -> Outcome:
        abort = Abort(request_ids=list(self.aborts), stop_string=True) if self.aborts else None
        return Outcome({frontend: batch.message() for frontend, batch in self.batches.items()}, abort)

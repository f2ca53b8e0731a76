"""Puts the deltas of one prompt's requests together, whole or piece by piece."""

from __future__ import annotations

import functools

from engine_core.outputs import Completion, EngineError, RequestOutput, StreamOutput, TokenLogprob, Usage
from engine_core.prompts import EncodedPrompt
from engine_core.session import Delta
from engine_core.text_side import TextSide
from ipc.messages import Ended
from ipc.sampling import SamplingParams


class Collector:
    """Collects all choices of one prompt. `done` when each has ended."""

    def __init__(self, prompt: EncodedPrompt, sampling: SamplingParams, text: TextSide, with_text: bool) -> None:
        self.request_ids: list[int] = []
        self._prompt, self._with_text = prompt, with_text
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._texts: list[list[str]] = [[] for _ in range(sampling.n)]
        self._ended: list[Ended | None] = [None] * sampling.n
        decode = functools.partial(_decode_answer, text, prompt, sampling)
        self._choices = [
            Completion(index, [], "abort", logprobs=None if sampling.logprobs is None else [], _decode=decode)
            for index in range(sampling.n)
        ]

    @property
    def done(self) -> bool:
        return all(self._ended)

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    def add(self, delta: Delta) -> None:
        choice = self._choices[delta.choice]
        choice.token_ids += delta.token_ids
        if choice.logprobs is not None:
            choice.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.text:
            self._texts[delta.choice].append(delta.text)
        if delta.ended is not None:
            self._ended[delta.choice] = delta.ended

    def output(self) -> RequestOutput:
        """Raises ValueError if the engine refused the prompt or its parameters, EngineError if it is broken."""
        completed = cached = 0
        for choice, ended, texts in zip(self._choices, self._ended, self._texts, strict=True):
            assert ended is not None
            raise_refusal(ended)
            choice.finish_reason, choice.stop_reason, choice.error = ended.reason, ended.stop_reason, ended.error
            completed += ended.usage.completion_tokens
            cached = max(cached, ended.usage.cached_tokens)
            if self._with_text:
                choice._text, choice._decode = "".join(texts), None
        usage = Usage(len(self._prompt.ids), completed, cached)
        return RequestOutput(self._prompt.text, self._prompt.ids, self._choices, usage, self._prompt_logprobs)


def stream_output(delta: Delta) -> StreamOutput:
    """Raises ValueError if the engine refused the request, EngineError if it failed in it."""
    if (ended := delta.ended) is None:
        return StreamOutput(delta.choice, delta.text, delta.token_ids, delta.logprobs)
    raise_refusal(ended)
    if ended.reason == "error":
        raise EngineError(ended.error.message if ended.error else "the request failed")
    usage = Usage(ended.usage.prompt_tokens, ended.usage.completion_tokens, ended.usage.cached_tokens)
    return StreamOutput(
        delta.choice, delta.text, delta.token_ids, delta.logprobs, ended.reason, ended.stop_reason, usage
    )


def raise_refusal(ended: Ended) -> None:
    if ended.reason == "rejected":
        message = ended.error.message if ended.error else "the request was refused"
        raise EngineError(message) if ended.error and ended.error.status >= 500 else ValueError(message)


def _decode_answer(text: TextSide, prompt: EncodedPrompt, sampling: SamplingParams, ids: list[int]) -> str:
    return text.decode(ids, prompt.ids, sampling.skip_special_tokens)

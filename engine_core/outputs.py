"""What the library hands back: plain values, complete in themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ipc.messages import Error, FinishReason


class EngineError(RuntimeError):
    """A request failed inside the engine, through no fault of its caller."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV was already there


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have been at a position."""

    token_id: int
    logprob: float
    text: str | None = None  # None: generated from ids, with no text side


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The token at a position: natural log of its probability under the raw model distribution."""

    token_id: int
    logprob: float | None  # None: the first token of a prompt, which nothing predicts
    rank: int  # 1: the most probable; 0: not predicted
    text: str | None = None
    top: tuple[Alternative, ...] = ()  # most probable first


@dataclass(slots=True)
class Completion:
    """One answer to a prompt."""

    index: int
    token_ids: list[int]  # with the EOS or stop token that ended it
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop string, or the stop token that is not an EOS
    logprobs: list[TokenLogprob] | None = None  # one per token
    error: Error | None = None  # why, if `finish_reason` is "error"
    _text: str | None = field(default=None, repr=False)
    _decode: Callable[[list[int]], str] | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """The answer as text. One that was generated from ids is decoded when this is first read."""
        if self._text is None:
            assert self._decode is not None
            self._text = self._decode(self.token_ids)
        return self._text


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt. `text`, `token_ids`, ... are those of the first."""

    prompt: str | None  # as it was given; None for ids and conversations
    prompt_token_ids: list[int]
    choices: list[Completion]
    usage: Usage
    prompt_logprobs: list[TokenLogprob] | None = None  # one per prompt token

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """What a step added to one choice. The last one of a choice has a `finish_reason`."""

    index: int
    text: str  # may be empty: the tokens complete no character yet, or may belong to a stop string
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None  # of this choice, with the finish reason

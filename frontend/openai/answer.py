"""What came back for each choice, and the bodies of answers that are not streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frontend.handle import Event
from frontend.openai.job import Job
from frontend.openai.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from ipc.messages import Ended, Error, TextLogprob


@dataclass(frozen=True, slots=True)
class Identity:
    """What all chunks of an answer share."""

    id: str
    created: int  # seconds since 1970
    model: str

    @classmethod
    def new(cls, job: Job, model: str) -> Identity:
        prefix = "chatcmpl-" if job.kind == "chat" else "cmpl-"
        return cls(prefix + uuid.uuid4().hex, int(time.time()), model)


@dataclass(slots=True)
class Choice:
    """The answer to one choice so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_logprobs: list[TextLogprob | None] = field(default_factory=list)
    ended: Ended | None = None

    def add(self, event: Event) -> None:
        if event.text:
            self.texts.append(event.text)
        detail = event.detail
        if detail is not None:
            self.logprobs += detail.logprobs
            self.prompt_logprobs += detail.prompt_logprobs
            self.ended = detail.ended or self.ended


def failure(event: Event) -> Error | None:
    """The error that ends the whole HTTP request, if `event` brings one."""
    ended = event.detail.ended if event.detail is not None else None
    if ended is None or ended.reason in ("stop", "length"):
        return None
    return ended.error or Error(500, f"the request ended early: {ended.reason}", type="server_error")


class Tally:
    """Usage over all choices. A prompt counts once, however many answers it got."""

    def __init__(self, job: Job) -> None:
        self._n = job.sampling.n
        self._prompt: dict[int, tuple[int, int]] = {}  # prompt -> (tokens, cached tokens) as its first choice saw it
        self._completion = 0

    def add(self, choice: int, ended: Ended) -> None:
        prompt, nth = divmod(choice, self._n)
        if nth == 0 or prompt not in self._prompt:
            self._prompt[prompt] = (ended.usage.prompt_tokens, ended.usage.cached_tokens)
        self._completion += ended.usage.completion_tokens

    def usage(self) -> dict[str, Any]:
        tokens = sum(tokens for tokens, _ in self._prompt.values())
        return {
            "prompt_tokens": tokens,
            "completion_tokens": self._completion,
            "total_tokens": tokens + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompt.values())},
        }


def body(job: Job, identity: Identity, choices: Iterable[Choice]) -> bytes:
    """The JSON of a finished answer."""
    tally = Tally(job)
    rendered: list[dict[str, Any]] = []
    answer: dict[str, Any] = {
        "id": identity.id,
        "object": "chat.completion" if job.kind == "chat" else "text_completion",
        "created": identity.created,
        "model": identity.model,
        "choices": rendered,
    }
    for index, choice in enumerate(choices):
        assert choice.ended is not None
        tally.add(index, choice.ended)
        rendered.append(_choice(job, index, choice, choice.ended))
        if job.kind == "chat" and job.show_prompt_logprobs and index == 0:
            answer["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, job.sampling.prompt_logprobs or 0)
    answer["usage"] = tally.usage()
    return msgspec.json.encode(answer)


def _choice(job: Job, index: int, choice: Choice, ended: Ended) -> dict[str, Any]:
    text = "".join(choice.texts)
    answer: dict[str, Any] = {"index": index, "finish_reason": ended.reason, "stop_reason": ended.stop_reason}
    wanted = job.sampling.logprobs
    if job.kind == "chat":
        answer["message"] = {"role": "assistant", "content": text, "refusal": None}
        answer["logprobs"] = None if wanted is None else chat_logprobs(choice.logprobs, wanted)
        return answer
    answer["text"] = text
    echoed = choice.prompt_logprobs if job.echo else []
    answer["logprobs"] = None if wanted is None else CompletionLogprobs(wanted).render([*echoed, *choice.logprobs])
    if job.show_prompt_logprobs:
        answer["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, job.sampling.prompt_logprobs or 0)
    return answer

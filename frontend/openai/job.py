"""From a request's body to a `Job`: what to generate and how to answer, whichever endpoint asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from frontend.errors import ApiError, from_bound, from_decoding, shown
from frontend.openai.prompts import chat_prompt, completion_prompts, packed
from frontend.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, SamplingFields, TokenizeRequest
from ipc.messages import Prompt
from ipc.sampling import BoundError, SamplingParams

MAX_CHOICES = 1024  # prompts times n
MAX_SALT = 1024
# JSON values in a body, by its commas: parsing them holds up the streams of everyone else.
MAX_VALUES = 1 << 21

T = TypeVar("T")
Kind = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model allows, and its names: the served one, then its aliases."""

    max_model_len: int
    vocab_size: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    kind: Kind
    prompts: list[msgspec.Raw]  # encoded `Prompt`s: nothing between here and the tokenizer looks into them
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    echo: bool
    priority: int
    cache_salt: str
    # prompt_logprobs is also on when a completion asks for echo and logprobs; only this field puts it in the answer.
    show_prompt_logprobs: bool

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n


def check_model(name: str | None, limits: Limits) -> None:
    """Absent, the served name, or one of its aliases; `ApiError` 404 for another."""
    if name and name not in limits.names:
        raise ApiError(
            404,
            f"the model {shown(name)} does not exist, this server has {shown(limits.names[0])}",
            param="model",
            code="model_not_found",
        )


class Bodies:
    """Typed decoders, made once. The JSON of a request is checked against its struct while it is parsed."""

    def __init__(self) -> None:
        self._chat = msgspec.json.Decoder(ChatRequest)
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    def chat(self, body: bytes | bytearray) -> ChatRequest:
        return _decode(self._chat, body)

    def completion(self, body: bytes | bytearray) -> CompletionRequest:
        return _decode(self._completion, body)

    def tokenize(self, body: bytes | bytearray) -> TokenizeRequest:
        return _decode(self._tokenize, body)

    def detokenize(self, body: bytes | bytearray) -> DetokenizeRequest:
        return _decode(self._detokenize, body)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    if (values := body.count(b",")) > MAX_VALUES:
        raise ApiError(
            413, f"the request body may hold at most {MAX_VALUES} values, got some {values}", code="too_large"
        )
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise from_decoding(error, body) from None


def chat_job(request: ChatRequest, limits: Limits) -> Job:
    """Raises `ApiError` naming the field, its value and its bound."""
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(
            400, f"top_logprobs needs logprobs to be true, got top_logprobs {request.top_logprobs}", "top_logprobs"
        )
    if request.modalities is not None and set(request.modalities) - {"text"}:
        raise ApiError(400, f"modalities may hold text only, got {shown(request.modalities)}", "modalities")
    for field in ("audio", "functions", "function_call"):
        if getattr(request, field) not in (None, [], "none", "auto"):
            raise ApiError(400, f"{field} is not supported", field)
    if request.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, f"tool_choice must be none or auto, got {shown(request.tool_choice)}", "tool_choice")
    names = {"logprobs": "top_logprobs"}
    max_tokens = request.max_tokens
    if request.max_completion_tokens is not None:
        max_tokens, names["max_tokens"] = request.max_completion_tokens, "max_completion_tokens"
    sampling = _sampling(
        request,
        limits,
        names,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    return _job("chat", request, [chat_prompt(request, request.messages)], sampling)


def completion_job(request: CompletionRequest, limits: Limits) -> Job:
    """Raises `ApiError` naming the field, its value and its bound."""
    if request.suffix:
        raise ApiError(400, "suffix is not supported", "suffix")
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = request.logprobs
    sampling = _sampling(
        request,
        limits,
        {},
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    prompts = completion_prompts(request, limits.vocab_size, limits.max_model_len)
    return _job("completion", request, prompts, sampling, echo=bool(request.echo))


def _job(
    kind: Kind, request: SamplingFields, prompts: list[Prompt], sampling: SamplingParams, echo: bool = False
) -> Job:
    if len(prompts) * sampling.n > MAX_CHOICES:
        raise ApiError(
            400, f"prompts times n must be at most {MAX_CHOICES}, got {len(prompts)} times {sampling.n}", "n"
        )
    if request.best_of is not None and request.best_of != sampling.n:
        raise ApiError(400, f"best_of must equal n ({sampling.n}), got {shown(request.best_of)}", "best_of")
    priority = request.priority or 0
    if not -(2**31) <= priority < 2**31:
        raise ApiError(400, f"priority must be an integer of 32 bits, got {shown(priority)}", "priority")
    salt = request.cache_salt or ""
    if len(salt) > MAX_SALT:
        raise ApiError(400, f"cache_salt must have at most {MAX_SALT} characters, got {len(salt)}", "cache_salt")
    options = request.stream_options
    return Job(
        kind=kind,
        prompts=[packed(prompt) for prompt in prompts],
        sampling=sampling,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        echo=echo,
        priority=priority,
        cache_salt=salt,
        show_prompt_logprobs=request.prompt_logprobs is not None,
    )


_SAME_NAME = (
    "n", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "min_tokens", "include_stop_str_in_output", "ignore_eos", "seed", "skip_special_tokens",
)  # fmt: skip


def _sampling(request: SamplingFields, limits: Limits, names: dict[str, str], **given: Any) -> SamplingParams:
    _refuse_unsupported(request)
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.top_k is not None:
        fields["top_k"] = 0 if request.top_k == -1 else request.top_k
    if request.stop is not None:
        fields["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        fields["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.allowed_token_ids is not None:
        fields["allowed_token_ids"] = tuple(request.allowed_token_ids)
    try:
        sampling = SamplingParams(**fields)
        sampling.check_vocabulary(limits.vocab_size)
    except BoundError as error:
        raise from_bound(error, names) from None
    return sampling


def _refuse_unsupported(request: SamplingFields) -> None:
    wanted = request.response_format
    if wanted is not None and not (isinstance(wanted, dict) and wanted.get("type") == "text"):
        raise ApiError(400, f"response_format must be of type text, got {shown(wanted)}", "response_format")
    for field in (
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "bad_words",
        "use_beam_search", "logits_processors",
    ):  # fmt: skip
        value = getattr(request, field)
        if value is not None and value is not False and value != []:
            raise ApiError(400, f"{field} is not supported", field)

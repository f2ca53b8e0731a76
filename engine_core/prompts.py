"""What callers of the library may give as prompts and parameters, made uniform. Errors name the argument."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_core.text_side import TextSide
from ipc.messages import ROLES, ChatPrompt, TextPrompt
from ipc.sampling import BoundError, SamplingParams

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | Sequence[int]  # text, or token ids


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    text: str | None  # as given; None for ids and conversations
    ids: list[int]
    from_text: bool  # text or a conversation: its answer is wanted as text


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of them, as a list. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise BoundError("prompts", prompts, "a string, a list of token ids, or a list of those")
    if prompts and all(_is_id(item) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """One conversation or a list of them, as a list."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise BoundError("messages", messages, "a non-empty list of messages, or a list of such lists")
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        if not isinstance(conversation, Sequence) or not conversation:
            raise BoundError("messages", conversation, "a non-empty list of messages")
        for message in conversation:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise BoundError("messages", message, 'a mapping with a "role"')
            if message["role"] not in ROLES:
                raise BoundError("role of messages", message["role"], f"one of {', '.join(ROLES)}")
    return [[_plain(message) for message in conversation] for conversation in conversations]  # type: ignore[arg-type]


def _plain(message: Message) -> dict[str, Any]:
    """As the server hands it to templates, which know no developer."""
    return {**message, "role": "system" if message["role"] == "developer" else message["role"]}


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise BoundError("params", params, "SamplingParams, or a list of one for each prompt")
    if len(params) != count:
        raise BoundError("params", f"a list of {len(params)}", f"one SamplingParams, or one for each prompt ({count})")
    return list(params)


def encode_prompt(text: TextSide, prompt: Prompt, name: str = "prompt") -> EncodedPrompt:
    if isinstance(prompt, str):
        return EncodedPrompt(prompt, text.encode(TextPrompt(prompt)), True)
    if not isinstance(prompt, Sequence) or not all(_is_id(token) for token in prompt):
        raise BoundError(name, prompt, "a string or a list of token ids")
    ids = [operator.index(token) for token in prompt]  # type: ignore[arg-type]  # numpy's ints, too
    if ids and not -(2**31) <= min(ids) <= max(ids) < 2**31:
        raise BoundError(name, max(ids, key=abs), "token ids of the model's vocabulary")
    return EncodedPrompt(None, ids, False)


def encode_chat(text: TextSide, conversation: ChatPrompt) -> EncodedPrompt:
    return EncodedPrompt(None, text.encode(conversation), True)


def encode_any(text: TextSide, prompt: Prompt | Sequence[Message]) -> EncodedPrompt:
    """A text, a list of token ids, or a conversation."""
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        (messages,) = as_conversations(prompt)  # type: ignore[arg-type]
        return encode_chat(text, ChatPrompt(messages))
    return encode_prompt(text, prompt)  # type: ignore[arg-type]


def wants_text(prompt: EncodedPrompt, sampling: SamplingParams) -> bool:
    """Whether the detokenizer has to follow the request: its text is asked for, or a stop string has to be found."""
    return prompt.from_text or bool(sampling.stop)


def _is_id(value: object) -> bool:
    return not isinstance(value, bool | str) and hasattr(value, "__index__")

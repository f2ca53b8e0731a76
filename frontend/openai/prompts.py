"""From the bodies of requests to `Prompt` messages: chat messages, texts, lists of token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.errors import ApiError, shown
from frontend.openai.schema import ChatMessage, ChatRequest, CompletionRequest, TokenizeRequest
from ipc.codec import pack_prompt
from ipc.messages import ROLES, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ipc.sampling import MAX_INT

MAX_PROMPTS = 1024
MAX_DEPTH = 64  # of tools, tool calls and template arguments
# Template arguments that would replace what the server passes itself.
RESERVED_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "conversation",
    }
)


def chat_prompt(request: ChatRequest | TokenizeRequest, messages: list[ChatMessage]) -> ChatPrompt:
    """Raises `ApiError` naming the field that cannot be used."""
    if not messages:
        raise ApiError(400, "messages must hold at least one message, got []", param="messages")
    if request.chat_template is not None:
        raise ApiError(
            400, "chat_template is set by whoever starts the server, not by a request", param="chat_template"
        )
    final = bool(request.continue_final_message)
    if final and request.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    kwargs = request.chat_template_kwargs or {}
    if reserved := RESERVED_KWARGS.intersection(kwargs):
        raise ApiError(400, f"chat_template_kwargs may not set {sorted(reserved)[0]}", param="chat_template_kwargs")
    _check_plain("chat_template_kwargs", kwargs)
    _check_plain("tools", request.tools)
    wants_tools = not (isinstance(request, ChatRequest) and request.tool_choice == "none")
    return ChatPrompt(
        messages=[_message(f"messages[{i}]", message) for i, message in enumerate(messages)],
        tools=request.tools if request.tools and wants_tools else None,
        add_generation_prompt=not final if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=final,
        template_kwargs=kwargs,
    )


def completion_prompts(request: CompletionRequest, vocab_size: int, max_model_len: int) -> list[Prompt]:
    """One prompt per text or list of ids. Raises `ApiError`."""
    special = request.add_special_tokens is not False
    prompt = request.prompt
    if isinstance(prompt, str):
        return [TextPrompt(prompt, special)]
    if not prompt:
        raise ApiError(400, "prompt must not be empty, got []", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [_token_prompt("prompt", prompt, vocab_size, max_model_len)]
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(400, f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
    prompts: list[Prompt] = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            prompts.append(TextPrompt(item, special))
        elif isinstance(item, list):
            prompts.append(_token_prompt(f"prompt[{i}]", item, vocab_size, max_model_len))
        else:
            raise ApiError(
                400, f"prompt[{i}] must be a text or a list of token ids like the others, got {item}", param="prompt"
            )
    return prompts


def packed(prompt: Prompt) -> msgspec.Raw:
    """A prompt as a message carries it. `ApiError` if none can."""
    try:
        return pack_prompt(prompt)
    except (OverflowError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the request holds a value that cannot be processed: {error}") from None


def _token_prompt(field: str, ids: Sequence[Any], vocab_size: int, max_model_len: int) -> TokenPrompt:
    if not ids:
        raise ApiError(400, f"{field} must not be empty, got []", param="prompt")
    check_length(field, ids, max_model_len)
    return TokenPrompt(token_bytes(field, ids, vocab_size))


def check_length(field: str, ids: Sequence[Any], max_model_len: int) -> None:
    """`ApiError` if there are more ids than the context holds."""
    if len(ids) > max_model_len:
        raise ApiError(
            400,
            f"{field} has {len(ids)} tokens, more than the context length of {max_model_len} tokens",
            param=field.partition("[")[0],
            code="context_length_exceeded",
        )


def token_bytes(field: str, ids: Sequence[int], vocab_size: int) -> bytes:
    """Ids as little-endian int32 bytes; `ApiError` if one is not in [0, vocab_size)."""
    low, high = (min(ids), max(ids)) if ids else (0, 0)
    if low < 0 or high >= min(vocab_size, MAX_INT):
        bad = low if low < 0 else high
        raise ApiError(
            400,
            f"{field} must hold token ids between 0 and {vocab_size - 1}, got {shown(bad)}",
            param=field.partition("[")[0],
            code="invalid_value",
        )
    return array("i", ids).tobytes()


def _message(field: str, message: ChatMessage) -> dict[str, Any]:
    if message.role not in ROLES:
        raise ApiError(
            400, f"{field}.role must be one of {', '.join(ROLES)}, got {shown(message.role)}", param="messages"
        )
    if message.content is None and message.role not in ("assistant", "tool", "function"):
        raise ApiError(400, f"{field}.content must be a text, got null", param="messages")
    _check_plain(f"{field}.tool_calls", message.tool_calls)
    plain: dict[str, Any] = msgspec.to_builtins(message)
    plain["role"] = "system" if message.role == "developer" else message.role
    plain["content"] = _text(f"{field}.content", message.content)
    return plain


def _text(field: str, content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ApiError(
                400, f"{field}[{i}].type must be text: this model reads text only, got {shown(kind)}", param="messages"
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ApiError(400, f"{field}[{i}].text must be a text, got {shown(text)}", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _check_plain(field: str, value: Any) -> None:
    """JSON accepts what msgpack cannot carry (integers over 64 bits) and what templates should not walk (depth)."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise ApiError(
                    400, f"{field} may hold integers of 64 bits only, got {shown(item)}", param=field.partition("[")[0]
                )
        if not below:
            return
        level = below
    raise ApiError(400, f"{field} must be nested at most {MAX_DEPTH} deep", param=field.partition("[")[0])

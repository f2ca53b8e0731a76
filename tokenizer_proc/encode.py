"""Prompts to token ids, and what the detokenizer will need to know of a request."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

from ipc.messages import ChatPrompt, Prompt, TextPrompt, TextSpec, TokenPrompt
from ipc.sampling import SamplingParams
from tokenizer_proc.errors import PromptError
from tokenizer_proc.model import TextModel

LONG_CHARS = 1 << 14
MAX_TOKENS = 1 << 22  # of a prompt, whatever the model's context: more would not fit into messages


def to_bytes(ids: Sequence[int]) -> bytes:
    """Ids as the little-endian int32 bytes of messages."""
    return _little_endian(array("i", ids)).tobytes()


def from_bytes(data: bytes) -> list[int]:
    """Raises `PromptError` if `data` is not whole int32 values."""
    if len(data) % 4:
        raise PromptError(f"token ids must come as int32 values, got {len(data)} bytes", "prompt")
    return _little_endian(array("i", data)).tolist()


def encode_prompt(model: TextModel, prompt: Prompt) -> list[int]:
    """Raises `PromptError` with what the client should be told."""
    match prompt:
        case ChatPrompt():
            return _encode_chat(model, prompt)
        case TextPrompt():
            ids = _encode_text(model, prompt.text, prompt.add_special_tokens, "prompt")
        case TokenPrompt():
            ids = from_bytes(prompt.ids)
            check_ids(ids, model.vocab_size)
    if not ids:
        raise PromptError("prompt must hold at least one token, got none", "prompt")
    return ids


def check_ids(ids: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Raises `PromptError` naming the first id outside [0, vocab_size)."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise PromptError(
            f"{field} must hold token ids between 0 and {vocab_size - 1}, got {bad}", field, code="invalid_value"
        )


def text_spec(model: TextModel, ids: Sequence[int], sampling: SamplingParams, echo: str | None = None) -> bytes:
    """An encoded `TextSpec` for a request with prompt `ids`. `echo`: text to send back before the answer."""
    return msgspec.msgpack.encode(
        TextSpec(
            prompt_ids=to_bytes(_context(model, ids)),
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
            echo=echo,
        )
    )


def _encode_chat(model: TextModel, prompt: ChatPrompt) -> list[int]:
    template = model.tool_template if prompt.tools and model.tool_template else model.template
    if template is None:
        raise PromptError(model.template_problem, "messages", code="chat_template_missing")
    # The template writes the special tokens, BOS included; the tokenizer must not add them once more.
    ids = _encode_text(model, template.render(prompt), False, "messages")
    if model.chat_adds_bos and model.bos_token_id is not None and ids[:1] != [model.bos_token_id]:
        ids.insert(0, model.bos_token_id)
    if not ids:
        raise PromptError("the chat template makes an empty prompt of these messages", "messages")
    return ids


def _encode_text(model: TextModel, text: str, add_special_tokens: bool, field: str) -> list[int]:
    if model.max_chars is not None and len(text) > model.max_chars:
        raise PromptError(
            f"{field} has {len(text)} characters, more than can fit into the context length of "
            f"{model.context_length} tokens",
            field,
            code="context_length_exceeded",
        )
    try:
        ids = _ids(model.tokenizer, text, add_special_tokens)
    except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate
        raise PromptError(f"{field} is not valid Unicode text", field) from error
    if len(ids) > MAX_TOKENS:
        message = f"{field} has {len(ids)} tokens, more than the {MAX_TOKENS} that any prompt may have"
        raise PromptError(message, field, code="context_length_exceeded")
    return ids


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= LONG_CHARS:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    # Without offsets: faster, and Python's lock is not held to convert them.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _context(model: TextModel, ids: Sequence[int]) -> Sequence[int]:
    """The end of the prompt, back to a token that makes text (see `detokenizer_proc.incremental`)."""
    start, seen = max(0, len(ids) - 8), len(ids)
    while start > 0 and all(token in model.special_ids for token in ids[start:seen]):
        start, seen = max(0, start - 64), start  # each id is looked at once: a prompt may hold nothing else
    return ids[start:]


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values

"""A request's body to what it asks for, for the four endpoints that take a prompt: bytes in, a plain value out.

Pure: runs in the frontend for small bodies, and for large ones in a process beside it (`frontend.parser`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from frontend.errors import ApiError
from frontend.openai.job import Bodies, Job, Limits, chat_job, check_model, completion_job
from frontend.openai.prompts import chat_prompt, check_length, packed, token_bytes
from frontend.openai.schema import TokenizeRequest
from ipc.messages import TextPrompt

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    prompt: msgspec.Raw  # an encoded `Prompt`
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    ids: bytes  # int32, little endian
    skip_special_tokens: bool


class Parser:
    """Raises `ApiError` naming what cannot be used."""

    def __init__(self) -> None:
        self._bodies = Bodies()

    def job(self, path: str, body: bytes | bytearray, limits: Limits) -> Job:
        if path == CHAT:
            chat = self._bodies.chat(body)
            check_model(chat.model, limits)
            return chat_job(chat, limits)
        completion = self._bodies.completion(body)
        check_model(completion.model, limits)
        return completion_job(completion, limits)

    def tokenize(self, body: bytes | bytearray, limits: Limits) -> TokenizeCall:
        wanted = self._bodies.tokenize(body)
        check_model(wanted.model, limits)
        return TokenizeCall(_tokenize_prompt(wanted), bool(wanted.return_token_strs))

    def detokenize(self, body: bytes | bytearray, limits: Limits) -> DetokenizeCall:
        wanted = self._bodies.detokenize(body)
        check_model(wanted.model, limits)
        check_length("tokens", wanted.tokens, limits.max_model_len)
        return DetokenizeCall(token_bytes("tokens", wanted.tokens, limits.vocab_size), bool(wanted.skip_special_tokens))


def _tokenize_prompt(wanted: TokenizeRequest) -> msgspec.Raw:
    if (wanted.prompt is None) == (wanted.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt")
    if wanted.messages is not None:
        return packed(chat_prompt(wanted, wanted.messages))
    return packed(TextPrompt(wanted.prompt or "", wanted.add_special_tokens is not False))

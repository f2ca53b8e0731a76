"""Log-probabilities in the three formats clients know: chat, completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ipc.messages import TextLogprob

_FLOOR = -9999.0  # JSON has no minus infinity


def chat_logprobs(tokens: Iterable[TextLogprob], num_top: int) -> dict[str, Any]:
    """`num_top` is what the client asked for; the sampled token may come as one more."""
    return {
        "content": [
            {
                "token": token.text,
                "logprob": finite(token.logprob),
                "bytes": list(token.data),
                "top_logprobs": [
                    {"token": text, "logprob": finite(value), "bytes": list(data)}
                    for _, text, data, value in token.top[:num_top]
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Keeps the running text offset of one choice."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def render(self, tokens: Iterable[TextLogprob | None]) -> dict[str, Any]:
        """The first token of an echoed prompt has no log-probability (null)."""
        answer: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            if token is not None:
                self._add(answer, token)
        return answer

    def _add(self, answer: dict[str, Any], token: TextLogprob) -> None:
        name = _name(token.text, token.data)
        answer["tokens"].append(name)
        answer["text_offset"].append(self._offset)
        self._offset += len(token.text)
        if token.logprob is None:
            answer["token_logprobs"].append(None)
            answer["top_logprobs"].append(None)
            return
        top = {_name(text, data): finite(value) for _, text, data, value in token.top[: self._num_top]}
        top.setdefault(name, finite(token.logprob))
        answer["token_logprobs"].append(finite(token.logprob))
        answer["top_logprobs"].append(top)


def prompt_logprobs(tokens: Iterable[TextLogprob | None], num_top: int) -> list[dict[str, Any] | None]:
    """One entry per prompt token: token id -> its log-probability and text; null for the first."""
    return [None if token is None or token.logprob is None else _prompt_entry(token, num_top) for token in tokens]


def _prompt_entry(token: TextLogprob, num_top: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": text}
        for rank, (token_id, text, _, value) in enumerate(token.top[:num_top], 1)
    }
    entry.setdefault(
        str(token.token_id),
        {"logprob": finite(token.logprob), "rank": token.rank or None, "decoded_token": token.text},
    )
    return entry


def finite(value: float | None) -> float:
    return value if value is not None and value > _FLOOR else _FLOOR  # also replaces NaN


def _name(text: str, data: bytes) -> str:
    """OpenAI's notation for a token that is no whole character; as text, different ones would look the same."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text

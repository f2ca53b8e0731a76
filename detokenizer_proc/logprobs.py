"""Log-probabilities of ids to log-probabilities of texts, one call per position."""

from __future__ import annotations

from detokenizer_proc.incremental import TextDecoder
from ipc.messages import PromptLogprobs, TextLogprob, TokenLogprobs


def text_logprob(decoder: TextDecoder, token: int, value: TokenLogprobs | None) -> TextLogprob:
    """The token with its text and exact bytes. A token that is only part of a character has U+FFFD in its text.

    `value` None: nothing predicts this token (the first of a prompt).
    """
    data = decoder.token_bytes(token)
    text = data.decode("utf-8", "replace")
    if value is None:
        return TextLogprob(token, text, data, None)
    top: list[tuple[int, str, bytes, float]] = []
    ids, logprobs = memoryview(value.top_ids).cast("i"), memoryview(value.top_logprobs).cast("f")
    for other, logprob in zip(ids, logprobs, strict=True):
        other_data = decoder.token_bytes(other)
        top.append((other, other_data.decode("utf-8", "replace"), other_data, logprob))
    return TextLogprob(token, text, data, value.logprob, top, value.rank)


def prompt_text_logprobs(decoder: TextDecoder, prompt: PromptLogprobs) -> list[TextLogprob | None]:
    """One entry per prompt token."""
    ids = memoryview(prompt.ids).cast("i")
    return [text_logprob(decoder, token, value) for token, value in zip(ids, prompt.values, strict=True)]

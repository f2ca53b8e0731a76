"""A prompt that cannot be turned into tokens, and what the client is told."""

from __future__ import annotations

import logging

from ipc.messages import Error
from ipc.sampling import BoundError

log = logging.getLogger(__name__)


class PromptError(ValueError):
    """`error` is what the client gets."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        # Words of a template or of JSON inside a message may hold lone surrogates, which no message can carry.
        message = message[:32_768].encode("utf-8", "backslashreplace").decode()[:65_536]
        super().__init__(message)
        self.error = Error(status, message, param=param, code=code)

    @classmethod
    def of(cls, error: Error) -> PromptError:
        """One that another process has raised."""
        raised = cls(error.message)
        raised.error = error
        return raised


def explained(error: Exception) -> Error:
    """What the client gets for `error`. What it can do nothing about is logged."""
    if isinstance(error, PromptError):
        return error.error
    if isinstance(error, BoundError):
        return Error(400, str(error), param=error.field, code="invalid_value")
    log.error("a message failed in the tokenizer", exc_info=error)
    return Error(500, "the tokenizer failed on this request", "server_error", code="tokenizer_error")

"""A prompt that cannot be turned into tokens."""

from __future__ import annotations

from ipc.messages import Error


class PromptError(ValueError):
    """`error` is what the client gets."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        # Words of a template or of JSON inside a message may hold lone surrogates, which no message can carry.
        message = message[:32_768].encode("utf-8", "backslashreplace").decode()[:65_536]
        super().__init__(message)
        self.error = Error(status, message, param=param, code=code)

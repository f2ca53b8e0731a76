"""A prompt that cannot be turned into tokens."""

from __future__ import annotations

from ipc.messages import Error


class PromptError(ValueError):
    """`error` is what the client gets."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.error = Error(status, message[:65_536], param=param, code=code)

"""What the frontend and its parsing process say to each other through the latter's standard input and output.

to it    frame with Ask · frame with the body
back     frame with Reply        (see `ipc.frames`)
"""

from __future__ import annotations

import msgspec

from frontend.openai.job import Job, Limits
from frontend.openai.parse import DetokenizeCall, TokenizeCall

IDLE_S = 30.0  # after which the process ends and gives its memory back


class Ask(msgspec.Struct, frozen=True):
    path: str
    limits: Limits


class Refusal(msgspec.Struct, frozen=True):
    """The fields of an `ApiError`."""

    status: int
    message: str
    param: str | None
    code: str | None


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exactly one is set."""

    job: Job | None = None
    tokenize: TokenizeCall | None = None
    detokenize: DetokenizeCall | None = None
    refusal: Refusal | None = None

"""Why a server could not be reached, with what to do about it."""

from __future__ import annotations

import errno


def explained(error: Exception, how: str = "--url") -> str:
    """The error's own words, and a remedy where one is known. `how` a command is told of a server."""
    text = str(error)
    # By its text: asyncio joins the errors of several addresses into one that has no number.
    if f"[Errno {errno.ECONNREFUSED}]" in text:
        return f"{text}; start a server with `gapless serve`, or name one with {how}"
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return f"{text}; the server does not speak TLS: try http://"
    return text

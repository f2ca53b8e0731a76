"""Text from a model on the user's terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TextIO

import click

# A model must not move the cursor, set the title or write to the clipboard.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def print_answer(pieces: Iterator[str], out: TextIO | None = None) -> str:
    """Write pieces as they come, with a newline at the end. Returns the whole text, unchanged.

    On KeyboardInterrupt the iterator is closed and the exception passes; what was printed is then in `Stopped.text`.
    """
    out = sys.stdout if out is None else out
    parts: list[str] = []
    clean = out.isatty()
    try:
        for piece in pieces:
            parts.append(piece)
            out.write(CONTROL.sub("", piece) if clean else piece)
            out.flush()
    except KeyboardInterrupt:
        raise Stopped("".join(parts)) from None
    finally:
        getattr(pieces, "close", lambda: None)()
        if not parts or not parts[-1].endswith("\n"):
            out.write("\n")
        out.flush()
    return "".join(parts)


def note_cut_off() -> None:
    """Say why an answer ends in the middle, apart from what is piped on."""
    click.secho("(cut off where --max-tokens or the model's context ends)", dim=True, err=True)


class Stopped(KeyboardInterrupt):
    """Ctrl-C came during the answer; `text` is what had arrived."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

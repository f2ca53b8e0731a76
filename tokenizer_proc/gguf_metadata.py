"""The keys of a GGUF file, vocabulary included. Tensors are not looked at."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from ipc.errors import UserError
from ipc.gguf import HeaderReader


def read_metadata(path: Path) -> dict[str, Any]:
    """All keys with their values as plain Python values.

    Raises `UserError` if the file cannot be read, is no GGUF file of version 2 or 3, or ends too early.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return HeaderReader(path, data).metadata()[0]
    except (OSError, ValueError, OverflowError, struct.error, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {path} as a GGUF file: {error}") from error

"""Files that a command writes for the user: looked at before the work, written after it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from frontend.cli.errors import CliError


def check_output(path: Path | str | None) -> None:
    """Raises `CliError` if `path` cannot be written, before anything is done whose result it is to hold."""
    if path is None:
        return
    path = Path(path)
    if not path.parent.is_dir():
        raise _refusal(path, errno.ENOENT)
    if path.is_dir():
        raise _refusal(path, errno.EISDIR)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _refusal(path, errno.EACCES)


def write_output(path: Path | str, data: bytes | str) -> None:
    """Raises `CliError`."""
    path = Path(path)
    try:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    except OSError as error:
        raise _refusal(path, error.errno or errno.EIO) from None


def _refusal(path: Path, number: int) -> CliError:
    return CliError(f"cannot write {path}: {os.strerror(number)}")

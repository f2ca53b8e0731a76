"""The directory of one run: sockets, start-up settings and tokenizer.json, readable by this user alone.

    <$XDG_RUNTIME_DIR or the temporary directory>/gapless-xxxxxxxx/   0700
        lock            held (flock) by the supervisor as long as the run lives
        recordings      link to what the flight recorders write (see `ipc.recorder.store`)
        *.sock  *.json  0600

A directory whose lock nobody holds belongs to a dead run, and the next start removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from ipc.recorder.store import retire

PREFIX = "gapless-"
_LOCK = "lock"
_UNLOCKED_AGE_S = 60.0  # a directory this old without a lock file was left between its creation and its lock
_MAX_BASE = 80  # bytes; leaves room for the directory and socket names within the 107 of a socket address


def base_directory() -> Path:
    """Where run directories are made: a short path that this user can write to."""
    for candidate in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        if candidate.startswith("/") and len(os.fsencode(candidate)) <= _MAX_BASE and os.access(candidate, os.W_OK):
            return Path(candidate)
    raise OSError("no writable directory with a short path for sockets; set XDG_RUNTIME_DIR or TMPDIR")


class RunDirectory:
    """Made and locked by the constructor, removed by `remove` (or by leaving the `with`). First sweeps dead runs."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or base_directory()
        sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # 0700
        try:
            # Under its own name only once it is locked: a sweeper may come by at any moment.
            fresh = self.path / "lock.new"
            self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.rename(self.path / _LOCK)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def address(self, name: str) -> str:
        """The inbox address of the process `name`."""
        return f"ipc://{self.path}/{name}.sock"

    def write_config(self, name: str, config: msgspec.Struct) -> Path:
        """Leave the start-up settings of the process `name`, readable by this user alone (they hold the API key)."""
        path = self.path / f"{name}.json"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(config))
        return path

    def remove(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            remove_run_directory(self.path)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def read_config(path: Path, config_type: type[Any]) -> Any:
    """The settings written by `write_config`. Raises OSError or msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=config_type)


def remove_run_directory(path: Path) -> None:
    """Remove a run directory that several processes may be removing, and one may still be filling. Its recordings
    move to where past runs are kept."""
    if not path.name.startswith(PREFIX):
        raise ValueError(f"not a run directory: {path}")
    retire(path)
    for _ in range(100):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.01)


def sweep(base: Path) -> list[Path]:
    """Remove the directories of dead runs of this user. Returns them."""
    removed = []
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if is_dead(path):
                remove_run_directory(path)
                removed.append(path)
    return removed


def is_dead(path: Path) -> bool:
    """Whether this is a run directory of this user whose supervisor is gone. Raises OSError if there is none."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        return False
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - info.st_mtime > _UNLOCKED_AGE_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True

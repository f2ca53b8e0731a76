"""The runs of this user that can be looked at: those that live, those that died and left something, past ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ipc.recorder.store import (
    HOME,
    LINK,
    PREFIX,
    SHARED_MEMORY,
    About,
    past_runs,
    read_about,
    run_name,
    state_directory,
)
from ipc.run_dir import base_directory, is_dead


@dataclass(frozen=True, slots=True)
class Run:
    """`name` begins with the time of its start."""

    name: str
    folder: Path  # of its rings
    alive: bool
    about: About


def find_runs() -> list[Run]:
    """Newest first, those that live before all others."""
    found: dict[str, Run] = {}
    for folder, run_dir in _present():
        with contextlib.suppress(OSError):  # gone meanwhile
            name = run_name(folder, run_dir)
            found[name] = Run(name, folder, not is_dead(run_dir), read_about(folder))
    for folder in past_runs(state_directory()):
        found.setdefault(folder.name, Run(folder.name, folder, False, read_about(folder)))
    return sorted(found.values(), key=lambda run: (run.alive, run.about.started, run.name), reverse=True)


def _present() -> Iterator[tuple[Path, Path]]:
    """(recordings, run directory) of what was not moved to disk. A server may have been started with another
    XDG_RUNTIME_DIR than ours: what it records into is found in shared memory all the same."""
    for run_dir in _own(base_directory()):
        with contextlib.suppress(OSError):  # it has none, or has just gone
            yield (run_dir / LINK).resolve(strict=True), run_dir
    for folder in _own(SHARED_MEMORY):
        with contextlib.suppress(OSError):
            yield folder, (folder / HOME).readlink()


def _own(base: Path) -> Iterator[Path]:
    """Folders of this user: another one's are not looked at."""
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                yield path

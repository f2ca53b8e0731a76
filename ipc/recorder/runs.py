"""The runs of this user that can be looked at: those that live, those that died and left something, past ones."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from ipc.recorder.store import LINK, PREFIX, About, past_runs, read_about, state_directory
from ipc.run_dir import PREFIX as RUN_PREFIX
from ipc.run_dir import base_directory, is_dead


@dataclass(frozen=True, slots=True)
class Run:
    """`name` begins with the time of its start."""

    name: str
    folder: Path  # of its rings
    alive: bool
    about: About


def find_runs() -> list[Run]:
    """Newest first."""
    found: dict[str, Run] = {}
    with contextlib.suppress(OSError):
        for run_dir in base_directory().glob(f"{RUN_PREFIX}*"):
            with contextlib.suppress(OSError):  # gone meanwhile, or not ours to look into
                if run_dir.lstat().st_uid != os.getuid():
                    continue
                folder = (run_dir / LINK).resolve(strict=True)
                name = (folder if folder.name != LINK else run_dir).name.removeprefix(PREFIX)
                found[name] = Run(name, folder, not is_dead(run_dir), read_about(folder))
    for folder in past_runs(state_directory()):
        found.setdefault(folder.name, Run(folder.name, folder, False, read_about(folder)))
    return sorted(found.values(), key=lambda run: (run.alive, run.about.started, run.name), reverse=True)

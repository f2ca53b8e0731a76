"""Where recordings live.

    while a run lives     <run directory>/recordings -> /dev/shm/gapless-<date>-<time>-<xxxxxxxx>/*.ring
    when it has ended     <$XDG_STATE_HOME or ~/.local/state>/gapless/runs/<date>-<time>-<xxxxxxxx>/*.ring

Memory first, because the kernel stops a process that writes into a mapped file of a disk while it writes that page
back: milliseconds, now and then, in the middle of a step. Whoever removes the run directory (a clean stop, a child that
has lost its supervisor, the sweep of the next start) moves the recordings to disk, so nothing is left in memory and
the last runs can still be read. The newest `MAX_RUNS` of them are kept, within `MAX_BYTES`, and beside them the newest
`MAX_STARTS` that never became ready: a start that fails again and again does not push out the runs before it.

Recordings hold times, counts and ids; no text, no tokens, no keys.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ipc.recorder.reader import used_bytes
from ipc.recorder.ring import SUFFIX

LINK = "recordings"
ABOUT = "run.json"
MAX_RUNS = 12
MAX_STARTS = 3
MAX_BYTES = 128 * 2**20
PREFIX = "gapless-"
_TIME = "%Y%m%d-%H%M%S-"
HOME = "run"  # link back to the run directory
_START_S = 60.0  # after which a run has rings, if it ever will
SHARED_MEMORY = Path("/dev/shm")


class Clock(msgspec.Struct, frozen=True):
    """A process's start as its supervisor saw it, in CLOCK_MONOTONIC ns. One clock for both: spawned <= sent <=
    received."""

    pid: int
    spawned: int  # the supervisor's clock
    sent: int  # the process's clock, in its Ready
    received: int  # the supervisor's clock

    @property
    def agrees(self) -> bool:
        return self.sent == 0 or self.spawned <= self.sent <= self.received

    @property
    def bound_us(self) -> float:
        """The clocks cannot be further apart than this."""
        return max(self.sent - self.spawned, self.received - self.sent) / 1000


class About(msgspec.Struct, frozen=True):
    """What a recording does not say of its run."""

    model: str = ""
    started: float = 0.0  # seconds since 1970
    run_dir: str = ""
    clocks: dict[str, Clock] = {}  # by process name, once all are ready


def state_directory() -> Path:
    """Where the recordings of past runs are kept; need not exist."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "gapless" / "runs"


def open_recordings(run_dir: Path, model: str = "", shared_memory: Path = SHARED_MEMORY) -> Path:
    """A folder for the rings of the run at `run_dir`: in shared memory where there is any, else in `run_dir`."""
    link = run_dir / LINK
    try:
        _sweep(shared_memory)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX + time.strftime(_TIME), dir=shared_memory))  # 0700
        (folder / HOME).symlink_to(run_dir)
        link.symlink_to(folder)
    except OSError:  # none here, or full
        folder = link
        folder.mkdir(0o700)
    write_about(folder, About(model, time.time(), str(run_dir)))
    return folder


def write_about(folder: Path, about: About) -> None:
    fresh = folder / f"{ABOUT}.{os.getpid()}"
    with contextlib.suppress(OSError):  # nobody is served worse for it
        fresh.write_bytes(msgspec.json.encode(about))
        fresh.rename(folder / ABOUT)


def read_about(folder: Path) -> About:
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.MsgspecError):
        return About()


def note_clocks(run_dir: Path, clocks: Mapping[str, Clock]) -> list[str]:
    """Leave the clocks beside the recordings. Returns the names of the processes whose clock is another one."""
    folder = run_dir / LINK
    if folder.is_dir():
        write_about(folder, msgspec.structs.replace(read_about(folder), clocks=dict(clocks)))
    return [name for name, clock in clocks.items() if not clock.agrees]


def retire(run_dir: Path) -> None:
    """Move the recordings of a run that has ended to disk. Several processes may do so at once. Never raises."""
    link = run_dir / LINK
    with contextlib.suppress(OSError):
        if not link.is_dir():
            return
        folder = link.resolve()
        if link.is_symlink() and not (folder.name.startswith(PREFIX) and (folder / HOME).is_symlink()):
            return  # not ours to move
        with contextlib.suppress(OSError):
            _keep(folder, state_directory() / run_name(folder, run_dir))
        if link.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def run_name(folder: Path, run_dir: Path) -> str:
    """What a run is called: when it began, and something of its own."""
    if folder.name != LINK:
        return folder.name.removeprefix(PREFIX)
    began = time.strftime(_TIME, time.localtime(read_about(folder).started))
    return began + run_dir.name.removeprefix(PREFIX)


def _keep(folder: Path, target: Path) -> None:
    target.parent.mkdir(0o700, parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
    try:
        for path in folder.glob(f"*{SUFFIX}"):
            data = path.read_bytes()
            (fresh / path.name).write_bytes(data[: used_bytes(data)])
        (fresh / ABOUT).write_bytes((folder / ABOUT).read_bytes())
        fresh.rename(target)  # fails if another process was first
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    prune(target.parent)


def prune(runs: Path, max_runs: int = MAX_RUNS, max_bytes: int = MAX_BYTES, max_starts: int = MAX_STARTS) -> None:
    """Forget the oldest runs beyond the bounds; the newest one stays whatever its size. So for failed starts."""
    ready: list[Path] = []
    starts: list[Path] = []
    for run in past_runs(runs):
        (ready if read_about(run).clocks else starts).append(run)
    _forget(ready, max_runs, max_bytes)
    _forget(starts, max_starts, max_bytes)


def _forget(newest_first: Sequence[Path], most: int, max_bytes: int) -> None:
    total = 0
    for index, run in enumerate(newest_first):
        total += sum(path.stat().st_size for path in run.iterdir())
        if index and (index >= most or total > max_bytes):
            shutil.rmtree(run, ignore_errors=True)


def past_runs(runs: Path) -> list[Path]:
    """Folders of past runs, newest first: their names begin with the time of their start."""
    if not runs.is_dir():
        return []
    return sorted((path for path in runs.iterdir() if path.name[:1] != "."), key=lambda path: path.name, reverse=True)


def _sweep(shared_memory: Path) -> None:
    """Remove what belongs to a run directory that somebody has removed by hand. One that cannot be seen from here may
    also be that of another container with which we share the memory: there, processes hold its rings."""
    for folder in shared_memory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            home = folder / HOME
            lost = folder.lstat().st_uid == os.getuid() and home.is_symlink() and not home.exists()
            if lost and not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    """Whether a process writes a ring in there, or may be about to make the first one."""
    if time.time() - folder.stat().st_mtime < _START_S:
        return True
    for path in folder.glob(f"*{SUFFIX}"):
        with path.open("rb") as ring:
            try:
                fcntl.flock(ring, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False

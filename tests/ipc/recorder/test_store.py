from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipc.recorder import runs
from ipc.recorder.events import COMMIT
from ipc.recorder.reader import read_rings
from ipc.recorder.ring import RingRecorder
from ipc.recorder.runs import find_runs
from ipc.recorder.store import (
    HOME,
    LINK,
    About,
    Clock,
    note_clocks,
    open_recordings,
    past_runs,
    prune,
    read_about,
    retire,
    state_directory,
    write_about,
)
from ipc.run_dir import RunDirectory, remove_run_directory

ROOT = Path(__file__).parents[3]


@pytest.fixture
def base(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run directories, shared memory and kept runs of this test alone."""
    (short_dir / "shm").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(short_dir / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir / "run"))
    (short_dir / "run").mkdir()
    monkeypatch.setattr(runs, "SHARED_MEMORY", short_dir / "shm")
    return short_dir


def shm(base: Path) -> list[Path]:
    return list((base / "shm").iterdir())


def test_a_clean_stop_leaves_nothing_in_memory_and_the_recording_on_disk(base: Path) -> None:
    with RunDirectory(base / "run") as run:
        folder = open_recordings(run.path, "smollm2", base / "shm")
        assert shm(base) == [folder]
        assert folder.stat().st_mode & 0o777 == 0o700
        RingRecorder(folder, "engine_core", 1 << 12).mark(COMMIT, 5)
        (live,) = find_runs()
        assert (live.alive, live.about.model, live.folder) == (True, "smollm2", folder)
    assert shm(base) == []
    assert list((base / "run").iterdir()) == []
    (past,) = find_runs()
    assert (past.alive, past.name, past.about.model) == (False, live.name, "smollm2")
    assert past.folder.parent == state_directory()
    (recording,) = read_rings(past.folder)
    assert [record.id for record in recording.records] == [5]
    assert sum(path.stat().st_size for path in past.folder.iterdir()) < 1000


def test_a_run_that_was_killed_is_found_at_once_and_kept_by_the_next_start(base: Path) -> None:
    code = (
        "import os, sys, pathlib; from ipc.run_dir import RunDirectory;"
        "from ipc.recorder.store import open_recordings;"
        "from ipc.recorder.ring import RingRecorder; base = pathlib.Path(sys.argv[1]);"
        " run = RunDirectory(base / 'run');"
        "RingRecorder(open_recordings(run.path, 'm', base / 'shm'), 'engine_core', 64).mark(26, 7);"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(base)], cwd=ROOT, check=False)
    (dead,) = find_runs()
    assert not dead.alive
    assert [record.id for record in read_rings(dead.folder)[0].records] == [7]
    with RunDirectory(base / "run"):
        (kept,) = find_runs()
        assert kept.name == dead.name
        assert kept.folder.parent == state_directory()
        assert [record.id for record in read_rings(kept.folder)[0].records] == [7]
    assert shm(base) == []


def test_several_processes_may_move_one_run(base: Path) -> None:
    run = RunDirectory(base / "run")
    folder = open_recordings(run.path, "m", base / "shm")
    for name in ("frontend", "tokenizer_proc", "engine_core", "detokenizer_proc"):
        RingRecorder(folder, name, 1 << 14).mark(COMMIT, 1)
    context = multiprocessing.get_context("fork")
    movers = [context.Process(target=remove_run_directory, args=(run.path,)) for _ in range(4)]
    for mover in movers:
        mover.start()
    for mover in movers:
        mover.join()
    run.remove()
    (kept,) = past_runs(state_directory())
    assert len(read_rings(kept)) == 4
    assert [path.name for path in state_directory().iterdir()] == [kept.name]
    assert shm(base) == []


def test_without_shared_memory_the_run_directory_holds_them(base: Path) -> None:
    with RunDirectory(base / "run") as run:
        folder = open_recordings(run.path, "m", base / "nowhere")
        assert folder == run.path / LINK
        RingRecorder(folder, "engine_core", 64).mark(COMMIT, 3)
        assert find_runs()[0].alive
        name = find_runs()[0].name
        assert name[:8].isdigit()
    assert find_runs()[0].name == name
    assert [record.id for record in read_rings(find_runs()[0].folder)[0].records] == [3]


def test_where_nothing_can_be_kept_the_stop_is_clean_all_the_same(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(base / "file"))
    with RunDirectory(base / "run") as run:
        RingRecorder(open_recordings(run.path, "m", base / "shm"), "engine_core", 64)
    assert shm(base) == []
    assert find_runs() == []


def test_a_link_that_somebody_else_made_is_not_followed(base: Path) -> None:
    victim = base / "gapless-precious"
    victim.mkdir()
    (victim / "data").touch()
    run = RunDirectory(base / "run")
    (run.path / LINK).symlink_to(victim)
    run.remove()
    assert (victim / "data").exists()
    retire(base / "run" / "gapless-that-never-was")


def test_memory_of_a_run_directory_that_was_removed_by_hand_is_swept(base: Path) -> None:
    with RunDirectory(base / "run") as gone:
        lost = open_recordings(gone.path, "m", base / "shm")
        shutil.rmtree(gone.path)
    with RunDirectory(base / "run") as run:
        open_recordings(run.path, "m", base / "shm")
    assert shm(base) == [lost]  # it may only just be starting
    make_old(lost)
    with RunDirectory(base / "run") as run:
        folder = open_recordings(run.path, "m", base / "shm")
        assert shm(base) == [folder]


def make_old(folder: Path) -> None:
    os.utime(folder, (time.time() - 3600, time.time() - 3600))


def test_the_recording_of_another_containers_server_is_left_alone(base: Path) -> None:
    """One that shares /dev/shm with us: its run directory is nowhere, and its pids mean nothing here."""
    code = (
        "import sys, pathlib; from ipc.recorder.ring import RingRecorder;"
        "ring = RingRecorder(pathlib.Path(sys.argv[1]), 'engine_core', 64);"
        "print(flush=True); sys.stdin.read()"
    )
    folder = base / "shm" / "gapless-20260101-100000-other"
    folder.mkdir()
    (folder / HOME).symlink_to("/nowhere/gapless-x")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == b"\n"
        make_old(folder)
        with RunDirectory(base / "run") as run:
            open_recordings(run.path, "m", base / "shm")
            assert read_rings(folder)
            assert len(shm(base)) == 2
        other.kill()
    with RunDirectory(base / "run") as run:
        assert shm(base) == [folder]
        assert shm(base) != [open_recordings(run.path, "m", base / "shm")]
        assert folder not in shm(base)


def leave(runs: Path, hour: int, ready: bool) -> None:
    run = runs / f"20260101-{hour}0000-x"
    run.mkdir()
    (run / "engine_core-1.ring").write_bytes(b"x" * 1000)
    write_about(run, About("m", 1.0, "", {"engine_core": Clock(1, 1, 2, 3)} if ready else {}))


def hours(runs: Path) -> list[int]:
    return [int(path.name[9:11]) for path in past_runs(runs)]


@pytest.mark.parametrize("ready", [True, False])
def test_only_the_newest_runs_are_kept(tmp_path: Path, ready: bool) -> None:
    for hour in range(10, 20):
        leave(tmp_path, hour, ready)
    prune(tmp_path, max_runs=6, max_bytes=10**6, max_starts=6)
    assert hours(tmp_path) == [19, 18, 17, 16, 15, 14]
    prune(tmp_path, max_runs=6, max_bytes=3999, max_starts=6)
    assert hours(tmp_path) == [19, 18, 17]
    prune(tmp_path, max_runs=6, max_bytes=10, max_starts=6)
    assert hours(tmp_path) == [19]


def test_starts_that_fail_push_out_no_run(tmp_path: Path) -> None:
    for hour in range(10, 22):
        leave(tmp_path, hour, ready=True)
    for hour in range(30, 60):
        leave(tmp_path, hour, ready=False)
        prune(tmp_path)
    assert hours(tmp_path) == [59, 58, 57, *range(21, 9, -1)]


def test_clocks_are_noted_and_one_that_differs_is_named(base: Path) -> None:
    now = time.monotonic_ns()
    clocks = {
        "engine_core": Clock(1, now - 2000, now - 1000, now),
        "frontend": Clock(2, now - 2000, now + 50_000_000, now),  # sent after it was received
        "tokenizer_proc": Clock(3, now, now - 1, now),  # sent before it was started
        "detokenizer_proc": Clock(4, now, 0, now),  # does not tell
    }
    with RunDirectory(base / "run") as run:
        folder = open_recordings(run.path, "m", base / "shm")
        assert note_clocks(run.path, clocks) == ["frontend", "tokenizer_proc"]
        assert read_about(folder).clocks == clocks
        assert clocks["engine_core"].bound_us == 1.0
        (folder / "run.json").write_text("no json")
        assert read_about(folder).clocks == {}


def test_a_server_with_another_run_directory_is_found(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a service manager has started, seen from a login shell."""
    with RunDirectory(base / "run") as run:
        folder = open_recordings(run.path, "m", base / "shm")
        (base / "other").mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "other"))
        (found,) = find_runs()
        assert (found.folder, found.alive) == (folder, True)
    assert [found.alive for found in find_runs()] == [False]


def test_another_users_run_is_not_looked_at(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDirectory(base / "run") as run:
        open_recordings(run.path, "m", base / "shm")
        assert len(find_runs()) == 1
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        assert find_runs() == []
        monkeypatch.undo()


def test_what_vanishes_does_not_disturb_the_list(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "run" / "gapless-empty").mkdir()
    (base / "run" / "gapless-dangling").mkdir()
    (base / "run" / "gapless-dangling" / LINK).symlink_to(base / "gone")
    monkeypatch.setattr(runs, "base_directory", lambda: base / "run")
    assert find_runs() == []
    assert os.listdir(base / "run")

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from ipc.config import DetokenizerProcessConfig, Endpoints, FrontendProcessConfig
from ipc.run_dir import RunDirectory, base_directory, read_config, remove_run_directory, sweep

ROOT = Path(__file__).parents[2]
ENDS = Endpoints(supervisor="s", tokenizers=("t",), engine="e", detokenizers=("d",), frontends=("f",))


def test_only_this_user_may_look_inside(short_dir: Path) -> None:
    old = os.umask(0)
    try:
        with RunDirectory(short_dir) as run:
            path = run.write_config("frontend", FrontendProcessConfig(index=0, endpoints=ENDS, api_key="secret"))
            assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE((run.path / "lock").stat().st_mode) == 0o600
            assert run.address("engine") == f"ipc://{run.path}/engine.sock"
    finally:
        os.umask(old)
    assert list(short_dir.iterdir()) == []


def test_settings_come_back_as_they_went_and_unknown_keys_are_errors(short_dir: Path) -> None:
    config = DetokenizerProcessConfig(tokenizer_json="x.json", endpoints=ENDS)
    with RunDirectory(short_dir) as run:
        path = run.write_config("detokenizer_proc", config)
        assert read_config(path, DetokenizerProcessConfig) == config
        with pytest.raises(msgspec.ValidationError, match="unknown field"):
            read_config(path, FrontendProcessConfig)
        with pytest.raises(FileExistsError):
            run.write_config("detokenizer_proc", config)


def test_runs_live_side_by_side(short_dir: Path) -> None:
    with RunDirectory(short_dir) as first, RunDirectory(short_dir) as second:
        assert first.path != second.path
        assert sweep(short_dir) == []
        first.remove()
        first.remove()
        assert [path.name for path in short_dir.iterdir()] == [second.path.name]


def test_the_next_run_sweeps_those_that_were_killed(short_dir: Path) -> None:
    code = (
        "import os, sys, pathlib; from ipc.run_dir import RunDirectory; run = RunDirectory(pathlib.Path(sys.argv[1]));"
        "(run.path / 'engine.sock').touch(); os.kill(os.getpid(), 9)"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(short_dir)], cwd=ROOT, check=False)
    assert len(list(short_dir.iterdir())) == 1  # the second swept the first
    with RunDirectory(short_dir) as run:
        assert list(short_dir.iterdir()) == [run.path]


def test_sweeping_spares_what_is_not_a_dead_run(short_dir: Path) -> None:
    (short_dir / "gapless-file").touch()
    (short_dir / "other").mkdir()
    target = short_dir / "target"
    target.mkdir()
    (target / "lock").touch()
    (short_dir / "gapless-link").symlink_to(target)
    fresh, old = short_dir / "gapless-fresh", short_dir / "gapless-old"
    for path in (fresh, old):  # killed, or not yet done, between creating and locking
        path.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    assert sweep(short_dir) == [old]
    assert {path.name for path in short_dir.iterdir()} == {
        "gapless-file",
        "other",
        "target",
        "gapless-link",
        "gapless-fresh",
    }
    assert (target / "lock").exists()


def test_only_run_directories_are_removed(short_dir: Path) -> None:
    with pytest.raises(ValueError):
        remove_run_directory(short_dir)
    assert short_dir.exists()


def test_the_base_is_short_and_writable(monkeypatch: pytest.MonkeyPatch, short_dir: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    assert base_directory() == short_dir
    long = tmp_path / ("x" * 100)
    long.mkdir()
    for bad in (str(long), "relative", str(short_dir / "missing"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", bad)
        assert len(str(base_directory())) <= 80
        assert os.access(base_directory(), os.W_OK)

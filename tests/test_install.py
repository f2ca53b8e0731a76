"""The two commands of a fresh clone, as far as they can be tested from inside the environment that they make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def shell(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    outer_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PORT", "MODEL", "ARGS")  # these tests may run in `make test`
    env = {key: value for key, value in os.environ.items() if key not in outer_make} | environ
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_no_usable_python_is_a_plain_error(tmp_path: Path) -> None:
    old = script(tmp_path / "old-python", "exit 1")
    done = shell(".ci/install", str(tmp_path / "venv"), PYTHON=str(old))
    assert done.returncode == 1
    assert f"Gapless needs Python 3.11, 3.12 or 3.13 with the venv module; tried: {old}." in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_newest_python_that_works_is_taken(tmp_path: Path) -> None:
    """3.13 is a shim of a version manager that has no such version, 3.12 works; the rest of the script is cut off by a
    venv module that does not."""
    script(tmp_path / "python3.13", "echo 'no such version' >&2; exit 127")
    real = f'[ "$2" = venv ] && echo "$0 makes it" >&2 && exit 3\nexec {sys.executable} "$@"'
    for name in ("python3.12", "python3.11", "python3"):
        script(tmp_path / name, real)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": ""}
    done = shell(".ci/install", str(tmp_path / "venv"), **environ)
    assert done.returncode == 3
    assert f"{tmp_path}/python3.12 makes it" in done.stderr


def test_make_passes_model_port_and_arguments_on(tmp_path: Path) -> None:
    (tmp_path / ".installed").touch()
    done = shell("make", "-n", "serve", f"VENV={tmp_path}", "MODEL=m.gguf", "PORT=8123", "ARGS=--max-num-seqs 8")
    assert done.stdout.strip() == f"exec {tmp_path}/bin/gapless serve m.gguf --port 8123 --max-num-seqs 8"
    assert shell("make", "-n", "serve", f"VENV={tmp_path}").stdout.split() == [
        "exec",
        f"{tmp_path}/bin/gapless",
        "serve",
    ]

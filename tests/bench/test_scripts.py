"""The measuring scripts start as their first lines say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "bench").glob("*.py"))
SCRIPTS = [module for module in MODULES if '__name__ == "__main__"' in module.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_script_names_its_command_and_hides_no_package(script: Path) -> None:
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert text is not None
    assert f"python -m bench.{script.stem}" in text
    assert not (ROOT / script.stem).exists()


def test_all_scripts_can_be_imported() -> None:
    names = ", ".join(f"bench.{module.stem}" for module in MODULES)
    done = subprocess.run(
        [sys.executable, "-c", f"import {names}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_make_bench_runs_a_script_that_is_there() -> None:
    done = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True)
    command = done.stdout.split()
    assert command[command.index("-m") + 1] in [f"bench.{script.stem}" for script in SCRIPTS]


def test_the_results_name_every_script() -> None:
    text = (ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")
    assert [script.stem for script in SCRIPTS if f"python -m bench.{script.stem}" not in text] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bench.persistent_mlp"], "error: this needs a CUDA device"),
        (
            ["bench.online", "--tokenizer", "nowhere"],
            "error: nowhere has no tokenizer.json; --make-tokenizer writes one",
        ),
        (["bench.online", "--make-tokenizer", "nowhere.gguf", "folder"], "error: "),
    ],
    ids=["no GPU", "no tokenizer", "no GGUF"],
)
def test_what_is_missing_is_told_in_a_line(words: list[str], told: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


def test_a_study_for_gpus_tells_what_it_is_without_one() -> None:
    command = [sys.executable, "-m", "bench.persistent_mlp", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "one persistent kernel" in done.stdout

"""`gapless bench offline` on a small model: every line is there, with its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.engine_core.tiny_models import save_model

ROOT = Path(__file__).parents[2]


def test_lines_of_a_quick_run(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_model(folder, "llama", max_position_embeddings=1024)
    (folder / "tokenizer.json").write_text("{}")  # part of a complete model; nobody reads it here
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "frontend.cli", "bench", "offline", str(folder), "--quick", "--device", "cpu"]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["model"] for line in lines} == {folder.name}
    measured = [
        (line["what"], line.get("bs") or line.get("n")) for line in lines if not line["what"].startswith("start:")
    ]
    assert measured == [("decode step", 1), ("decode step", 4), ("prefill", 64), ("start to first token", None)]
    assert all(line["value"] >= 0 for line in lines)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["value"] for line in written] == [line["value"] for line in lines]
    assert all(line["date"] and line["card"] == "cpu" for line in written)


def test_a_wrong_argument_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine_core.measure", str(tmp_path), "--speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--speed" in done.stderr

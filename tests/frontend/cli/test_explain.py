"""`gapless explain`: the figures a user reads, and that they come at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.shapes import write_config
from frontend.cli.app import GROUP
from frontend.cli.errors import CliError, ModelError


def explain(*words: str) -> str:
    done = CliRunner().invoke(GROUP, ["explain", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def cells(report: str, first: str) -> list[str]:
    return next(line.split() for line in report.splitlines() if line.split()[:1] == [first])


def test_the_report_of_a_folder_with_a_config_alone(tmp_path: Path) -> None:
    report = explain(str(write_config("qwen3-8b", tmp_path)))
    assert "qwen3-8b: Qwen3ForCausalLM, 36 layers" in report
    assert "147,456 B per token, 6.04 GB per request of 40,960" in report
    assert "active in a token     7.57 B  15.14 GB" in report
    assert cells(report, "1")[:2] == ["1", "3.520m"]
    assert cells(report, "256")[:2] == ["256", "4.905c"]
    assert report.count("never") == 8
    assert "Computing is the limit from 200 tokens in a step on" in report
    assert max(map(len, report.splitlines())) <= 120


def test_another_card_and_given_limits(tmp_path: Path) -> None:
    model = str(write_config("qwen3-0.6b", tmp_path))
    assert "114,688 B per token" in explain(model)
    report = explain(model, "--gpu", "l4", "--max-model-len", "4096")
    assert "l4: 23.6 GB, 0.30 TB/s, 121 TFLOP/s by its data sheet" in report
    assert "4,096 at once" in report
    # 1,192,099,840 bytes at 1 TB/s
    assert cells(explain(model, "--peak-bandwidth", "1000"), "1")[1] == "1.192m"
    assert "It does not fit: 16.38 GB of weights into 14.11 GB" in explain(
        str(write_config("qwen3-8b", tmp_path)), "--gpu", "t4"
    )


def test_a_window_and_experts_are_told(tmp_path: Path) -> None:
    assert "32 of 32 layers see a window of 4,096 tokens" in explain(str(write_config("mistral-7b", tmp_path)))
    assert "8 of 128 experts per token in 48 layers" in explain(str(write_config("qwen3-30b-a3b", tmp_path)))


def test_errors_are_plain(tmp_path: Path) -> None:
    model = write_config("qwen3-0.6b", tmp_path)
    for words, error, text in (
        ([str(model), "--gpu", "abacus"], CliError, "unknown GPU 'abacus'; the known ones are"),
        (["nothing-like-this"], ModelError, "unknown model"),
    ):
        with pytest.raises(error, match=text):
            explain(*words)
    (model / "config.json").write_text(json.dumps({"architectures": ["Mamba"]}))
    with pytest.raises(CliError, match="architecture 'Mamba' is not supported"):
        explain(str(model))


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    words = ["gapless", "explain", str(write_config("qwen3-0.6b", tmp_path))]
    program = (
        f"import sys\nsys.argv = {words!r}\nfrom frontend.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'numba', 'triton', 'safetensors'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

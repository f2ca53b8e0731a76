"""Help is quick, complete and short."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from frontend.cli.app import COMMANDS, GROUP
from frontend.cli.settings import OPTIONS

HEAVY = {"torch", "tokenizers", "transformers", "numba", "numpy", "huggingface_hub", "zmq", "rich", "prompt_toolkit"}


@pytest.mark.parametrize("words", [["--help"], ["version"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys, json\n"
        f"sys.argv = ['gapless', *{words!r}]\n"
        "from frontend.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout
    loaded = set(json.loads(done.stderr))
    assert "click" in loaded
    assert not loaded & HEAVY


def test_top_level_help_fits_a_small_terminal() -> None:
    shown = CliRunner().invoke(GROUP, ["--help"], terminal_width=80)
    assert shown.exit_code == 0
    assert len(shown.output.splitlines()) <= 24
    for name in COMMANDS:
        assert f"  {name}" in shown.output


def test_serve_help_fits_a_screen_and_lists_each_setting_in_its_group() -> None:
    shown = CliRunner().invoke(GROUP, ["serve", "--help"], terminal_width=80)
    lines = shown.output.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 100
    for opt in OPTIONS.values():
        if opt.part in ("engine", "text", "server"):
            group = lines.index(f"{opt.group}:")
            name = opt.flags[0].removeprefix("--enable-").removeprefix("--")
            assert any(name in line for line in lines[group:]), opt.key


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_what_it_does(name: str) -> None:
    shown = CliRunner().invoke(GROUP, [name, "--help"])
    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: gapless {name}")


def test_a_misspelt_command_and_a_misspelt_flag_name_the_nearest() -> None:
    command = CliRunner().invoke(GROUP, ["serv"])
    assert command.exit_code == 2
    assert "did you mean serve?" in command.output
    flag = CliRunner().invoke(GROUP, ["serve", "--max-num-seq", "3"])
    assert flag.exit_code == 2
    assert "--max-num-seqs" in flag.output


def test_bench_offline_lists_what_it_hands_on_to_the_measurement() -> None:
    source = (Path(__file__).parents[3] / "engine_core" / "measure.py").read_text(encoding="utf-8")
    flags = re.findall(r'add_argument\("(--[a-z-]+)"', source)
    page = CliRunner().invoke(GROUP, ["bench", "offline", "--help"]).output
    assert len(flags) > 5
    assert [flag for flag in flags if f"  {flag} " not in page] == []


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--model", "smollm2"], "MODEL is an argument: gapless serve MODEL"),
        (["smollm2", "--model=x"], "MODEL is an argument: gapless serve MODEL"),
        (["--enforce-eager"], "--no-cuda-graphs"),
        (["--no-enable-prefix-caching"], "--disable-prefix-caching"),
        (["--tensor-parallel-size", "2"], "one GPU only"),
    ],
)
def test_flags_of_vllm_name_what_is_meant(flags: list[str], hint: str) -> None:
    done = CliRunner().invoke(GROUP, ["serve", *flags])
    assert done.exit_code == 2
    assert f": {hint}\n" in done.output
    meant = hint.split()[0]
    assert not meant.startswith("--") or meant in {flag for opt in OPTIONS.values() for flag in opt.flags}


def test_the_version_is_a_flag_too() -> None:
    flag, command = (CliRunner().invoke(GROUP, [word]) for word in ("--version", "version"))
    assert (flag.exit_code, flag.output) == (0, command.output)
    assert flag.output.startswith("gapless ")

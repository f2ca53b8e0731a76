"""Pages that must follow the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click

from frontend.cli.app import COMMANDS, GROUP
from frontend.cli.bench import COMMAND as BENCH
from frontend.cli.models import ALIASES
from frontend.cli.reference import render
from frontend.cli.settings import OPTIONS

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def requirement_name(line: str) -> str:
    found = re.match(r"[A-Za-z0-9-]+", line)
    assert found is not None
    return found[0]


def test_settings_page_is_current() -> None:
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == render(), "run `make docs`"


def test_every_dependency_has_its_reason_and_its_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    to_run, to_develop = (re.findall(r"^\| ([a-z0-9-]+) \| \S", part, re.MULTILINE) for part in page.split("## ")[1:])
    assert to_run[1:] == [requirement_name(line) for line in project["dependencies"]]
    assert to_develop[1:] == [requirement_name(line) for line in project["optional-dependencies"]["dev"]]
    pinned = re.findall(r"^([a-z0-9-]+)==\S+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*to_run[1:], *to_develop[1:]} <= set(pinned)
    assert len(pinned) == len(set(pinned))


def own_flags() -> set[str]:
    """Those of commands that are no settings; `bench offline` hands its own on to the engine's measurement."""
    context = click.Context(GROUP)
    commands = [*(GROUP.get_command(context, name) for name in COMMANDS), *BENCH.commands.values()]
    measure = (ROOT / "engine_core" / "measure.py").read_text(encoding="utf-8")
    flags = {flag for command in commands if command for param in command.params for flag in param.opts}
    return flags | set(re.findall(r'add_argument\("(--[a-z-]+)"', measure))


def test_flags_variables_and_commands_named_in_the_docs_exist() -> None:
    flags = {flag for opt in OPTIONS.values() for flag in opt.flags} | own_flags()
    variables = {opt.env for opt in OPTIONS.values()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in text.splitlines():
            called = line.partition("gapless ")[2] + (line if line.startswith("`--") else "")
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", called)) <= flags | {"--help"}, (page.name, line)
        assert set(re.findall(r"\bGAPLESS_[A-Z_]+\b", text)) <= variables | {"GAPLESS_"}, page.name
        named = set(re.findall(r"`gapless ([a-z]+)", text)) | set(re.findall(r"^gapless ([a-z]+)", text, re.MULTILINE))
        assert named <= COMMANDS.keys(), page.name


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


def test_models_named_in_commands_can_be_had() -> None:
    """An alias, a hub id, a file or folder, or a placeholder."""
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for name in re.findall(r"gapless (?:serve|explain|pull) +([^\s#-][^\s]*)", block):
                assert name in ALIASES or "/" in name or name in ("[MODEL]", "MODEL"), f"{page.name}: {name}"

"""The written reference is the one the definitions give."""

from __future__ import annotations

from pathlib import Path

from frontend.cli.reference import render

DOCS = Path(__file__).parents[3] / "docs"


def test_settings_page_is_current() -> None:
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == render(), "run `make docs`"

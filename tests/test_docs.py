"""Links between the pages, and the commands they name, lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench" / "RESULTS.md"]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_readme_leads_to_every_page() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if page.relative_to(ROOT).as_posix() not in text] == []

"""Every example of docs/embed.md runs as it is written, and prints what the page says it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core import text_side

PAGE = Path(__file__).parents[2] / "docs" / "embed.md"
EXAMPLES = re.findall(
    r"^## ([^\n]+)\n+```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
# What each example must print: the model is small, but it knows this.
EXPECTED = {
    "Generate for a batch": r"France is -> .*Paris.*\n(.*\n)*.*Japan is -> .*Tokyo",
    "Token ids and log-probabilities": r"^7042 -0\.\d+ rank 1 \(7042: .*\n(.*\n)*prompt: \[None, -.*\nas text: .*Paris",
    "Chat": r"\S.*\n(.*\n)*Usage\(prompt_tokens=\d+, completion_tokens=\d+",
    "Stream": r"^ 4, 5, 6, 7, 8, 9, 10, 11,\nended by ' 12' after \d+ tokens",
    "asyncio": r"France is -> .*Paris.*\n(.*\n)*.*Japan is -> .*Tokyo.*\n(.*\n)*.*(?i:hello)",
}


def test_the_page_has_the_examples_that_are_tested() -> None:
    assert [title for title, _ in EXAMPLES] == list(EXPECTED)


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_example(title: str, code: str, smollm2_path: Path) -> None:
    assert smollm2_path.is_file()  # fetched once, before the clock of an example runs
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(EXPECTED[title], done.stdout, re.MULTILINE), done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    "name", [value for key, value in vars(text_side).items() if key.isupper() and isinstance(value, str)]
)
def test_the_text_sides_module_strings_resolve(name: str) -> None:
    assert callable(text_side.lookup(name))

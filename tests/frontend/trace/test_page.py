"""The page opened in a browser: it draws everything from itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.trace.page import page
from frontend.trace.summary import summarize
from frontend.trace.timeline import build
from tests.frontend.browser import Browser, Page, find_chromium
from tests.frontend.trace.recorded import ENGINE, Tape, busy_server, one_request


def test_the_page_refers_to_nothing_outside() -> None:
    timeline = build(busy_server(1))
    text = page(timeline, summarize(timeline), "Gapless run <x> & y")
    assert "Gapless run &lt;x&gt; &amp; y" in text
    for word in ("http:", "https:", "src=", "href=", "<script", "url(", "@import", "<x>"):
        assert word not in text


def test_a_recording_with_next_to_nothing_makes_a_page() -> None:
    tape = Tape()
    timeline = build(tape.recordings())
    assert "</html>" in page(timeline, summarize(timeline), "empty")
    tape.step(1, 0.0)
    timeline = build(tape.recordings())
    assert 'id="histogram"' in page(timeline, summarize(timeline), "one step")
    tape.span(ENGINE, 22, 5000.0, 5010.0, 2)
    timeline = build(tape.recordings())
    assert "</html>" in page(timeline, summarize(timeline), "half a step")


@pytest.fixture
def opened() -> Iterator[Page]:
    with tempfile.TemporaryDirectory(prefix="gl-", ignore_cleanup_errors=True) as profile:
        browser = Browser(Path(profile))
        yield browser.new_page()
        browser.close()


@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed (apt-get install chromium)")
def test_a_browser_shows_it_and_asks_for_nothing_else(opened: Page, tmp_path: Path) -> None:
    tape = Tape()
    at, step = 0.0, 1
    for index in range(20):
        at, step = one_request(tape, index, at, tokens=10, first_step=step) + 100, step + 10
    timeline = build(tape.recordings())
    file = tmp_path / "trace.html"
    file.write_text(page(timeline, summarize(timeline), "Gapless run"), encoding="utf-8")
    opened.open(file.as_uri())
    assert opened.requests() == [file.as_uri()]
    assert opened.complaints() == []
    assert "200 steps" in opened.js("document.querySelector('.device').innerText")
    count = "document.querySelectorAll('#{} rect').length"
    assert opened.js(count.format("timeline")) > 500
    assert opened.js(count.format("waterfall")) == 20 * 7
    assert opened.js(count.format("histogram")) == 60
    assert opened.js(count.format("idle")) >= 5
    # All that is drawn lies within its picture, and the page is not wider than the window.
    outside = """[...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('rect')].filter(rect => {
        const b = rect.getBBox(), v = svg.viewBox.baseVal;
        return b.x < -1 || b.y < -1 || b.x + b.width > v.width + 1 || b.y + b.height > v.height + 1;
    })).length"""
    assert opened.js(outside) == 0
    opened.viewport(700, 900)
    assert opened.js("document.documentElement.scrollWidth <= innerWidth + 1")

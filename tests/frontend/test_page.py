"""The chat page in headless Chromium, against the real frontend."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.frontend.browser import Browser, Page, find_chromium
from tests.frontend.fake import MODEL, TOKENS, FakeServer, text_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed (apt-get install chromium)"),
]

ENTER, ESCAPE = ("Enter", 13), ("Escape", 27)
ANSWER = "document.querySelector('.turn.assistant:last-child .prose')?.innerText"
DONE = "document.querySelector('.turn.assistant:last-child .stats')?.textContent.includes('first token')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(prefix="gl-", ignore_cleanup_errors=True) as profile:
        browser = Browser(Path(profile))
        yield browser
        browser.close()


@pytest.fixture
def bare_page(browser: Browser) -> Iterator[Page]:
    """With storage of its own."""
    page = browser.new_page()
    yield page
    page.close()


@pytest.fixture
def page(bare_page: Page, server: FakeServer) -> Iterator[Page]:
    """Open and ready; afterwards: no complaint of the browser, no word to other hosts."""
    page = bare_page
    page.prefer("light")
    page.open(server.url + "/")
    page.wait("document.querySelector('#dot').classList.contains('ready')")
    yield page
    assert page.complaints() == []
    hosts = {urlsplit(url).netloc for url in page.requests() if not url.startswith(("data:", "blob:"))}
    assert hosts == {urlsplit(server.url).netloc}


def send(page: Page, text: str) -> None:
    page.type(text)
    page.press(*ENTER)


def test_type_send_and_read(page: Page, server: FakeServer) -> None:
    assert page.js("document.activeElement.id") == "input"
    assert page.js("document.querySelector('#go').disabled") is True
    page.type("first line")
    page.press(*ENTER, shift=True)
    page.type("second line")
    assert page.js("document.querySelector('#input').value") == "first line\nsecond line"
    page.press(*ENTER)
    page.wait(DONE)
    assert server.fake.last().prompt.messages == [{"role": "user", "content": "first line\nsecond line"}]  # type: ignore[union-attr]
    assert page.js("document.querySelector('.turn.user .text').textContent") == "first line\nsecond line"
    assert page.js(ANSWER) == "".join(TOKENS)
    assert "8 tokens" in page.js("document.querySelector('.turn.assistant .stats').textContent")
    assert page.js("document.querySelector('#input').value") == ""
    send(page, "and then?")
    page.wait("document.querySelectorAll('.turn').length === 4 && " + DONE)
    roles = [message["role"] for message in server.fake.last().prompt.messages]  # type: ignore[union-attr]
    assert roles == ["user", "assistant", "user"]


def test_text_appears_while_it_is_generated_and_stops(page: Page, server: FakeServer) -> None:
    for stop in (lambda: page.press(*ESCAPE), lambda: page.click("#go")):
        send(page, "/endless")
        page.wait("document.querySelector('.turn.streaming')")
        page.wait(f"({ANSWER}).length > 30")
        length = page.js(f"({ANSWER}).length")
        page.wait(f"({ANSWER}).length > {length} && document.querySelector('#go').classList.contains('stop')")
        ids = set(server.fake.last().request_ids)
        stop()
        page.wait("!document.querySelector('.turn.streaming')")
        assert server.fake.wait_for_aborts(ids)
        assert "stopped" in page.js("document.querySelector('.turn.assistant:last-child .stats').textContent")
        assert page.js("document.activeElement.id") == "input"
        assert page.js("document.querySelector('#go').getAttribute('aria-label')") == "Send"


def set_field(page: Page, name: str, value: str) -> None:
    page.js(
        f"(f => {{ f.value = {json.dumps(value)}; f.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
        f"(document.querySelector('[name={name}]'))"
    )


def test_settings_reach_the_server_and_are_remembered(page: Page, server: FakeServer) -> None:
    page.click("#open-settings")
    assert page.js("document.querySelector('#settings').open") is True
    assert page.js("document.querySelector('#model').value") == MODEL
    values = {"system": "Be brief", "temperature": "0.3", "top_k": "7", "max_tokens": "5", "seed": "11", "min_p": "0.1"}
    for name, value in values.items():
        set_field(page, name, value)
    page.press(*ESCAPE)
    page.wait("!document.querySelector('#settings').open")
    page.open(server.url + "/")
    page.wait("document.querySelector('#dot').classList.contains('ready')")
    send(page, "hello")
    page.wait(DONE)
    submit = server.fake.last()
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.3, 7, 5)
    assert (sampling.seed, sampling.min_p, sampling.top_p) == (11, 0.1, 0.95)
    assert submit.prompt.messages[0] == {"role": "system", "content": "Be brief"}  # type: ignore[union-attr]
    assert "cut at max tokens" in page.js("document.querySelector('.turn.assistant .stats').textContent")
    page.click("#open-settings")
    page.click("#reset")
    assert page.js("document.querySelector('[name=system]').value") == ""
    assert page.js("JSON.parse(localStorage['gapless.settings']).temperature") == 0.7


def test_new_chat_edit_and_regenerate(page: Page, server: FakeServer) -> None:
    send(page, "one")
    page.wait(DONE)
    send(page, "two")
    page.wait("document.querySelectorAll('.turn').length === 4 && " + DONE)
    page.click(".turn.assistant:last-child [aria-label=Regenerate]")
    page.wait("document.querySelectorAll('.turn').length === 4 && " + DONE)
    assert text_of(server.fake.last().prompt) == "two"
    page.click(".turn.user [aria-label=Edit]")
    page.wait("document.activeElement.getAttribute('aria-label') === 'Edit message'")
    page.js("document.activeElement.select()")
    send(page, "uno")
    page.wait("document.querySelectorAll('.turn').length === 2 && " + DONE)
    assert text_of(server.fake.last().prompt) == "uno"
    assert len(server.fake.last().prompt.messages) == 1  # type: ignore[union-attr]
    page.click("#new")
    assert page.js("document.querySelectorAll('.turn').length") == 0
    assert page.js("document.querySelector('#hello').hidden") is False
    page.click("#ideas button")
    page.wait(DONE)


def test_theme_follows_the_system_until_chosen(page: Page, server: FakeServer) -> None:
    theme = "document.documentElement.dataset.theme"
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.js(background)
    assert page.js(theme) == "light"
    page.prefer("dark")
    page.wait(f"{theme} === 'dark'")
    assert page.js(background) != light
    page.click("#theme")
    assert page.js(theme) == "light"
    page.open(server.url + "/")
    assert page.js(theme) == "light"
    page.wait("document.querySelector('#dot').classList.contains('ready')")


def test_no_horizontal_scroll(page: Page) -> None:
    send(page, "a very long word: " + "x" * 300)
    page.wait(DONE)
    long_code = "```\n" + "y" * 500 + "\n```\n\n|a|b|\n|-|-|\n|" + "z" * 300 + "|c|"
    page.js(f"turns.push({{role: 'assistant', content: {json.dumps(long_code)}}}); draw()")
    for width in (1200, 390, 320):
        page.viewport(width, 800, mobile=width < 600)
        for element in ("document.documentElement", "document.querySelector('#scroller')"):
            assert page.js(f"{element}.scrollWidth <= {element}.clientWidth"), (element, width)
        page.click("#open-settings")
        assert page.js("document.querySelector('#settings').getBoundingClientRect().right") <= width
        assert page.js("document.querySelector('.fields').scrollWidth <= document.querySelector('.fields').clientWidth")
        page.press(*ESCAPE)
        for selector in (".icon", "#go"):
            small = (
                f"[...document.querySelectorAll('{selector}')].filter(e => e.offsetParent && e.offsetWidth < 30).length"
            )
            assert page.js(small) == 0


def render(page: Page, text: str) -> str:
    html: str = page.js(f"fill(document.createElement('div'), {json.dumps(text)}, 0).innerHTML")
    return html


MARKDOWN = [
    ("plain", "<p>plain</p>"),
    ("a **b** *c* _d_ ~~e~~ `f`", "<p>a <strong>b</strong> <em>c</em> <em>d</em> <del>e</del> <code>f</code></p>"),
    ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
    ("# T\ntext\nmore", "<h1>T</h1><p>text<br>more</p>"),
    ("- a\n- b\n  - c", "<ul><li>a</li><li><p>b</p><ul><li>c</li></ul></li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> q\n> r", "<blockquote><p>q<br>r</p></blockquote>"),
    ("---", "<hr>"),
    ("\\*not\\*", "<p>*not*</p>"),
    ("**open and `open", "<p>**open and `open</p>"),
    ("<b>x</b> <img src=x onerror=alert(1)>", "<p>&lt;b&gt;x&lt;/b&gt; &lt;img src=x onerror=alert(1)&gt;</p>"),
    ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
    (
        "[x](https://a.example/b)",
        '<p><a href="https://a.example/b" target="_blank" rel="noopener noreferrer">x</a></p>',
    ),
]


def test_markdown(page: Page) -> None:
    for text, html in MARKDOWN:
        assert render(page, text) == html


def test_code_blocks_keep_their_text_and_copy(page: Page) -> None:
    code = 'if a < b:\n    print("<script>alert(1)</script>")\n\n    # ``done``'
    answer = f"x\n```python\n{code}\n```\ny"
    page.js(f"turns = [{{role: 'assistant', content: {json.dumps(answer)}}}]; draw()")
    assert page.js("document.querySelector('.code code').textContent") == code
    assert page.js("document.querySelector('.code span').textContent") == "python"
    page.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click(".code .copy")
    page.wait("window.copied")
    assert page.js("window.copied") == code
    page.click("[aria-label=Copy]")
    page.wait(f"window.copied === {json.dumps(answer)}")
    assert page.js("document.querySelectorAll('script').length") == 1


def test_hostile_text_renders_in_linear_time(page: Page) -> None:
    for piece in ("*", "`", "[", "_a", "**a", "> ", "- ", "|", "http://", "~~~", "\\", "(", "![x](", "1. "):
        text = piece * (100_000 // len(piece))
        page.js(f"fill(document.createElement('div'), {json.dumps(text)}, 0).childNodes.length")


def test_growing_text_renders_like_whole_text(page: Page) -> None:
    text = "# A\n\npara **b**\n\n- one\n- two\n\n```py\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> end"
    script = f"""(text => {{
        const node = document.createElement('div'), prose = new Prose(node);
        for (let i = 1; i <= text.length; i++) prose.update(text.slice(0, i));
        return node.innerHTML === fill(document.createElement('div'), text, 0).innerHTML;
    }})({json.dumps(text)})"""
    assert page.js(script) is True


def test_errors_are_shown_and_can_be_retried(bare_page: Page, server: FakeServer) -> None:
    page = bare_page
    page.open(server.url + "/")
    page.wait("document.querySelector('#dot').classList.contains('ready')")
    for prompt, words in (("/reject", "no template"), ("/fail-late", "NaN in a row")):
        send(page, prompt)
        page.wait("document.querySelector('.turn.assistant:last-child .problem')")
        assert words in page.js("document.querySelector('.turn.assistant:last-child .problem').innerText")
    assert page.js(ANSWER) == "partial"
    before = len(server.fake.submits)
    page.click(".turn.assistant:last-child .problem button")
    page.wait("document.querySelector('.turn.assistant:last-child .problem')")
    assert len(server.fake.submits) == before + 1


def test_a_key_is_asked_for_and_used(bare_page: Page, make_server: Callable[..., FakeServer]) -> None:
    server = make_server(api_key="secret")
    page = bare_page
    page.open(server.url + "/")
    page.wait("document.querySelector('#settings').open")
    page.wait("document.activeElement.name === 'key'")
    page.type("secret")
    page.press(*ESCAPE)
    page.wait("document.querySelector('#dot').classList.contains('ready')")
    send(page, "hi")
    page.wait(DONE)
    assert "secret" not in page.js("JSON.stringify(localStorage)")


def test_a_loading_server_is_waited_for(bare_page: Page, make_server: Callable[..., FakeServer]) -> None:
    server = make_server(ready=False)
    page = bare_page
    page.open(server.url + "/")
    page.wait("document.querySelector('#model-name').textContent === 'the model is loading'")
    server.fake.ready()
    page.wait("document.querySelector('#dot').classList.contains('ready')")
    assert page.js("document.querySelector('#model-name').textContent") == MODEL


def test_every_control_has_a_name(page: Page) -> None:
    send(page, "hi")
    page.wait(DONE)
    page.click("#open-settings")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = {"button", "textbox", "slider", "spinbutton", "combobox", "searchbox"}
    named = {
        node["nodeId"]: node.get("name", {}).get("value", "")
        for node in nodes
        if node.get("role", {}).get("value") in controls and not node.get("ignored")
    }
    assert len(named) > 10
    assert all(named.values()), named


def test_headers_of_the_page(server: FakeServer) -> None:
    response = httpx.get(f"{server.url}/", trust_env=False)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    for name in ("http://", "https://", "//cdn"):
        assert name not in response.text.replace("http://www.w3.org/2000/svg", "").replace("https?://", "")

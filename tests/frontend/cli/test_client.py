"""The streaming client of `run` and `chat`."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from frontend.cli.app import GROUP
from frontend.cli.client import ChatMessage, Client, ServerError
from frontend.cli.errors import CliError
from frontend.cli.settings import AnswerOptions
from tests.frontend.cli.fake_server import FakeServer

ASK = [ChatMessage("user", "Hi")]


def test_pieces_arrive_in_order_and_only_given_options_are_sent(fake_server: FakeServer) -> None:
    fake_server.answers = [["Hé", "", "llo\n", "data: x"]]
    pieces = list(Client(fake_server.url).stream_chat(ASK, AnswerOptions(temperature=0.0)))
    assert pieces == ["Hé", "llo\n", "data: x"]
    assert fake_server.bodies == [
        {
            "path": "/v1/chat/completions",
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            "temperature": 0.0,
            "max_tokens": 2048,
        }
    ]
    assert "authorization" not in fake_server.headers[0]


def test_key_and_all_options(fake_server: FakeServer) -> None:
    options = AnswerOptions(max_tokens=5, temperature=0.5, top_p=0.9)
    list(Client(fake_server.url, "secret").stream_chat(ASK, options))
    assert fake_server.headers[0]["authorization"] == "Bearer secret"
    assert {key: fake_server.bodies[0][key] for key in ("max_tokens", "temperature", "top_p")} == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
    }


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_forms_of_the_url(fake_server: FakeServer, form: str) -> None:
    for url in (fake_server.url, fake_server.url.removeprefix("http://")):
        assert list(Client(form.format(url)).stream_chat(ASK, AnswerOptions())) == ["Hel", "lo"]
    assert {body["path"] for body in fake_server.bodies} == {"/v1/chat/completions"}


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "http://127.0.0.1:x"])
def test_no_url(url: str) -> None:
    with pytest.raises(CliError, match="url must be http"):
        Client(url)


def test_a_refusal_is_told_in_the_servers_words(fake_server: FakeServer) -> None:
    fake_server.refusal = (400, {"error": {"message": "temperature must be a number", "type": "x"}})
    with pytest.raises(ServerError, match=r"^temperature must be a number$"):
        list(Client(fake_server.url).stream_chat(ASK, AnswerOptions()))
    fake_server.refusal = (502, {})
    with pytest.raises(ServerError, match=r"^HTTP status 502$"):
        list(Client(fake_server.url).stream_chat(ASK, AnswerOptions()))


def test_a_stream_that_breaks_off_is_an_error(fake_server: FakeServer) -> None:
    fake_server.break_off = True
    got: list[str] = []
    with pytest.raises(ServerError, match="in the middle of the answer"):
        got.extend(Client(fake_server.url).stream_chat(ASK, AnswerOptions()))
    assert got == ["Hel", "lo"]


def test_what_is_no_text_cannot_be_sent(fake_server: FakeServer) -> None:
    """As an argument with bytes of another encoding would bring it."""
    with pytest.raises(ServerError, match="cannot send this"):
        list(Client(fake_server.url).stream_chat([ChatMessage("user", "a\udcff")], AnswerOptions()))


def test_nobody_there() -> None:
    with pytest.raises(ServerError, match=r"no answer from http://127\.0\.0\.1:9: .*refused"):
        list(Client("http://127.0.0.1:9").stream_chat(ASK, AnswerOptions()))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_what_to_do_about_a_server_that_is_not_there(host: str) -> None:
    """Of each command that talks to one."""
    said = []
    for command in (["run", "--url", f"http://{host}:9", "Hi"], ["top", f"http://{host}:9"],
                    ["bench", "serve", "--num-prompts", "1", "--url", f"http://{host}:9"]):  # fmt: skip
        done = CliRunner().invoke(GROUP, command)
        assert isinstance(done.exception, CliError), done.output
        said.append(str(done.exception))
    hows = ("--url", "`gapless top URL`", "--url")
    for text, how in zip(said, hows, strict=True):
        assert text.endswith(f"start a server with `gapless serve`, or name one with {how}")


def test_what_to_do_about_a_server_without_tls(fake_server: FakeServer) -> None:
    url = fake_server.url.replace("http:", "https:")
    for command in (["run", "--url", url, "Hi"], ["top", url], ["bench", "serve", "--num-prompts", "1", "--url", url]):
        done = CliRunner().invoke(GROUP, command)
        assert isinstance(done.exception, CliError), done.output
        assert str(done.exception).endswith("try http://")


def test_closing_the_iterator_leaves_the_server(fake_server: FakeServer) -> None:
    fake_server.answers, fake_server.hold_after = [["one", "two"]], 1
    pieces = Client(fake_server.url).stream_chat(ASK, AnswerOptions())
    assert next(pieces) == "one"
    pieces.close()  # type: ignore[attr-defined]
    assert fake_server.client_left.wait(30)

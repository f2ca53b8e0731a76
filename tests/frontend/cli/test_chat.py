"""`gapless chat`: the loop with plain input, and the real program on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.cli.chat import Chat, Conversation, history_path
from frontend.cli.client import ChatMessage, Client
from frontend.cli.settings import AnswerOptions
from tests.frontend.cli.fake_server import FakeServer


def talk(server: FakeServer, *lines: str | type[BaseException], system: str | None = None) -> Chat:
    script = iter([*lines, EOFError])

    def read() -> str:
        line = next(script)
        if isinstance(line, str):
            return line
        raise line

    chat = Chat(Client(server.url), AnswerOptions(system=system), read)
    chat.run()
    return chat


def sent(server: FakeServer) -> list[list[str]]:
    return [[f"{message['role']}: {message['content']}" for message in body["messages"]] for body in server.bodies]


def test_turns_build_on_each_other(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.answers = [["one"], ["two"]]
    talk(fake_server, "first\n", "  \n", "second\n", system="Be kind.")
    assert sent(fake_server) == [
        ["system: Be kind.", "user: first"],
        ["system: Be kind.", "user: first", "assistant: one", "user: second"],
    ]
    assert capsys.readouterr().out == "one\ntwo\n"


def test_new_system_and_retry(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.answers = [["one"], ["two"], ["three"]]
    chat = talk(fake_server, "/retry", "first", "/retry", "/new", "/system Be brief.", "/system", "second")
    assert sent(fake_server) == [["user: first"], ["user: first"], ["system: Be brief.", "user: second"]]
    assert chat.conversation.turns == [ChatMessage("user", "second"), ChatMessage("assistant", "three")]
    out = capsys.readouterr().out
    assert "(nothing to answer again)" in out
    assert out.count("(system: Be brief.)") == 2


def test_help_lists_the_commands_and_an_unknown_one_says_so(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(fake_server, "/help", "/nope", "/exit", "never sent")
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in ("/new", "/system", "/retry", "/help", "/exit"))
    assert "no command /nope" in out
    assert fake_server.bodies == []


def test_a_refused_turn_leaves_no_trace(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.refusal = (400, {"error": {"message": "too long"}})
    assert talk(fake_server, "first").conversation.turns == []
    assert "error: too long" in capsys.readouterr().err


def test_ctrl_c_at_the_prompt_goes_on(fake_server: FakeServer) -> None:
    talk(fake_server, KeyboardInterrupt, "first")
    assert sent(fake_server) == [["user: first"]]


def test_an_answer_that_brought_nothing_is_not_kept() -> None:
    conversation = Conversation(None)
    conversation.add("first", "")
    assert conversation.turns == []
    assert conversation.drop_last() is None


class Terminal:
    """The program on a terminal of its own: what it shows, without the escape sequences."""

    def __init__(self, words: list[str]) -> None:
        self._fd, child = pty.openpty()
        environ = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frontend.cli", *words],
            stdin=child,
            stdout=child,
            stderr=child,
            env=environ,
            start_new_session=True,
        )
        os.close(child)
        self.shown = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Wait until `text` is shown, after all that was waited for before."""
        deadline = time.monotonic() + 60
        while (found := self._plain().find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self._plain()[self._seen :]!r}"
            if select.select([self._fd], [], [], 0.2)[0]:
                self._read()
        self._seen = found + len(text)

    def _plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]", "", self.shown)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536).decode(errors="replace")
        except OSError:  # the program is gone
            return
        self.shown += data
        if "\x1b[6n" in data:  # prompt_toolkit asks where the cursor is
            self.type("\x1b[1;1R")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(fake_server: FakeServer) -> Iterator[Terminal]:
    opened = Terminal(["chat", "--url", fake_server.url])
    yield opened
    opened.close()


def test_on_a_terminal(fake_server: FakeServer, terminal: Terminal) -> None:
    fake_server.answers = [["The ", "answer\x1b[2J."]]
    terminal.wait_for(">>>")
    for keys in ("Hello\r", "a\x1b\rb\r", "\x1b[A\r"):  # Alt+Enter starts a line, Up brings the last message back
        terminal.type(keys)
        terminal.wait_for("The answer[2J.")
        terminal.wait_for(">>>")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    asked = [body["messages"][-1]["content"] for body in fake_server.bodies]
    assert asked == ["Hello", "a\nb", "a\nb"]
    history = history_path()
    assert "+Hello\n" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_ctrl_c_stops_the_answer_and_not_the_program(fake_server: FakeServer, terminal: Terminal) -> None:
    fake_server.answers, fake_server.hold_after = [["begun", "never"]], 1
    terminal.wait_for(">>>")
    terminal.type("Hello\r")
    terminal.wait_for("begun")
    assert fake_server.holding.wait(60)
    terminal.interrupt()
    terminal.wait_for("(stopped)")
    assert fake_server.client_left.wait(30)
    fake_server.answers, fake_server.hold_after = [["second answer"]], None
    terminal.wait_for(">>>")
    terminal.type("Again\r")
    terminal.wait_for("second answer")
    assert sent(fake_server)[1] == ["user: Hello", "assistant: begun", "user: Again"]
    terminal.type("/exit\r")
    assert terminal.process.wait(60) == 0


def test_history_goes_where_state_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "gapless" / "chat_history"

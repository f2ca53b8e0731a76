"""What a model says reaches the terminal without steering it."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from frontend.cli.progress import Reporter
from frontend.cli.terminal import Stopped, print_answer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_the_exact_text_and_a_newline() -> None:
    out = io.StringIO()
    assert print_answer(iter(["a\x1b[31m", "b"]), out) == "a\x1b[31mb"
    assert out.getvalue() == "a\x1b[31mb\n"


def test_a_terminal_gets_no_control_characters() -> None:
    out = Terminal()
    said = "\x1b]0;title\x07\x1b[2J\x9b1mx\r\ty\n"
    assert print_answer(iter([said]), out) == said
    assert out.getvalue() == "]0;title[2J1mx\ty\n"


def test_no_second_newline_and_one_for_an_empty_answer() -> None:
    out = io.StringIO()
    print_answer(iter(["a\n"]), out)
    print_answer(iter([]), out)
    assert out.getvalue() == "a\n\n"


def test_ctrl_c_keeps_what_came_and_closes_the_stream() -> None:
    closed = []

    def pieces() -> Iterator[str]:
        try:
            yield "half"
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    out = io.StringIO()
    with pytest.raises(Stopped) as stopped:
        print_answer(pieces(), out)
    assert (stopped.value.text, out.getvalue(), closed) == ("half", "half\n", [True])


def test_progress_in_a_log_is_one_line_per_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("frontend.cli.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    with Reporter(out) as reporter:
        for step in range(101):
            reporter.progress("loading weights", step / 100, lane="engine_core")
            reporter.progress("loading the vocabulary", None, lane="tokenizer_proc")
            now[0] += 0.125
        reporter.line("a word")
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["engine_core: loading weights", "tokenizer_proc: loading the vocabulary"]
    assert lines[-1] == "a word"
    assert [line.rpartition(" ")[2] for line in lines[2:-1]] == ["40%", "80%"]


def test_progress_on_a_terminal_is_cleared_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Reporter(out) as reporter:
        reporter.progress("loading weights", 0.25, lane="engine_core")
        reporter.progress("measuring memory", None, lane="engine_core")
        reporter.line("engine_core: [odd] words")
    text = out.getvalue()
    assert "engine_core: [odd] words" in text
    assert "measuring memory" in text
    assert text.endswith("\x1b[2K") or "\x1b[?25h" in text

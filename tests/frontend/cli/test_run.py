"""`gapless run` and the small commands, through the real entry point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from frontend.cli.models import SMOLLM2, models_dir
from frontend.cli.run import split_words
from tests.frontend.cli.fake_server import FakeServer

GAPLESS = [sys.executable, "-m", "frontend.cli"]


def gapless(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GAPLESS, *words], input=text, capture_output=True, text=True, check=False, timeout=120)


def test_which_word_is_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("")
    assert split_words([]) == (None, None)
    assert split_words(["Why?"]) == (None, "Why?")
    assert split_words(["smollm2"]) == ("smollm2", None)
    assert split_words([str(tmp_path)]) == (str(tmp_path), None)
    assert split_words(["m.gguf"]) == ("m.gguf", None)
    assert split_words(["org/model", "Why?"]) == ("org/model", "Why?")
    with pytest.raises(click.UsageError, match="put the prompt in quotes"):
        split_words(["Why", "is", "it"])


def test_run_streams_an_answer(fake_server: FakeServer) -> None:
    done = gapless("run", "Why?", "--url", fake_server.url, "--max-tokens", "7", "--system", "Be kind.")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello\n", "")
    assert fake_server.bodies[0]["max_tokens"] == 7
    assert fake_server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Why?"},
    ]


def test_a_model_that_is_named_is_asked_for(fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has another one says so; the model of the settings is what would be started, and is not sent."""
    monkeypatch.setenv("GAPLESS_MODEL", "of-the-settings")
    gapless("run", "Why?", "--url", fake_server.url)
    gapless("run", "smollm3", "Why?", "--url", fake_server.url)
    gapless("chat", "smollm3", "--url", fake_server.url, text="Why?\n")
    assert [body.get("model") for body in fake_server.bodies] == [None, "smollm3", "smollm3"]
    fake_server.refusal = (404, {"error": {"message": "there is no model 'smollm3'"}})
    done = gapless("run", "smollm3", "Why?", "--url", fake_server.url)
    assert (done.returncode, done.stderr) == (1, "error: there is no model 'smollm3'\n")


def test_an_answer_has_an_end_and_says_when_it_was_cut(fake_server: FakeServer) -> None:
    done = gapless("run", "Why?", "--url", fake_server.url)
    assert (done.stdout, done.stderr) == ("Hello\n", "")
    assert fake_server.bodies[0]["max_tokens"] == 2048
    fake_server.finish_reason = "length"
    done = gapless("run", "Why?", "--url", fake_server.url)
    assert (done.returncode, done.stdout) == (0, "Hello\n")
    assert done.stderr == "(cut off where --max-tokens or the model's context ends)\n"
    done = gapless("chat", "--url", fake_server.url, text="Why?\n")
    assert (done.returncode, done.stdout) == (0, "Hello\n")
    assert done.stderr == "(cut off where --max-tokens or the model's context ends)\n"


def test_piped_text_is_added_or_is_the_prompt(fake_server: FakeServer) -> None:
    gapless("run", "Summarize:", "--url", fake_server.url, text="line one\nline two\n")
    gapless("run", "--url", fake_server.url, text="alone\n")
    said = [body["messages"][0]["content"] for body in fake_server.bodies]
    assert said == ["Summarize:\n\nline one\nline two", "alone"]


def test_nothing_to_answer(fake_server: FakeServer) -> None:
    done = gapless("run", "--url", fake_server.url)
    assert done.returncode == 2
    assert "no prompt" in done.stderr
    assert fake_server.bodies == []


def test_a_refusal_ends_in_one_line_and_status_1(fake_server: FakeServer) -> None:
    fake_server.refusal = (400, {"error": {"message": "the prompt is too long"}})
    done = gapless("run", "Why?", "--url", fake_server.url)
    assert (done.returncode, done.stderr) == (1, "error: the prompt is too long\n")


def test_ctrl_c_ends_run_with_130_and_leaves_the_server(fake_server: FakeServer) -> None:
    fake_server.answers, fake_server.hold_after = [["one", "two"]], 1
    process = subprocess.Popen(
        [*GAPLESS, "run", "Why?", "--url", fake_server.url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert fake_server.holding.wait(60)
    assert process.stdout is not None
    assert process.stdout.read(3) == b"one"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, b"\n", b"")
    assert fake_server.client_left.wait(30)


def test_a_wrong_setting_ends_before_anything_starts() -> None:
    done = gapless("serve", "--port", "70000")
    assert done.returncode == 2
    assert done.stderr == "error: port must be an integer between 0 and 65535, got '70000' (from --port)\n"


def test_an_unknown_model_ends_before_anything_starts() -> None:
    done = gapless("serve", "smollm")
    assert done.returncode == 1
    assert done.stderr.startswith("error: unknown model 'smollm'; did you mean smollm2?\n")


def test_list_before_and_after(smollm2_path: Path) -> None:
    assert gapless("list").stdout.startswith("No model is cached yet.")
    folder = models_dir()
    folder.mkdir(parents=True)
    (folder / SMOLLM2.file_name).symlink_to(smollm2_path)
    head, row = gapless("list").stdout.splitlines()
    assert head.split() == ["NAME", "SIZE", "FORMAT", "PATH"]
    assert row.split() == ["smollm2:135m", "98.4", "MB", "gguf", str(folder / SMOLLM2.file_name)]
    assert gapless("pull", "smollm2").stdout == f"{SMOLLM2.title} (gguf) is at {folder / SMOLLM2.file_name}\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    read_end, write_end = os.pipe()
    process = subprocess.Popen([*GAPLESS, "list"], stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    os.close(read_end)
    _, err = process.communicate(timeout=60)
    assert b"Traceback" not in err
    assert process.returncode == 1


def test_version() -> None:
    done = gapless("version")
    assert done.returncode == 0
    assert done.stdout.startswith("gapless ")

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from frontend.cli.errors import CliError
from frontend.cli.trace import COMMAND
from ipc.recorder import events, runs
from ipc.recorder.events import name_words
from ipc.recorder.store import About, Clock, state_directory, write_about
from tests.frontend.trace import trace_format
from tests.frontend.trace.recorded import ENGINE, FRONTEND, Tape, one_request, ring_bytes

CLIENT_ID = "chatcmpl-00112233445566778899aabbccddeeff"


@pytest.fixture(autouse=True)
def no_other_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Servers that run beside the tests are not seen."""
    monkeypatch.setattr(runs, "base_directory", lambda: tmp_path)
    monkeypatch.setattr(runs, "SHARED_MEMORY", tmp_path)


def keep(name: str, tape: Tape, about: About | None = None) -> None:
    """Leave the tape as a past run, in the files that the processes would have written."""
    folder = state_directory() / name
    folder.mkdir(parents=True)
    for recording in tape.recordings():
        (folder / f"{recording.name}-{recording.pid}.ring").write_bytes(ring_bytes(recording))
    write_about(folder, about or About("smollm2", 1_750_000_000.0))


def one_step() -> Tape:
    tape = Tape()
    tape.step(1, 0.0)
    return tape


def two_requests() -> Tape:
    tape = Tape()
    end = one_request(tape, 1, at=0.0)
    one_request(tape, 3, at=end + 2_000_000, tokens=4, first_step=4)
    tape.mark(FRONTEND, events.NAMED, end + 2_000_102, 3, *name_words(CLIENT_ID), 1)
    return tape


def trace(*args: str) -> Result:
    return CliRunner().invoke(COMMAND, list(args), catch_exceptions=True)


def failure(*args: str) -> str:
    error = trace(*args).exception
    assert isinstance(error, CliError)
    return str(error)


def test_tables_of_the_newest_run() -> None:
    keep("20250101-000000-old", one_step())
    keep("20250615-000000-new", two_requests(), About("smollm2", 1_760_000_000.0))
    result = trace()
    assert result.exit_code == 0, result.exception
    text = result.output
    assert "run 20250615-000000-new, ended, model smollm2" in text
    assert "GPU of engine_core: 7 steps" in text
    assert "without requests left out" in text
    assert "GPU idle: what it waited for" in text
    for word in ("schedule", "launch", "engine", "encode", "p50", "p99", "prefill", "detok."):
        assert word in text
    assert "20+3" in text
    assert "20+4" in text


def test_files_for_perfetto_and_the_browser(tmp_path: Path) -> None:
    keep("20250615-000000-new", two_requests())
    out, html = tmp_path / "trace.json", tmp_path / "page.html"
    result = trace("-o", str(out), "--html", str(html))
    assert result.exit_code == 0, result.exception
    trace_format.check(json.loads(out.read_bytes()), 3e6)
    assert "Gapless run 20250615-000000-new" in html.read_text(encoding="utf-8")
    assert str(out) in result.output
    assert "cannot write" in failure("-o", str(tmp_path / "no" / "where.json"))


def test_a_file_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    for option in ("-o", "--html"):
        assert "cannot write" in failure(option, str(tmp_path / "no" / "where"))  # not: that there is no run


def test_the_last_of_it() -> None:
    keep("20250615-000000-new", two_requests())
    assert "GPU of engine_core: 4 steps" in trace("--last", "1s").output
    assert "GPU of engine_core: 7 steps" in trace("--last", "1m").output
    assert trace("--last", "soon").exit_code == trace("--last", "0s").exit_code == 2


@pytest.mark.parametrize("busy", ["nobody", FRONTEND, ENGINE])
def test_a_time_without_steps_is_told(busy: str, tmp_path: Path) -> None:
    tape = two_requests()
    tape.span(ENGINE, events.WAIT, 5_000_000, 59_000_000)
    if busy == FRONTEND:
        tape.span(FRONTEND, events.DELIVER, 59_500_000, 59_500_010, 0, 1)
    elif busy == ENGINE:  # which planned a step that did not come to its device
        tape.span(ENGINE, events.SCHEDULE, 59_500_000, 59_500_010, 9)
    tape.mark(FRONTEND, events.NAMED, 60_000_000, 9, 1, 2, 1)
    keep("20250615-000000-new", tape)
    out, html = tmp_path / "trace.json", tmp_path / "page.html"
    result = trace("--last", "900ms", "-o", str(out), "--html", str(html))
    assert result.exit_code == 0, result.exception
    assert "no steps in this time" in result.output
    assert "0 steps" not in result.output
    json.loads(out.read_bytes())
    assert "no steps" not in trace().output


@pytest.mark.parametrize("wanted", ["3", CLIENT_ID, CLIENT_ID[9:], CLIENT_ID[9:17]])
def test_one_request_by_our_number_or_the_clients_id(wanted: str) -> None:
    keep("20250615-000000-new", two_requests())
    result = trace("--request", wanted)
    assert result.exit_code == 0, result.exception
    assert "GPU of engine_core: 4 steps" in result.output
    assert "20+4" in result.output
    assert "20+3" not in result.output


def test_a_request_that_is_not_there() -> None:
    keep("20250615-000000-new", two_requests())
    assert "'nonsense' is not in the recording" in failure("--request", "nonsense")


def test_runs_by_name() -> None:
    assert "no run has left a recording" in failure()
    keep("20250101-000000-aaaa", one_step())
    keep("20250101-000000-bbbb", two_requests())
    assert "1 steps" in trace("aaaa").output
    assert "several runs match '20250101'" in failure("20250101")
    assert "no run is called 'zzzz'" in failure("zzzz")
    listed = trace("--list").output
    assert "20250101-000000-aaaa  ended" in listed
    assert listed.count("\n") == 2


def test_an_empty_recording_is_named() -> None:
    (state_directory() / "20250101-000000-empty").mkdir(parents=True)
    assert "is empty" in failure()


def test_a_clock_that_differs_is_told() -> None:
    now = time.monotonic_ns()
    clocks = {"engine_core": Clock(1, now, now - 10**9, now + 10**6)}
    keep("20250615-000000-new", two_requests(), About("m", 1.0, "", clocks))
    assert "the clock of engine_core is not the supervisor's" in trace().output

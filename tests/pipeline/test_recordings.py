"""What the flight recorders of real processes leave behind, however the server ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.trace.chrome import chrome_trace
from frontend.trace.summary import summarize
from frontend.trace.timeline import build
from ipc.recorder.events import COMMIT, DECODE, DELIVER, ENCODE, FINISHED, FIRST_TOKEN, GPU, PARSE, PUBLISH, WRITE
from ipc.recorder.reader import Recording, read_rings
from ipc.recorder.store import read_about, run_name
from tests.frontend.trace import trace_format

from .conftest import DEADLINE_S, ROOT, eventually

NAMES = {"frontend", "tokenizer_proc", "engine_core", "detokenizer_proc"}

pytestmark = pytest.mark.model


def answer(run: Any, tokens: int = 5) -> None:
    """One answer, and wait until each process has recorded its part: the client hears of it a moment before."""
    url = run.events[-1]["facts"]["frontend"]["url"]
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).raise_for_status()
    eventually(lambda: written(read_rings(run.run_dir / "recordings")), "the end of the answer in the recordings")


def written(recordings: list[Recording]) -> bool:
    ends = {record.code: record.end for recording in recordings for record in recording.records}
    return ends.get(WRITE, 0) > ends.get(GPU, 0) and PUBLISH in ends and ends[PUBLISH] > ends[GPU]


def kept(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "state" / "gapless" / "runs").iterdir()
    return folder


def check(recordings: list[Recording]) -> None:
    """One answer of five tokens is in there, from end to end."""
    by_name = {recording.name: recording.records for recording in recordings}
    assert by_name.keys() == NAMES
    codes = {name: [record.code for record in records] for name, records in by_name.items()}
    assert codes["frontend"].count(PARSE) == 1
    assert 1 <= codes["frontend"].count(WRITE) <= 5  # what has queued up goes out together
    assert codes["frontend"].count(DELIVER) >= 1
    assert codes["tokenizer_proc"].count(ENCODE) == 1
    assert codes["detokenizer_proc"].count(DECODE) == 5
    assert codes["engine_core"].count(FIRST_TOKEN) == codes["engine_core"].count(FINISHED) == 1
    assert codes["engine_core"].count(PUBLISH) == codes["engine_core"].count(COMMIT) == 5
    gpu = [record for record in by_name["engine_core"] if record.code == GPU and record.id]
    assert [record.id for record in gpu] == [1, 2, 3, 4, 5]
    (parse,) = (record for record in by_name["frontend"] if record.code == PARSE)
    (encode,) = (record for record in by_name["tokenizer_proc"] if record.code == ENCODE)
    last = [record for record in by_name["frontend"] if record.code == WRITE][-1]
    assert parse.begin < parse.end <= encode.begin < encode.end <= gpu[0].begin < gpu[-1].end < last.end
    assert all(recording.torn == 0 for recording in recordings)
    check_trace(recordings)


def check_trace(recordings: list[Recording]) -> None:
    timeline = build(recordings)
    trace_format.check(chrome_trace(timeline), (timeline.end - timeline.begin) / 1000)
    (request,) = timeline.requests
    assert (request.complete, request.output_tokens) == (True, 5)
    stages = request.stages()
    assert sum(stages.values()) == request.total
    assert all(stages[name] > 0 for name in ("parse", "tokenize", "queue", "prefill", "decode", "detokenize", "write"))
    assert {pid for pid, _ in request.path} == {recording.pid for recording in recordings}
    (engine,) = summarize(timeline).engines
    assert (engine.device, engine.steps) == ("compute", 5)
    assert engine.busy + engine.idle_total + engine.no_requests == engine.span


def test_a_clean_stop_keeps_the_recording_on_disk(real: Callable[..., Any], tmp_path: Path) -> None:
    run = real()
    run.wait_for("ready")
    answer(run)
    live = (run.run_dir / "recordings").resolve()
    check(read_rings(live))
    about = read_about(live)
    assert about.clocks.keys() == NAMES
    assert all(clock.agrees and clock.bound_us < 120e6 for clock in about.clocks.values())
    check_command(run, tmp_path, "running", run_name(live, run.run_dir))
    run.process.send_signal(signal.SIGTERM)
    assert run.exit_code() == 0
    run.assert_nothing_left()
    check(read_rings(kept(tmp_path)))
    check_command(run, tmp_path, "ended", kept(tmp_path).name)


def check_command(run: Any, tmp_path: Path, state: str, name: str) -> None:
    """`gapless trace`, asked as a user does. By name: other servers of this user may be running."""
    env = os.environ | {"XDG_RUNTIME_DIR": str(run.base), "XDG_STATE_HOME": str(tmp_path / "state")}
    out, html = tmp_path / f"{state}.json", tmp_path / f"{state}.html"
    command = [sys.executable, "-m", "frontend.cli", "trace", name, "-o", str(out), "--html", str(html)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f", {state}, model " in done.stdout
    assert "compute of engine_core: 5 steps" in done.stdout
    trace_format.check(json.loads(out.read_bytes()), 1e9)
    assert "5 steps in" in html.read_text(encoding="utf-8")


@pytest.mark.parametrize("victim", ["engine_core", "frontend"])
def test_a_process_that_is_killed_leaves_what_it_recorded(
    real: Callable[..., Any], tmp_path: Path, victim: str
) -> None:
    run = real()
    run.wait_for("ready")
    answer(run)
    os.kill(run.pids[victim], signal.SIGKILL)
    run.wait_for("failed")
    run.exit_code()
    run.assert_nothing_left()
    check(read_rings(kept(tmp_path)))


def test_so_does_a_server_whose_supervisor_is_killed(real: Callable[..., Any], tmp_path: Path) -> None:
    run = real()
    run.wait_for("ready")
    answer(run)
    run.process.kill()
    run.assert_nothing_left()
    eventually(lambda: len(read_rings(kept(tmp_path))) == 4, "four recordings")
    check(read_rings(kept(tmp_path)))


def test_long_prompts_of_clients_that_left_are_not_encoded(real: Callable[..., Any]) -> None:
    run = real()
    run.wait_for("ready")
    url = run.events[-1]["facts"]["frontend"]["url"]
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    body = json.dumps({"prompt": "hello world " * 50_000, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)

    def count(process: str, code: int) -> int:
        (recording,) = (r for r in read_rings(run.run_dir / "recordings") if r.name == process)
        return sum(record.code == code for record in recording.records)

    clients = [socket.create_connection(address) for _ in range(8)]
    for client in clients:
        client.sendall(head + body)
    eventually(lambda: count("frontend", PARSE) == len(clients), "all bodies parsed")
    for client in clients:
        client.close()
    assert httpx.post(f"{url}/v1/completions", content=body, timeout=DEADLINE_S).status_code == 400  # behind them
    assert 1 <= count("tokenizer_proc", ENCODE) < len(clients)

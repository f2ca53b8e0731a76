"""Start, death and end of the processes, with fakes in the places of the real four."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import alive, eventually

NAMES = ("frontend", "tokenizer_proc", "engine_core", "detokenizer_proc")


class Fakes:
    """Launch the fakes with given behaviours and read the journal they keep together."""

    def __init__(self, launch: Callable[[dict[str, Any]], Any], journal: Path) -> None:
        self._launch, self._journal = launch, journal

    def start(self, grace_s: float = 60.0, **behaviours: str) -> Any:
        fake = {"journal": str(self._journal), "behaviours": behaviours, "grace_s": grace_s}
        return self._launch({"fake": fake})

    @property
    def journal(self) -> list[str]:
        return self._journal.read_text().splitlines()


@pytest.fixture
def fakes(launch: Callable[[dict[str, Any]], Any], tmp_path: Path) -> Fakes:
    return Fakes(launch, tmp_path / "journal.txt")


def test_ready_carries_facts_and_the_detokenizer_waits_for_the_tokenizer(fakes: Fakes) -> None:
    run = fakes.start()
    ready = run.wait_for("ready")
    assert ready["facts"]["engine_core"] == {"max_model_len": 77, "vocab_size": 99}
    assert "warming up" in ready["seconds"]["engine_core"]
    assert {(event["name"], event["fraction"]) for event in run.events if event["event"] == "progress"} >= {
        (name, 1.0) for name in NAMES
    }
    run.process.send_signal(signal.SIGINT)
    assert run.exit_code() == 0
    journal = fakes.journal
    assert journal.index("tokenizer_proc Ready") < journal.index(
        "detokenizer_proc started {'tokenizer_proc': {'tokenizer_json': 'here.json'}}"
    )
    assert "frontend ModelReady 77 99" in journal
    assert not any("ProcessLost" in line for line in journal)


def test_titles_groups_and_permissions(fakes: Fakes) -> None:
    run = fakes.start()
    run.wait_for("ready")
    for name, pid in run.pids.items():
        assert psutil.Process(pid).cmdline()[0].rstrip() == f"gapless: {name}"
        # The terminal signals the launcher's group; the children are not in it.
        assert os.getpgid(pid) != os.getpgid(run.process.pid)
    assert stat.S_IMODE(run.run_dir.stat().st_mode) == 0o700
    recordings = run.run_dir / "recordings"
    assert stat.S_IMODE(recordings.stat().st_mode) == 0o700
    assert {name.rpartition("-")[0] for name in os.listdir(recordings) if name.endswith(".ring")} == set(run.pids)
    files = sorted(path for path in run.run_dir.iterdir() if path != recordings)
    assert {file.name for file in files} >= {"lock", "supervisor.sock", "engine.sock", "engine_core.json"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    os.kill(run.pids["engine_core"], signal.SIGINT)  # ignored
    run.process.send_signal(signal.SIGTERM)
    assert run.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_in_order_and_leaves_nothing(fakes: Fakes, number: signal.Signals) -> None:
    run = fakes.start()
    run.wait_for("ready")
    run.process.send_signal(number)
    run.wait_for("stopped")
    assert run.exit_code() == 0
    run.assert_nothing_left()
    assert [line for line in fakes.journal if line.endswith("stopped")] == [f"{name} stopped" for name in NAMES]


@pytest.mark.parametrize("victim", NAMES)
def test_death_of_one_is_told_to_the_frontend_and_ends_all(fakes: Fakes, victim: str) -> None:
    run = fakes.start()
    run.wait_for("ready")
    os.kill(run.pids[victim], signal.SIGKILL)
    failure = run.wait_for("failed")
    assert failure["name"] == victim
    assert failure["cause"].startswith("was killed by SIGKILL")
    assert run.exit_code() == 1
    run.assert_nothing_left()
    lost = [line for line in fakes.journal if "ProcessLost" in line]
    if victim == "frontend":
        assert lost == []
    else:
        assert len(lost) == 1
        assert lost[0].startswith(f"frontend ProcessLost {victim} was killed by SIGKILL")
    assert [line for line in fakes.journal if line.endswith("stopped")] == [
        f"{name} stopped" for name in NAMES if name != victim
    ]


def test_a_child_that_ends_by_sigterm_is_a_loss_too(fakes: Fakes) -> None:
    run = fakes.start()
    run.wait_for("ready")
    os.kill(run.pids["tokenizer_proc"], signal.SIGTERM)
    failure = run.wait_for("failed")
    assert (failure["name"], failure["cause"]) == ("tokenizer_proc", "exited with code 0")
    run.assert_nothing_left()


def test_death_of_the_supervisor_is_noticed_by_all(fakes: Fakes) -> None:
    run = fakes.start(engine_core="deaf")
    run.wait_for("ready")
    run.process.kill()
    run.assert_nothing_left()


def test_death_of_the_supervisor_during_the_start(fakes: Fakes) -> None:
    run = fakes.start(engine_core="never_ready")
    run.wait_for("progress")
    run.find_children(3)
    run.process.kill()
    run.assert_nothing_left()


def test_a_stop_during_the_start(fakes: Fakes) -> None:
    run = fakes.start(engine_core="never_ready")
    run.wait_for("progress")
    run.find_children(3)
    run.process.send_signal(signal.SIGINT)
    run.wait_for("stopped")
    assert run.exit_code() == 0
    run.assert_nothing_left()


def test_a_users_error_has_no_traceback(fakes: Fakes) -> None:
    run = fakes.start(engine_core="user_error")
    failure = run.wait_for("failed")
    assert failure == {
        "event": "failed",
        "name": "engine_core",
        "cause": "the flux capacitor is missing; install one",
        "lines": [],
    }
    assert run.exit_code() == 1
    assert "Traceback" not in run.stderr
    run.assert_nothing_left()


def test_a_bug_shows_its_traceback_as_the_cause(fakes: Fakes) -> None:
    run = fakes.start(tokenizer_proc="bug")
    failure = run.wait_for("failed")
    assert (failure["name"], failure["cause"]) == ("tokenizer_proc", "exited with code 1 while starting")
    assert failure["lines"][-1] == "RuntimeError: a bug in the flux capacitor"
    assert "tokenizer_proc: RuntimeError: a bug in the flux capacitor" in run.stderr
    run.assert_nothing_left()


def test_the_last_words_of_a_silent_death(fakes: Fakes) -> None:
    run = fakes.start(frontend="exit_3")
    failure = run.wait_for("failed")
    assert (failure["cause"], failure["lines"]) == ("exited with code 3 while starting", ["last words"])
    run.assert_nothing_left()


def test_a_child_that_does_not_stop_is_killed(fakes: Fakes) -> None:
    run = fakes.start(grace_s=1.0, detokenizer_proc="deaf")
    run.wait_for("ready")
    run.process.send_signal(signal.SIGTERM)
    assert run.exit_code() == 0
    assert "detokenizer_proc: did not stop within 1 s: killed" in run.stderr
    run.assert_nothing_left()


def test_a_stopped_child_does_not_hold_up_the_end(fakes: Fakes) -> None:
    run = fakes.start(grace_s=1.0)
    run.wait_for("ready")
    os.kill(run.pids["frontend"], signal.SIGSTOP)
    os.kill(run.pids["engine_core"], signal.SIGKILL)
    assert run.wait_for("failed")["name"] == "engine_core"
    assert run.exit_code() == 1
    run.assert_nothing_left()


def test_a_second_signal_hurries(fakes: Fakes) -> None:
    run = fakes.start(grace_s=3600.0, frontend="deaf", engine_core="deaf")
    run.wait_for("ready")

    def ended_by_another() -> bool:
        run.process.send_signal(signal.SIGINT)  # repeated: two in one moment may count as one
        return not alive(run.pids["frontend"])

    eventually(ended_by_another, "the end of the first that does not listen")
    assert run.exit_code() == 0
    run.assert_nothing_left()


def test_much_output_neither_blocks_nor_is_kept(fakes: Fakes) -> None:
    run = fakes.start(engine_core="noisy")
    run.wait_for("ready")
    run.process.send_signal(signal.SIGINT)
    assert run.exit_code() == 0
    assert "engine_core: end of the noise" in run.stderr.splitlines()
    assert max(map(len, run.stderr.splitlines())) < 5_000
    run.assert_nothing_left()


def test_a_module_in_the_working_directory_is_not_taken_for_ours(fakes: Fakes, tmp_path: Path) -> None:
    for name in ("fake_child", "ipc", "frontend", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    run = fakes.start()
    run.wait_for("ready")
    run.process.send_signal(signal.SIGINT)
    assert run.exit_code() == 0

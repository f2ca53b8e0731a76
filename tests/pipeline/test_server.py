"""`Server`: the processes under a supervisor in the background of this process; fakes in the places of the real."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.topology import LaunchConfig, ProcessFailed, Server

from .conftest import CHILDREN, DEADLINE_S, alive, eventually

MakeServer = Callable[..., Server]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, short_dir: Path, tmp_path: Path) -> MakeServer:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    monkeypatch.setenv("PYTHONPATH", str(CHILDREN))
    monkeypatch.syspath_prepend(CHILDREN)
    fake_specs = importlib.import_module("fake_child").fake_specs

    def make(**behaviours: str) -> Server:
        return Server(
            LaunchConfig(model=""),
            on_output=lambda name, line: None,
            build_specs=lambda run_dir: fake_specs(run_dir, str(tmp_path / "journal.txt"), behaviours, 60.0),
        )

    return make


def test_a_process_with_another_clock_is_named(make: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, str]] = []
    server = make(tokenizer_proc="other_clock")
    monkeypatch.setattr(server, "_on_output", lambda name, line: lines.append((name, line)))
    with server:
        assert [name for name, line in lines if "clock" in line] == ["tokenizer_proc"]


def open_files() -> dict[str, int]:
    """How many descriptors of each kind this process has open."""
    kinds: dict[str, int] = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            kind = os.readlink(fd).split(":")[0]
        except FileNotFoundError:  # the one that lists
            continue
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def test_start_and_stop_leave_nothing(make: MakeServer, short_dir: Path) -> None:
    with make():  # what a first use opens for good, a ZeroMQ context for one
        pass
    before = open_files()
    with make() as server:
        pids = server.pids
        assert len(pids) == 4
        assert all(map(alive, pids.values()))
        assert server.facts["engine_core"].facts["max_model_len"] == 77
        assert not server.join(0.0)
    assert not any(map(alive, pids.values()))
    assert list(short_dir.iterdir()) == []
    # ZeroMQ closes its sockets a moment after we do.
    eventually(lambda: all(count <= before[kind] for kind, count in open_files().items()), "descriptors closed")
    server.stop()  # again: no harm


def test_two_servers_side_by_side(make: MakeServer) -> None:
    with make() as first:
        with make() as second:
            assert not set(first.pids.values()) & set(second.pids.values())
        assert all(map(alive, first.pids.values()))


def test_a_failed_start_raises_and_leaves_nothing(make: MakeServer, short_dir: Path) -> None:
    with pytest.raises(ProcessFailed, match="engine_core: the flux capacitor is missing"):
        make(engine_core="user_error").start()
    assert list(short_dir.iterdir()) == []


def test_a_death_is_raised_on_leaving(make: MakeServer, short_dir: Path) -> None:
    def live_through(server: Server) -> None:
        with server:
            os.kill(server.pids["detokenizer_proc"], signal.SIGKILL)
            assert server.join(DEADLINE_S)

    server = make()
    with pytest.raises(ProcessFailed, match="detokenizer_proc: was killed by SIGKILL"):
        live_through(server)
    assert isinstance(server.failure, ProcessFailed)
    assert list(short_dir.iterdir()) == []

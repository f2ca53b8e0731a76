"""Real processes: a launching process as a child of the test, and what it must not leave behind."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from frontend.topology import LaunchConfig, Server
from ipc.config import EngineOptions, ServerOptions

CHILDREN = Path(__file__).parent / "children"
ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0  # generous: two slow cores, shared


def eventually(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `condition()` holds; fail with `what` if it does not."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def shared_memory() -> set[str]:
    """Names in /dev/shm that no living process holds: what somebody forgot there."""
    names = {str(path) for path in Path("/dev/shm").iterdir()}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                names -= {os.readlink(fd) for fd in (process / "fd").iterdir()}
                maps = (process / "maps").read_text() if names else ""
            except OSError:  # gone meanwhile, or not ours to look into
                continue
            names = {name for name in names if name not in maps}
    return names


class Launch:
    """`python -m launch` in a runtime directory of its own. Every process it starts is known by pid."""

    def __init__(self, settings: dict[str, Any], base: Path, cwd: Path) -> None:
        self.base = base
        self.events: list[dict[str, Any]] = []
        self.pids: dict[str, int] = {}
        self._stderr_path = cwd / "stderr.txt"
        env = os.environ | {
            "XDG_RUNTIME_DIR": str(base),
            "PYTHONPATH": os.pathsep.join([str(CHILDREN), str(ROOT)]),
            "XDG_STATE_HOME": str(cwd / "state"),
            "OMP_NUM_THREADS": "1",
        }
        self._shared_memory = shared_memory()
        with self._stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "launch", json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                cwd=cwd,
            )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(None)

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text(errors="replace")

    @property
    def run_dir(self) -> Path:
        return Path(next(event["path"] for event in self.events if event["event"] == "run_dir"))

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The next event of this kind; fails if the process ends first."""
        end = time.monotonic() + DEADLINE_S
        while True:
            line = self._lines.get(timeout=max(0.01, end - time.monotonic()))
            if line is None:
                pytest.fail(f"ended without {kind!r}; events {self.events}; stderr:\n{self.stderr}")
            event: dict[str, Any] = json.loads(line)
            self.events.append(event)
            if event["event"] == "ready":
                self.pids = event["pids"]
            if event["event"] == kind:
                return event

    def find_children(self, count: int) -> None:
        """Learn the pids of children that may never become ready."""
        parent = psutil.Process(self.process.pid)
        eventually(lambda: len(parent.children()) >= count, f"{count} children")
        self.pids = {str(child.pid): child.pid for child in parent.children()}

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_S)

    def assert_nothing_left(self) -> None:
        for name, pid in self.pids.items():
            eventually(lambda pid=pid: not alive(pid), f"the end of {name}")  # type: ignore[misc]
        eventually(lambda: not list(self.base.iterdir()), "an empty runtime directory")
        eventually(lambda: not shared_memory() - self._shared_memory, "no shared memory left")

    def kill(self) -> None:
        """End what a failed test left running."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pid in self.pids.values():
            if alive(pid):
                os.kill(pid, 9)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for socket names, which pytest's own often do not."""
    path = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def launch(short_dir: Path, tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Launch]]:
    launched: list[Launch] = []

    def start(settings: dict[str, Any]) -> Launch:
        launched.append(Launch(settings, short_dir, tmp_path))
        return launched[-1]

    yield start
    for each in launched:
        each.kill()


def launch_config(default_model: Path, **changes: Any) -> LaunchConfig:
    """The default model on a free port of 127.0.0.1, small enough to start quickly beside others."""
    return LaunchConfig(
        **{
            "model": str(default_model),
            "engine": EngineOptions(kv_tokens=16_384, max_num_batched_tokens=256),
            "server": ServerOptions(
                port=0, served_model_name="smollm2", frontend_procs=1, tokenizer_procs=1, detokenizer_procs=1
            ),
            **changes,
        }
    )


@pytest.fixture
def real(launch: Callable[[dict[str, Any]], Any], smollm2_path: Path) -> Callable[..., Any]:
    # No kernels to compile and little to warm up: each test starts everything anew.
    small = EngineOptions(
        weights="none", attention="torch", max_model_len=4096, kv_tokens=4096, max_num_batched_tokens=64, threads=1
    )

    def start(**changes: Any) -> Any:
        config = launch_config(smollm2_path, engine=small, grace_seconds=1.0, **changes)
        # Long enough for any machine: whoever is killed all the same does not stop by itself.
        return launch({"real": msgspec.to_builtins(config), "grace_s": DEADLINE_S / 4})

    return start


@pytest.fixture(scope="session")
def running_server(smollm2_path: Path) -> Iterator[Server]:
    """The real four processes with the default model; `url` is the server's address. Shared by all tests: leave it
    running and idle."""
    with Server(launch_config(smollm2_path)) as server:
        yield server

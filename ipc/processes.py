"""A child process as data (`ProcessSpec`) and as something running (`ChildProcess`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import ipc
from ipc.messages import Ready
from ipc.runtime import PARENT_FD_ENV

_KEPT_LINES = 20
_MAX_LINE = 4096  # bytes
_READ_SIZE = 65_536

Facts = Mapping[str, Ready]  # by process name


@dataclass(frozen=True)
class ProcessSpec:
    """How to start a process. `config` is called with the Ready messages of the processes named in `after`."""

    name: str
    module: str  # started as `python -m module settings.json`
    address: str  # its inbox, where Shutdown goes
    config: Callable[[Facts], msgspec.Struct]
    after: tuple[str, ...] = ()
    serves_clients: bool = False  # hears ModelReady, which it answers with Serving, and ProcessLost
    stop_grace_s: float = 10.0  # from Shutdown to SIGKILL
    env: Mapping[str, str] = field(default_factory=dict)


class ChildProcess:
    """A running child whose stdout and stderr go, line by line, to `on_output(name, line)`."""

    def __init__(
        self, spec: ProcessSpec, settings: Path, parent_fd: int, on_output: Callable[[str, str], None]
    ) -> None:
        self.spec = spec
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._on_output = on_output
        self._partial = b""
        self.output_fd, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -P: a folder called `frontend` where the user happens to be must not be taken for ours.
                [sys.executable, "-P", "-m", spec.module, str(settings)],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=_environment(spec, parent_fd),
                pass_fds=(parent_fd,),
                process_group=0,  # the terminal's Ctrl-C is for the supervisor alone
            )
        except BaseException:
            os.close(self.output_fd)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(self.output_fd, False)
        self._pidfd = _pidfd(self._process.pid)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def fds(self) -> tuple[int, ...]:
        """Become readable when the process has ended or written."""
        return tuple(fd for fd in (self._pidfd, self.output_fd) if fd >= 0)

    @property
    def has_pidfd(self) -> bool:
        return self._pidfd >= 0

    def read_output(self) -> bool:
        """Pass on what the process has written. False: there will be no more."""
        while True:
            try:
                data = os.read(self.output_fd, _READ_SIZE)
            except BlockingIOError:
                return True
            if not data:
                if self._partial:
                    self._line(self._partial)
                    self._partial = b""
                return False
            *lines, self._partial = (self._partial + data).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._line(line)
            if len(self._partial) > _MAX_LINE:
                self._line(self._partial)
                self._partial = b""

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._process.kill()
        self._process.wait()

    def how_it_ended(self) -> str:
        """In words, for a process that has ended."""
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = " (the kernel does that when memory runs out)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        return f"was killed by signal {-code}"

    def close(self) -> None:
        self.close_output()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def close_output(self) -> None:
        if self.output_fd >= 0:
            os.close(self.output_fd)
            self.output_fd = -1

    def _line(self, line: bytes) -> None:
        text = line[:_MAX_LINE].decode(errors="replace").rstrip()
        if text:
            self.last_lines.append(text)
            self._on_output(self.name, text)


def _environment(spec: ProcessSpec, parent_fd: int) -> dict[str, str]:
    return {**child_environment(), **spec.env, PARENT_FD_ENV: str(parent_fd)}


def child_environment() -> dict[str, str]:
    """This process's environment, for a Python child with `-P` that runs modules of ours."""
    env = dict(os.environ)
    root = Path(ipc.__file__).parent.parent
    if root.name not in ("site-packages", "dist-packages"):  # a checkout: run the same code as the launcher
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    return env


def _pidfd(pid: int) -> int:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # old kernels, strict sandboxes
            return os.pidfd_open(pid)
    return -1

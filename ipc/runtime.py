"""How every child process starts and ends; `python -m <process> CONFIG.json` is `child_main` and a body.

settings read · title set · death of the parent watched · body runs, reports Progress and Ready · flush · exit
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
from setproctitle import setproctitle

from ipc.channel import Sender, flush
from ipc.config import Endpoints
from ipc.errors import UserError
from ipc.messages import Progress, Ready, Serving, StartFailed
from ipc.recorder.nvtx import with_nvtx
from ipc.recorder.ring import Recorder, RingRecorder, num_records
from ipc.recorder.store import LINK
from ipc.run_dir import read_config, remove_run_directory

PARENT_FD_ENV = "_GAPLESS_PARENT_FD"  # read end of a pipe that nobody writes to; its end is the supervisor's end
LOG_LEVEL_ENV = "_GAPLESS_LOG_LEVEL"
_PROGRESS_INTERVAL_S = 0.05
_ORPHANED = 70  # exit code nobody is left to see

logger = logging.getLogger(__name__)


class ProcessConfig(Protocol):
    @property
    def endpoints(self) -> Endpoints: ...


C = TypeVar("C", bound=ProcessConfig)


class Child:
    """A starting process's line to the supervisor."""

    def __init__(self, name: str, supervisor: Sender, recorder: Recorder) -> None:
        self.name = name
        self.recorder = recorder
        self._supervisor = supervisor
        self._seconds: dict[str, float] = {}
        self._last_progress = 0.0

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Announce a start-up step and time it; the times travel with Ready."""
        self._last_progress = 0.0
        self.progress(phase)
        begin = time.monotonic()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - begin

    def progress(self, phase: str, fraction: float | None = None) -> None:
        """One line of news; may be called as often as convenient."""
        now = time.monotonic()
        finished = fraction is not None and fraction >= 1.0
        if finished or now - self._last_progress >= _PROGRESS_INTERVAL_S:
            self._last_progress = now
            self._supervisor.send(Progress(name=self.name, phase=phase, fraction=fraction))

    def ready(self, facts: dict[str, Any]) -> None:
        """The inbox is bound and messages will be handled. `facts` are plain JSON values."""
        self._supervisor.send(
            Ready(name=self.name, pid=os.getpid(), facts=facts, seconds=self._seconds, sent=time.monotonic_ns())
        )

    def serving(self) -> None:
        """Those who serve clients: `ModelReady` has arrived and requests are accepted."""
        self._supervisor.send(Serving(name=self.name))

    def start_failed(self, message: str) -> None:
        self._supervisor.send(StartFailed(name=self.name, message=message[:65_536]))


def child_main(
    name: str,
    config_type: type[C],
    body: Callable[[C, Child], None],
    user_errors: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Run `body(config, child)` as the process `name`, or as what its settings file is called if that is `name` with a
    number, then exit: 0, or 1 if it raised.

    A `UserError`, or one of `user_errors`, reaches the user as its message alone; any other exception is a bug and
    leaves a traceback.
    """
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what Ctrl-C means
    path = Path(sys.argv[1]) if len(sys.argv) == 2 else None
    if path is not None and path.stem.startswith(f"{name}."):  # the second of its kind, and further: frontend.1
        name = path.stem
    setproctitle(f"gapless: {name}")
    logging.basicConfig(
        level=os.environ.get(LOG_LEVEL_ENV, "WARNING").upper(), format=f"%(asctime)s {name} %(levelname)s %(message)s"
    )
    if path is None:
        sys.exit(f"usage: python -m {name} CONFIG.json (started by `gapless serve`)")
    watch_parent(path.parent)
    code = _run(name, path, config_type, body, (UserError, *user_errors))
    flush()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Everything is released by now; what interpreter shutdown would add is seconds of freeing memory page by page.
    os._exit(code)


def _run(
    name: str,
    path: Path,
    config_type: type[C],
    body: Callable[[C, Child], None],
    user_errors: tuple[type[Exception], ...],
) -> int:
    try:
        config = read_config(path, config_type)
    except (OSError, msgspec.MsgspecError) as error:
        logger.error("cannot read the settings in %s: %s", path, error)
        return 1
    child = Child(name, Sender(config.endpoints.supervisor), _recorder(name, path.parent / LINK))
    try:
        body(config, child)
    except user_errors as error:
        child.start_failed(str(error))
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        logger.exception("%s failed", name)
        return 1
    return 0


def _recorder(name: str, folder: Path) -> Recorder:
    """The process's flight recorder; one that keeps nothing where there is no room for its ring."""
    recorder = Recorder()
    if folder.is_dir():  # not for a process that was started by hand
        try:
            recorder = RingRecorder(folder.resolve(), name, num_records(folder))
        except OSError as error:
            logger.warning("no room for a recording: %s", error)
    recorder.watch_gc()
    return with_nvtx(recorder)


def watch_parent(run_dir: Path) -> None:
    """Vanish, run directory included, as soon as the supervisor is gone, whatever killed it. Without a supervisor
    (a process started by hand) this does nothing."""
    value = os.environ.pop(PARENT_FD_ENV, None)
    if value is None:
        return
    fd = int(value)
    os.set_inheritable(fd, False)

    def wait_for_end() -> None:
        while os.read(fd, 1):
            pass
        with contextlib.suppress(ValueError):
            remove_run_directory(run_dir)
        os._exit(_ORPHANED)

    threading.Thread(target=wait_for_end, name="parent-watch", daemon=True).start()

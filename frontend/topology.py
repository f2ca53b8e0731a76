"""Which processes make up a server, as data; and `serve` and `Server`, which run them under a supervisor.

    frontend · tokenizer_proc · engine_core     start at once, side by side
    detokenizer_proc                            once the tokenizer is Ready: it reads the tokenizer.json left there
    frontend.1 and further                      once the first one is Ready: they listen on its port

They stop in that order, all frontends together, so that nobody's results go to someone who is gone.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ipc.config import (
    Config,
    DetokenizerProcessConfig,
    Endpoints,
    EngineConfig,
    EngineOptions,
    EngineProcessConfig,
    FrontendProcessConfig,
    ServerOptions,
    TextOptions,
    TokenizerProcessConfig,
)
from ipc.cores import default_detokenizers, default_frontends, default_tokenizers, usable_cores
from ipc.messages import Progress
from ipc.processes import Facts, ProcessSpec
from ipc.recorder.store import open_recordings
from ipc.run_dir import RunDirectory
from ipc.runtime import LOG_LEVEL_ENV
from ipc.supervisor import ProcessFailed, Supervisor

# What the frontend needs to end after its own grace is over.
_GRACE_MARGIN_S = 5.0

BuildSpecs = Callable[[RunDirectory], Sequence[ProcessSpec]]


class LaunchConfig(Config, frozen=True):
    """All that `serve` needs to know."""

    model: str  # a .gguf file or a directory, already resolved
    engine: EngineOptions = EngineOptions()
    text: TextOptions = TextOptions()
    server: ServerOptions = ServerOptions()
    model_aliases: tuple[str, ...] = ()
    grace_seconds: float = 5.0
    log_level: str = "WARNING"


def endpoints(server: ServerOptions, run_dir: RunDirectory) -> Endpoints:
    """One inbox per process; how many there are of each is the user's choice, or follows from the cores."""
    cores = usable_cores()
    return Endpoints.make(
        run_dir.address,
        frontends=server.frontend_procs or default_frontends(cores),
        tokenizers=server.tokenizer_procs or default_tokenizers(cores),
        detokenizers=server.detokenizer_procs or default_detokenizers(cores),
    )


def numbered(name: str, index: int) -> str:
    """The name of a process: the first of its kind has the plain one."""
    return f"{name}.{index}" if index else name


def process_specs(launch: LaunchConfig, run_dir: RunDirectory) -> list[ProcessSpec]:
    """All processes, in the order in which they are stopped."""
    ends = endpoints(launch.server, run_dir)
    env = {LOG_LEVEL_ENV: launch.log_level}
    engine = EngineProcessConfig(engine=EngineConfig(model=launch.model, **_fields(launch.engine)), endpoints=ends)
    return [
        *(_frontend(launch, ends, index, env) for index in range(len(ends.frontends))),
        *(_tokenizer(launch, ends, run_dir, index, env) for index in range(len(ends.tokenizers))),
        ProcessSpec(name="engine_core", module="engine_core", address=ends.engine, config=lambda _: engine, env=env),
        *(_detokenizer(ends, index, env) for index in range(len(ends.detokenizers))),
    ]


def _frontend(launch: LaunchConfig, ends: Endpoints, index: int, env: Mapping[str, str]) -> ProcessSpec:
    def config(ready: Facts) -> FrontendProcessConfig:
        fields = _fields(launch.server)
        if index:
            fields["port"] = ready["frontend"].facts["port"]  # which the user may have left to the kernel
        return FrontendProcessConfig(
            index=index,
            endpoints=ends,
            model_aliases=launch.model_aliases,
            grace_seconds=launch.grace_seconds,
            **fields,
        )

    return ProcessSpec(
        name=numbered("frontend", index),
        module="frontend",
        address=ends.frontends[index],
        config=config,
        after=("frontend",) if index else (),
        serves_clients=True,
        stop_grace_s=launch.grace_seconds + _GRACE_MARGIN_S,
        env=env,
    )


def _tokenizer(
    launch: LaunchConfig, ends: Endpoints, run_dir: RunDirectory, index: int, env: Mapping[str, str]
) -> ProcessSpec:
    config = TokenizerProcessConfig(
        index=index, model=launch.model, endpoints=ends, run_dir=str(run_dir.path), **_fields(launch.text)
    )
    return ProcessSpec(
        name=numbered("tokenizer_proc", index),
        module="tokenizer_proc",
        address=ends.tokenizers[index],
        config=lambda _: config,
        env=env,
    )


def _detokenizer(ends: Endpoints, index: int, env: Mapping[str, str]) -> ProcessSpec:
    def config(ready: Facts) -> DetokenizerProcessConfig:
        tokenizer_json = ready["tokenizer_proc"].facts["tokenizer_json"]
        return DetokenizerProcessConfig(index=index, tokenizer_json=tokenizer_json, endpoints=ends)

    return ProcessSpec(
        name=numbered("detokenizer_proc", index),
        module="detokenizer_proc",
        address=ends.detokenizers[index],
        config=config,
        after=("tokenizer_proc",),
        env=env,
    )


def serve(
    launch: LaunchConfig,
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_ready: Callable[[Facts], None] = lambda _: None,
    on_output: Callable[[str, str], None] | None = None,
    build_specs: BuildSpecs | None = None,
) -> None:
    """Run a server in the foreground until Ctrl-C, SIGTERM or SIGHUP; a second signal hurries. Main thread only.

    `on_ready` gets the Ready message of each process. Raises `ProcessFailed` if a process cannot start or dies, OSError
    if no run directory can be made. Leaves no process and no file.
    """
    build = build_specs or (lambda run_dir: process_specs(launch, run_dir))
    with RunDirectory() as run_dir:
        open_recordings(run_dir.path, launch.model)
        supervisor = _supervisor(build, run_dir, on_progress, on_output)
        with contextlib.closing(supervisor), _stop_on_signals(supervisor):
            supervisor.run(on_ready)


class Server:
    """A server in the background of this process, for tests and programs: `with Server(launch) as server`.

    Entering waits until it is ready and raises `ProcessFailed` if it cannot start; leaving stops it. A process that
    dies in between is reported by `failure` and, unless `stop` is called first, raised on leaving.
    """

    def __init__(
        self,
        launch: LaunchConfig,
        *,
        on_progress: Callable[[Progress], None] = lambda _: None,
        on_output: Callable[[str, str], None] | None = None,
        build_specs: BuildSpecs | None = None,
    ) -> None:
        self.facts: Facts = {}
        self.failure: Exception | None = None
        self._launch = launch
        self._build = build_specs or (lambda run_dir: process_specs(launch, run_dir))
        self._on_progress, self._on_output = on_progress, on_output
        self._settled = threading.Event()  # ready, or over
        self._supervisor: Supervisor | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    @property
    def url(self) -> str:
        """Address of the HTTP server, without a slash at the end."""
        return str(self.facts["frontend"].facts["url"])

    @property
    def pids(self) -> dict[str, int]:
        return self._supervisor.pids if self._supervisor else {}

    def start(self) -> None:
        self._thread.start()
        self._settled.wait()
        if self.failure is not None:
            self.stop()
            raise self.failure

    def stop(self) -> None:
        """Ordered stop; returns when nothing is left. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.request_stop()
        self._thread.join()
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, whatever brings it. False: still running."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: object, *_: Any) -> None:
        ended_by_itself = not self._thread.is_alive()
        self.stop()
        if ended_by_itself and self.failure is not None and kind is None:
            raise self.failure

    def _run(self) -> None:
        try:
            with RunDirectory() as run_dir:
                open_recordings(run_dir.path, self._launch.model)
                self._supervisor = _supervisor(self._build, run_dir, self._on_progress, self._on_output)
                self._supervisor.run(self._on_ready)
        except Exception as error:
            self.failure = error
        finally:
            self._settled.set()

    def _on_ready(self, facts: Facts) -> None:
        self.facts = dict(facts)
        self._settled.set()


def print_output(name: str, line: str) -> None:
    """What children write, on this process's stderr."""
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone must not keep us from stopping them
        sys.stderr.write(f"{name}: {line}\n")
        sys.stderr.flush()


def _supervisor(
    build: BuildSpecs,
    run_dir: RunDirectory,
    on_progress: Callable[[Progress], None],
    on_output: Callable[[str, str], None] | None,
) -> Supervisor:
    return Supervisor(
        build(run_dir),
        run_dir,
        run_dir.address("supervisor"),
        on_progress=on_progress,
        on_output=on_output or print_output,
    )


@contextlib.contextmanager
def _stop_on_signals(supervisor: Supervisor) -> Iterator[None]:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, lambda *_: supervisor.request_stop()) for number in signals}
    old_fd = signal.set_wakeup_fd(supervisor.wake_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)


def _fields(options: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(options)


__all__ = [
    "Facts",
    "LaunchConfig",
    "ProcessFailed",
    "Server",
    "endpoints",
    "print_output",
    "process_specs",
    "serve",
]

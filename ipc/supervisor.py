"""Starts the processes, waits for their Ready, watches them, stops them in order; lives in the launching process.

    start what depends on nothing · each Ready may start more
    all Ready:        ModelReady to those who serve clients; once they answer Serving, the server is up
    a process dies:   ProcessLost to those who serve clients, ordered stop, `ProcessFailed` with the cause
    stop requested:   ordered stop: Shutdown to the first, wait, then the next; SIGKILL after each one's grace

One thread, one poll: inbox, children's ends, children's output, signals. Idle, it sleeps in that poll.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, assert_never

from ipc.channel import Receiver, Sender
from ipc.messages import (
    Message,
    ModelReady,
    ProcessLost,
    Progress,
    Ready,
    Serving,
    Shutdown,
    StartFailed,
    SupervisorMessage,
)
from ipc.processes import ChildProcess, Facts, ProcessSpec
from ipc.recorder.store import Clock, note_clocks
from ipc.run_dir import RunDirectory

_HURRY_S = 0.5  # what is left of every grace after a second stop request
_LAST_WORDS_S = 0.5  # for a StartFailed to arrive after its sender has ended
_NO_PIDFD_POLL_S = 0.25
_SHOWN_LINES = 10


class ProcessFailed(Exception):
    """A process could not start, or died. `cause` is one line; `lines` the last it wrote, empty for a user's error."""

    def __init__(self, name: str, cause: str, lines: Sequence[str] = ()) -> None:
        self.name, self.cause, self.lines = name, cause, tuple(lines)
        super().__init__("\n".join([f"{name}: {cause}", *(f"  {line}" for line in self.lines)]))


class Supervisor:
    """Owns the children of one run. All methods belong to the thread that calls `run`, except `request_stop`."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: RunDirectory,
        address: str,
        *,
        on_progress: Callable[[Progress], None],
        on_output: Callable[[str, str], None],
    ) -> None:
        """`specs` in the order in which the processes are to be stopped; `address` is the supervisor's own inbox."""
        self._specs = tuple(specs)
        self._run_dir = run_dir
        self._on_progress, self._on_output = on_progress, on_output
        self._children: dict[str, ChildProcess] = {}
        self._ready: dict[str, Ready] = {}
        self._clocks: dict[str, Clock] = {}
        self._spawned: dict[str, int] = {}  # CLOCK_MONOTONIC ns
        self._serving: set[str] = set()
        self._dismissed: set[str] = set()  # told to stop
        self._stop_requests = 0
        self._stopping = False
        self._inbox: Receiver[SupervisorMessage] = Receiver(address, SupervisorMessage)
        self._outboxes = {spec.name: Sender(spec.address) for spec in specs}
        self._alive_read, self._alive_write = os.pipe()  # ends with this process: how the children notice its death

    @property
    def wake_fd(self) -> int:
        """For `signal.set_wakeup_fd`, if `request_stop` is called in signal handlers."""
        return self._inbox.wake_fd

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def request_stop(self) -> None:
        """From any thread or signal handler. A second request cuts the graces short."""
        self._stop_requests += 1
        self._inbox.wake()

    def run(self, on_ready: Callable[[Facts], None]) -> None:
        """Start everything, call `on_ready` once, return when stopped on request. Raises `ProcessFailed`.

        Whatever happens, no child is left on return. Call once, then `close`.
        """
        try:
            self._start()
            if not self._stop_requests:
                on_ready(self._ready)
            while not self._stop_requests:
                self._tick(None)
        finally:
            self._stop()

    def close(self) -> None:
        """Release sockets and pipes. After it `request_stop` must not be called, nor `wake_fd` be in use."""
        self._inbox.close()
        for outbox in self._outboxes.values():
            outbox.close(linger_s=0.0)  # nobody is left to read it
        os.close(self._alive_write)
        os.close(self._alive_read)

    def _start(self) -> None:
        while len(self._ready) < len(self._specs) and not self._stop_requests:
            for spec in self._specs:
                if spec.name not in self._children and all(name in self._ready for name in spec.after):
                    self._spawn(spec)
            self._tick(None)
        for name in note_clocks(self._run_dir.path, self._clocks):
            self._on_output(name, "its clock is not the supervisor's: `gapless trace` cannot order what it records")
        if not self._stop_requests:
            self._tell_clients(self._model_ready())
        clients = {spec.name for spec in self._specs if spec.serves_clients}
        while not clients <= self._serving and not self._stop_requests:
            self._tick(None)

    def _spawn(self, spec: ProcessSpec) -> None:
        awaited = {name: self._ready[name] for name in spec.after}
        settings = self._run_dir.write_config(spec.name, spec.config(awaited))
        self._spawned[spec.name] = time.monotonic_ns()
        child = ChildProcess(spec, settings, self._alive_read, self._on_output)
        self._children[spec.name] = child
        for fd in child.fds:
            self._inbox.watch(fd)

    def _tick(self, timeout_s: float | None) -> None:
        """Wait for one thing to happen and deal with it."""
        if any(not child.has_pidfd for child in self._children.values()):
            timeout_s = _NO_PIDFD_POLL_S if timeout_s is None else min(timeout_s, _NO_PIDFD_POLL_S)
        self._inbox.wait(timeout_s)
        self._read_inbox()
        for child in list(self._children.values()):
            self._read_output(child)
            if not child.running:
                self._bury(child)

    def _read_inbox(self) -> None:
        for message in self._inbox.drain():
            match message:
                case Progress():
                    self._on_progress(message)
                case Ready():
                    if message.name in self._children:
                        self._ready[message.name] = message
                        times = self._spawned[message.name], message.sent, time.monotonic_ns()
                        self._clocks[message.name] = Clock(message.pid, *times)
                case Serving():
                    self._serving.add(message.name)
                case StartFailed():
                    if not self._stopping:
                        raise ProcessFailed(message.name, message.message)
                case _:
                    assert_never(message)

    def _read_output(self, child: ChildProcess) -> None:
        if child.output_fd >= 0 and not child.read_output():
            self._inbox.unwatch(child.output_fd)
            child.close_output()

    def _bury(self, child: ChildProcess) -> None:
        """A child has ended. Unless it was told to, tell those who serve clients; raise if that is news."""
        name = child.name
        if not self._stopping and name not in self._ready:
            self._await_last_words()
        self._read_output(child)
        for fd in child.fds:
            self._inbox.unwatch(fd)
        child.close()
        del self._children[name]
        if name in self._dismissed:
            return
        cause = child.how_it_ended() + ("" if name in self._ready else " while starting")
        self._tell_clients(ProcessLost(name=name, detail=cause))
        if not self._stopping:
            raise ProcessFailed(name, cause, list(child.last_lines)[-_SHOWN_LINES:])

    def _await_last_words(self) -> None:
        """Raises if a StartFailed is still on its way."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline:
            self._read_inbox()
            time.sleep(0.01)

    def _tell_clients(self, message: Message) -> None:
        for spec in self._specs:
            if spec.serves_clients and spec.name in self._children:
                self._outboxes[spec.name].send(message)

    def _stop(self) -> None:
        self._stopping = True
        try:
            # Processes of one kind together: one stop, one grace.
            for _, specs in itertools.groupby(self._specs, key=lambda spec: spec.name.partition(".")[0]):
                self._dismiss([self._children[spec.name] for spec in specs if spec.name in self._children])
        finally:
            for child in self._children.values():
                child.kill()
                child.close()

    def _dismiss(self, children: Sequence[ChildProcess]) -> None:
        """Stop these children, all at once, and wait for their end."""
        for child in children:
            self._dismissed.add(child.name)
            if child.name in self._ready:
                self._outboxes[child.name].send(Shutdown())
            else:
                child.terminate()  # it is not yet reading its inbox
        begin = time.monotonic()
        while alive := [child for child in children if child.name in self._children]:
            graces = [_HURRY_S if self._stop_requests > 1 else child.spec.stop_grace_s for child in alive]
            left = begin + min(graces) - time.monotonic()
            if left <= 0:
                for child, grace in zip(alive, graces, strict=True):
                    if grace == min(graces):
                        self._on_output(child.name, f"did not stop within {grace:g} s: killed")
                        child.kill()
            self._tick(max(left, 0.0))

    def _model_ready(self) -> ModelReady:
        facts: dict[str, Any] = {}
        for spec in self._specs:
            facts |= self._ready[spec.name].facts
        facts["seconds"] = {name: message.seconds for name, message in self._ready.items()}
        facts["pids"] = {"supervisor": os.getpid(), **{name: message.pid for name, message in self._ready.items()}}
        return ModelReady(
            max_model_len=facts.get("max_model_len", 0), vocab_size=facts.get("vocab_size", 0), facts=facts
        )

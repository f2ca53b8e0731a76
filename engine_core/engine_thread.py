"""A thread that owns a `Session`: commands in, deltas out. Knows nothing of event loops."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from engine_core.outputs import EngineError
from engine_core.plan import ModelFacts
from engine_core.session import Session

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[Session], None]

CLOSED = "the engine is closed"


class EngineThread:
    """Builds the session in its thread and steps it while it has work.

    `after_step` is called in the thread whenever sinks may have been called. When the thread ends, for whatever
    reason, `on_end` is called once, with what to tell those who still wait.
    """

    def __init__(
        self, build: Callable[[], Session], after_step: Callable[[Session], None], on_end: Callable[[str], None]
    ) -> None:
        self._build, self._after_step, self._on_end = build, after_step, on_end
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.stopped = False  # no more commands are taken
        started: Future[ModelFacts] = Future()
        # A daemon, so that a program that forgets to close it can end: its last step is awaited at exit.
        self._thread = threading.Thread(target=self._main, args=(started,), name="gapless-engine", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        self.facts = started.result()

    def post(self, command: Command) -> None:
        """Run `command` between two steps. Raises EngineError if the thread has been told to stop."""
        with self._lock:
            if self.stopped:
                raise EngineError(CLOSED)
            self._commands.put(command)

    def call(self, function: Callable[[Session], T]) -> Future[T]:
        """Like `post`, with a result."""
        future: Future[T] = Future()

        def command(session: Session) -> None:
            try:
                future.set_result(function(session))
            except Exception as error:
                future.set_exception(error)

        self.post(command)
        return future

    def stop(self) -> None:
        """End all requests and the thread; returns when it has ended."""
        with self._lock:
            if not self.stopped:
                self.stopped = True
                self._commands.put(None)
        atexit.unregister(self.stop)
        self._thread.join()

    def _main(self, started: Future[ModelFacts]) -> None:
        try:
            session = self._build()
        except BaseException as error:
            with self._lock:
                self.stopped = True
            started.set_exception(error)
            return
        started.set_result(session.engine.facts)
        reason = CLOSED
        try:
            while self._run_commands(session):
                if session.has_work:
                    session.step()
                    self._after_step(session)
        except Exception as error:
            logger.exception("the engine thread failed")
            reason = f"the engine failed: {error}"
        finally:
            with self._lock:
                self.stopped = True
            self._finish(session, reason)

    def _finish(self, session: Session, reason: str) -> None:
        while not self._commands.empty():  # after a failure: whoever sent them must hear of it, too
            if (command := self._commands.get()) is not None:
                command(session)
        try:
            session.abort_all()
        except Exception:  # a broken engine may fail once more
            logger.exception("the engine could not be emptied")
        self._on_end(reason)

    def _run_commands(self, session: Session) -> bool:
        """Everything that waits, or if there is no work the next that comes. False: stop."""
        wait = not session.has_work
        while wait or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command(session)
            wait = False
        return True

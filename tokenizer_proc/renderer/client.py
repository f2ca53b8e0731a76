"""The tokenizer's side: starts the process, asks it, and ends it."""

from __future__ import annotations

import logging
import subprocess
import sys

import msgspec

from ipc.codec import unpack_ids
from ipc.frames import read_frame, write_frame
from ipc.messages import Error
from ipc.processes import child_environment
from tokenizer_proc.errors import PromptError

logger = logging.getLogger(__name__)
_ATTEMPTS = 2
_COMMAND = (sys.executable, "-P", "-m", "tokenizer_proc.renderer")


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    ids: bytes = b""  # int32, little endian
    error: Error | None = None


class Renderer:
    """Used by one thread; only `begin` and `interrupt` may be called by others."""

    def __init__(self, model: bytes) -> None:
        """`model`: from `pack_model`."""
        self._model = model
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted = False

    def begin(self) -> None:
        """What is interrupted from now on is the next `encode`."""
        self._interrupted = False

    def encode(self, prompt: msgspec.Raw) -> list[int]:
        """`prompt`: an encoded `Prompt`. Raises `PromptError` with what the client should be told."""
        for _ in range(_ATTEMPTS):
            try:
                reply = self._exchange(prompt)
                break
            except (OSError, EOFError) as error:
                logger.info("the rendering process failed: %s", error)
                self.close()
            except BaseException:  # a reply that nobody reads would be taken for the next one's
                self.close()
                raise
        else:
            raise PromptError("messages take more than can be processed now", "messages", "overloaded", 503)
        if reply.error is not None:
            raise PromptError.of(reply.error)
        return unpack_ids(reply.ids)

    def interrupt(self) -> None:
        """Let the `encode` in another thread fail, or the one that has not been called since `begin`."""
        self._interrupted = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process and give its memory back. `encode` starts it again."""
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes the pipes and waits
                process.kill()

    def _exchange(self, prompt: msgspec.Raw) -> Reply:
        """Raises OSError or EOFError if the process has ended."""
        self._check_wanted()
        if self._process is None:
            self._start()
        return self._ask(memoryview(prompt))

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                _COMMAND, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()
            )
            self._check_wanted()  # an interrupt had nothing to kill before
            reply = self._ask(self._model)
            problem = reply.error and reply.error.message
        except (OSError, EOFError) as error:
            self._check_wanted()
            problem = str(error)
        if problem is not None:
            logger.warning("cannot start the process that renders large messages: %s", problem)
            message = "large messages cannot be processed now: the process that renders them does not start"
            raise PromptError(message, "messages", "overloaded", 503)

    def _ask(self, frame: bytes | memoryview) -> Reply:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        write_frame(self._process.stdin, frame)
        if (data := read_frame(self._process.stdout)) is None:
            raise EOFError("it has ended")
        return self._decoder.decode(data)

    def _check_wanted(self) -> None:
        if self._interrupted:
            raise PromptError("nobody waits for this prompt")

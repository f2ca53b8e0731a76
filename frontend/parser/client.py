"""The frontend's side: which bodies go where, and the life of the parsing process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys

import msgspec

from frontend.errors import ApiError
from frontend.openai.job import Job, Limits
from frontend.openai.parse import DETOKENIZE, TOKENIZE, DetokenizeCall, Parser, TokenizeCall
from frontend.parser.wire import Ask, Reply
from ipc.frames import LENGTH, frame
from ipc.processes import child_environment

logger = logging.getLogger(__name__)

# The worst of bodies takes some 60 ms per MB.
LARGE_BODY = 256 * 1024
_PIECE = 1 << 20  # bytes
_ATTEMPTS = 2  # the process may be ending just now, because it was idle


class BodyParser:
    """Parses the bodies of requests. Raises `ApiError`. Large ones wait for one another."""

    def __init__(self) -> None:
        self._parser = Parser()
        self._reply = msgspec.msgpack.Decoder(Reply)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def job(self, path: str, body: bytes | bytearray, limits: Limits) -> Job:
        if len(body) < LARGE_BODY:
            return self._parser.job(path, body, limits)
        reply = await self._ask(path, body, limits)
        assert reply.job is not None
        return reply.job

    async def tokenize(self, body: bytes | bytearray, limits: Limits) -> TokenizeCall:
        if len(body) < LARGE_BODY:
            return self._parser.tokenize(body, limits)
        reply = await self._ask(TOKENIZE, body, limits)
        assert reply.tokenize is not None
        return reply.tokenize

    async def detokenize(self, body: bytes | bytearray, limits: Limits) -> DetokenizeCall:
        if len(body) < LARGE_BODY:
            return self._parser.detokenize(body, limits)
        reply = await self._ask(DETOKENIZE, body, limits)
        assert reply.detokenize is not None
        return reply.detokenize

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, path: str, body: bytes | bytearray, limits: Limits) -> Reply:
        async with self._turn:
            for _ in range(_ATTEMPTS):
                try:
                    reply = self._reply.decode(await self._exchange(msgspec.msgpack.encode(Ask(path, limits)), body))
                    break
                except (OSError, asyncio.IncompleteReadError) as error:
                    logger.info("the parsing process ended: %s", error)
                    await self.close()
                except BaseException:  # a reply that nobody reads would be taken for the next one's
                    await self.close()
                    raise
            else:
                raise ApiError(413, f"a request body of {len(body)} bytes could not be parsed", code="too_large")
        if (refusal := reply.refusal) is not None:
            raise ApiError(refusal.status, refusal.message, refusal.param, refusal.code)
        return reply

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "frontend.parser",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=child_environment(),
            )  # fmt: skip
        except OSError as error:  # of memory, files or processes: nothing the client can put right
            logger.warning("cannot start the process that parses large bodies: %s", error)
            raise ApiError(503, "large requests cannot be parsed now", code="overloaded", retry_after=1) from None

    async def _exchange(self, head: bytes, body: bytes | bytearray) -> bytearray:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(frame(head) + LENGTH.pack(len(body)))
        view = memoryview(body)
        for start in range(0, len(view), _PIECE):
            process.stdin.write(view[start : start + _PIECE])
            await process.stdin.drain()
        (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        reply = bytearray()  # grows in place: a copy of a large one would hold up everyone
        while len(reply) < size:
            if not (piece := await process.stdout.read(min(_PIECE, size - len(reply)))):
                raise asyncio.IncompleteReadError(b"", size)
            reply += piece
        return reply

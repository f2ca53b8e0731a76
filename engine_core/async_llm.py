"""The engine for asyncio programs. It runs in one thread of this process; the event loop never waits for a step.

    event loop ---commands (open, abort)---> engine thread: while work: take commands; step
               <---deltas, once a step-----  (call_soon_threadsafe)

The only module of engine_core that may import asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self

from engine_core.collect import Collector, stream_output
from engine_core.engine_thread import CLOSED, EngineThread
from engine_core.options import make_config, python_names, resolve_path
from engine_core.outputs import EngineError, RequestOutput, StreamOutput
from engine_core.plan import ModelFacts
from engine_core.progress import load_progress
from engine_core.prompts import EncodedPrompt, Message, Prompt, as_params, encode_any, wants_text
from engine_core.session import Delta, Session
from engine_core.text_side import TextSide
from ipc.messages import EngineStats
from ipc.recorder.nvtx import with_nvtx
from ipc.recorder.ring import Recorder
from ipc.sampling import SamplingParams


class AsyncLLM:
    """A loaded model for any number of concurrent tasks, whose requests are batched.

    The arguments are those of `LLM`. The constructor returns when the model is loaded; `await AsyncLLM.load(...)` does
    the same without holding up the event loop. Close it with `await llm.close()`, or use `async with`.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, progress: bool = True, **options: Any) -> None:
        with load_progress(progress) as report:
            path = resolve_path(model, report)
            self._text = TextSide(path, chat_template)
            config = make_config(path, options)

            def build() -> Session:
                from engine_core.build import build_engine

                with python_names():
                    return Session(build_engine(config, report, with_nvtx(Recorder())), self._text)

            self._mailboxes: set[_Mailbox] = set()  # of the engine thread
            self._engine = EngineThread(build, self._deliver, self._end)
        # Not the loop's own executor: a tokenizer is used by one thread at a time.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="gapless-encode")

    @classmethod
    async def load(cls, model: str, **arguments: Any) -> Self:
        """The constructor, run in another thread."""
        return await asyncio.to_thread(cls, model, **arguments)

    @property
    def facts(self) -> ModelFacts:
        return self._engine.facts

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """The answer to one text, list of token ids, or conversation. Cancelling the task ends the request.

        Raises ValueError if the prompt or a parameter is out of bounds.
        """
        encoded, sampling = await self._encode(prompt), as_params(params, 1)[0]
        with_text = wants_text(encoded, sampling)
        collector = Collector(encoded, sampling, self._text, with_text)
        async with aclosing(self._run(encoded, sampling, with_text, priority, cache_salt)) as deltas:
            async for delta in deltas:
                collector.add(delta)
        return collector.output()

    async def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        text: bool = True,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[StreamOutput]:
        """Like `generate`, as it is made. Closing the iterator ends the request. `text=False`: ids alone, for ids.

        Raises EngineError if the request fails.
        """
        encoded, sampling = await self._encode(prompt), as_params(params, 1)[0]
        with_text = text or wants_text(encoded, sampling)
        async with aclosing(self._run(encoded, sampling, with_text, priority, cache_salt)) as deltas:
            async for delta in deltas:
                yield stream_output(delta)

    async def stats(self) -> EngineStats:
        """Requests and KV blocks as they are now."""
        return await asyncio.wrap_future(self._engine.call(lambda session: session.engine.stats()))

    async def close(self) -> None:
        """End all requests and the thread. Those who wait for an answer get EngineError."""
        await asyncio.to_thread(self._engine.stop)
        self._encoder.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _encode(self, prompt: Prompt | Sequence[Message]) -> EncodedPrompt:
        if self._engine.stopped:
            raise EngineError(CLOSED)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoder, encode_any, self._text, prompt)

    async def _run(
        self, prompt: EncodedPrompt, sampling: SamplingParams, with_text: bool, priority: int, cache_salt: str
    ) -> AsyncGenerator[Delta]:
        mailbox = _Mailbox(asyncio.get_running_loop())
        self._engine.post(
            lambda session: self._open(session, mailbox, prompt, sampling, with_text, priority, cache_salt)
        )
        unfinished = sampling.n
        try:
            while unfinished:
                for delta in await mailbox.take():
                    unfinished -= delta.ended is not None
                    yield delta
        finally:
            mailbox.closed = True
            with suppress(EngineError):  # closed: then nothing runs any more
                self._engine.post(lambda session: self._forget(session, mailbox))

    # --- in the engine thread -------------------------------------------------------------------------------------

    def _open(
        self,
        session: Session,
        mailbox: _Mailbox,
        prompt: EncodedPrompt,
        sampling: SamplingParams,
        with_text: bool,
        priority: int,
        cache_salt: str,
    ) -> None:
        if mailbox.closed:
            return
        self._mailboxes.add(mailbox)
        try:
            mailbox.request_ids = session.open(
                prompt.ids,
                sampling,
                mailbox.news.append,
                with_text=with_text,
                priority=priority,
                cache_salt=cache_salt,
            )
        except Exception as error:
            mailbox.failure = error
            self._deliver(session)

    def _forget(self, session: Session, mailbox: _Mailbox) -> None:
        session.abort(mailbox.request_ids)
        self._mailboxes.discard(mailbox)

    def _deliver(self, session: Session) -> None:
        """Hand the news of a step to the event loops, with one call each."""
        full: dict[asyncio.AbstractEventLoop, list[_Mailbox]] = {}
        for mailbox in self._mailboxes:
            if mailbox.news or mailbox.failure:
                full.setdefault(mailbox.loop, []).append(mailbox)
        for loop, mailboxes in full.items():
            posts = [mailbox.seal() for mailbox in mailboxes]
            try:
                loop.call_soon_threadsafe(_receive, posts)
            except RuntimeError:  # the loop was closed, and nobody waits
                for mailbox in mailboxes:
                    self._forget(session, mailbox)

    def _end(self, reason: str) -> None:
        for mailbox in self._mailboxes:
            mailbox.failure = EngineError(reason)
            with suppress(RuntimeError):
                mailbox.loop.call_soon_threadsafe(_receive, [mailbox.seal()])


class _Mailbox:
    """Between the engine thread, which fills `news`, and one task of `loop`, which takes what was received."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.closed = False  # the task has gone
        self.request_ids: list[int] = []
        self.news: list[Delta] = []  # of the step that is running
        self.failure: Exception | None = None
        self._received: list[Delta] = []
        self._failed: Exception | None = None
        self._arrived = asyncio.Event()

    def seal(self) -> _Post:
        """In the engine thread: what has come since the last time. `news` stays the same list, the sink."""
        post = self, self.news.copy(), self.failure
        self.news.clear()
        return post

    def receive(self, deltas: list[Delta], failure: Exception | None) -> None:
        self._received += deltas
        self._failed = failure
        self._arrived.set()

    async def take(self) -> list[Delta]:
        """All deltas received since the last call; waits for the first. Raises what the engine failed with."""
        await self._arrived.wait()
        self._arrived.clear()
        if not self._received and self._failed is not None:
            raise self._failed
        received, self._received = self._received, []
        if self._failed is not None:
            self._arrived.set()
        return received


_Post = tuple[_Mailbox, list[Delta], Exception | None]


def _receive(posts: list[_Post]) -> None:
    for mailbox, deltas, failure in posts:
        mailbox.receive(deltas, failure)

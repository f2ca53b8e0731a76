"""The engine as a library: `LLM` runs it in the caller's thread, with no other process."""

from __future__ import annotations

import gc
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from engine_core.collect import Collector, stream_output
from engine_core.options import make_config, python_names, resolve_path
from engine_core.outputs import EngineError, RequestOutput, StreamOutput
from engine_core.progress import BatchProgress, load_progress
from engine_core.prompts import (
    EncodedPrompt,
    Message,
    Prompt,
    as_conversations,
    as_params,
    as_prompts,
    encode_any,
    encode_chat,
    encode_prompt,
    wants_text,
)
from engine_core.session import Delta, Session
from engine_core.text_side import TextSide
from ipc.messages import ChatPrompt, EngineStats, TextPrompt
from ipc.recorder.nvtx import with_nvtx
from ipc.recorder.ring import Recorder
from ipc.sampling import SamplingParams

_PATIENCE = 0.1  # seconds that a Ctrl-C may wait for other threads' steps
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model.

    `model`: a .gguf file, a directory in Hugging Face layout, an alias or a hub id. `options`: the fields of
    `ipc.config.EngineOptions`. `chat_template`: a Jinja file instead of the model's. `progress` shows progress bars,
    on a terminal only.

    Several threads may use one `LLM`; their requests are batched. Close it, or use it as a context manager.

    Raises ValueError naming the field, the value and the bound, or what is wrong with the model.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, progress: bool = True, **options: Any) -> None:
        with load_progress(progress) as report, no_collections():
            from engine_core.build import build_engine

            path = resolve_path(model, report)
            self._text = TextSide(path, chat_template)
            with python_names():
                engine = build_engine(make_config(path, options), report, with_nvtx(Recorder()))
        self.facts = engine.facts
        self._progress = progress
        self._session = Session(engine, self._text)
        self._lock = threading.RLock()  # the garbage collector may close a stream while this thread is inside
        self._inside = False
        self._dropped: deque[list[int]] = deque()  # ids of requests whose callers have gone
        self._closed = False

    # --- whole answers --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer all `prompts` (a text, a list of token ids, or a list of those), in their order.

        `params` is one for all, or one for each. A prompt that fails inside the engine fails alone: its choices have
        the finish reason "error". The answers to prompts of ids are decoded only if their `text` is read.

        Raises ValueError if any prompt or parameter is out of bounds; nothing is left running then.
        """
        given = as_prompts(prompts)
        names = ["prompts"] if len(given) == 1 else [f"prompts[{index}]" for index in range(len(given))]
        encoded = [encode_prompt(self._text, prompt, name) for prompt, name in zip(given, names, strict=True)]
        return self._run(encoded, params, priority, cache_salt, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, rendered with the model's chat template."""
        encoded = [
            encode_chat(
                self._text,
                ChatPrompt(
                    messages=conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    template_kwargs=template_kwargs or {},
                ),
            )
            for conversation in as_conversations(messages)
        ]
        return self._run(encoded, params, priority, cache_salt, progress)

    # --- piece by piece -------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, text: bool = True
    ) -> Iterator[StreamOutput]:
        """The answer to one text, list of token ids, or conversation, as it is made.

        Closing the iterator ends the request. `text=False` streams the answer to token ids as ids alone.

        Raises ValueError as `generate` does, and EngineError (while iterating) if the request fails.
        """
        encoded = encode_any(self._text, prompt)
        sampling = as_params(params, 1)[0]
        return self._stream(encoded, sampling, text or wants_text(encoded, sampling))

    # --- conveniences ---------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, as a prompt would get them."""
        return self._text.encode(TextPrompt(text, add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._text.decode(ids, (), skip_special_tokens)

    def stats(self) -> EngineStats:
        """Requests and KV blocks as they are now."""
        with self._lock:
            return self._session.engine.stats()

    def close(self) -> None:
        """End all requests. The memory is given back when the object goes."""
        with self._exclusive(closing=True):
            self._closed = True
            self._session.abort_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- the loop -------------------------------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[EncodedPrompt],
        params: Params,
        priority: int,
        cache_salt: str,
        progress: bool | None,
    ) -> list[RequestOutput]:
        collectors: list[Collector] = []
        try:
            for prompt, sampling in zip(prompts, as_params(params, len(prompts)), strict=True):
                with_text = wants_text(prompt, sampling)
                collector = Collector(prompt, sampling, self._text, with_text)
                collectors.append(collector)
                with self._exclusive():
                    collector.request_ids = self._session.open(
                        prompt.ids,
                        sampling,
                        collector.add,
                        with_text=with_text,
                        priority=priority,
                        cache_salt=cache_salt,
                    )
            shown = self._progress if progress is None else progress
            with BatchProgress(len(collectors), shown) as bar, deferred_interrupts() as raise_if_pressed:
                waiting = deque(collectors)
                while waiting:
                    if waiting[0].done:
                        waiting.popleft()
                        continue
                    self._step_unless(lambda: waiting[0].done, raise_if_pressed)
                    bar.update(collectors)
            return [collector.output() for collector in collectors]
        finally:
            self._abort([request_id for collector in collectors for request_id in collector.request_ids])

    def _stream(self, prompt: EncodedPrompt, sampling: SamplingParams, with_text: bool) -> Iterator[StreamOutput]:
        deltas: deque[Delta] = deque()
        request_ids: list[int] = []
        unfinished = sampling.n
        try:
            with self._exclusive():
                request_ids = self._session.open(prompt.ids, sampling, deltas.append, with_text=with_text)
            while unfinished:
                while not deltas:
                    with deferred_interrupts() as raise_if_pressed:
                        self._step_unless(lambda: bool(deltas), raise_if_pressed)
                delta = deltas.popleft()
                unfinished -= delta.ended is not None
                yield stream_output(delta)
        finally:
            self._abort(request_ids)

    def _step_unless(self, served: Callable[[], bool], raise_if_pressed: Callable[[], None]) -> None:
        """One step, unless another thread's step has already brought what this one is waiting for."""
        while not self._lock.acquire(timeout=_PATIENCE):
            raise_if_pressed()
        try:
            self._enter()
            try:
                if not served():
                    if not self._session.has_work:
                        raise EngineError("the LLM was closed while requests were running")
                    self._session.step()
            finally:
                self._leave()
        finally:
            self._lock.release()
        raise_if_pressed()

    def _abort(self, request_ids: list[int]) -> None:
        self._dropped.append(request_ids)
        with self._lock:
            if not self._inside:  # else this came from the garbage collector in the middle of a step, and waits for it
                with self._exclusive(closing=True):
                    pass

    @contextmanager
    def _exclusive(self, closing: bool = False) -> Iterator[None]:
        """The session for this thread alone, and Ctrl-C only after it: a step is never left half done."""
        with self._lock, deferred_interrupts():
            self._enter(closing)
            try:
                yield
            finally:
                self._leave()

    def _enter(self, closing: bool = False) -> None:
        if self._closed and not closing:
            raise EngineError("the LLM is closed")
        self._inside = True

    def _leave(self) -> None:
        while self._dropped:
            self._session.abort(self._dropped.popleft())
        self._inside = False


@contextmanager
def no_collections() -> Iterator[None]:
    """Imports make hundreds of thousands of objects that stay: looking for garbage among them takes a tenth as long
    again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the block, or where the block calls what it is given."""
    default = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield lambda: None
        return
    pressed = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    def raise_if_pressed() -> None:
        nonlocal pressed
        if pressed:
            pressed = False  # it is told once
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield raise_if_pressed
    finally:
        signal.signal(signal.SIGINT, default)
        raise_if_pressed()

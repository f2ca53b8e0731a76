"""The other processes, played in threads of the test over the real sockets; and the frontend in a thread of its own.

What a request gets back is written in its prompt: "/hold" answers nothing, "/endless" answers until aborted, and so on
(see `Fake._play`). Anything else gets TOKENS, cut by max_tokens.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from frontend.app import App
from frontend.backend import Backend
from frontend.metrics import Metrics
from frontend.server import listen, serve
from ipc.aio import AsyncReceiver
from ipc.buckets import STEP_SECONDS, STEP_TOKENS
from ipc.channel import Receiver, Sender, connect
from ipc.codec import pack_ids, pack_request_ids, unpack_ids, unpack_prompt
from ipc.config import Endpoints, FrontendProcessConfig
from ipc.messages import (
    Abort,
    ChatPrompt,
    Decode,
    Decoded,
    Deltas,
    Detail,
    DeviceUsage,
    Encode,
    Encoded,
    Ended,
    EngineMessage,
    EngineStats,
    Error,
    FinishReason,
    FrontendMessage,
    ListRequests,
    ModelReady,
    Opened,
    Profile,
    Profiled,
    Prompt,
    Rejected,
    RequestList,
    RequestState,
    Shutdown,
    Submit,
    TextLogprob,
    TextPrompt,
    TokenizerMessage,
    TokenPrompt,
    Usage,
)
from ipc.recorder.ring import Recorder

TOKENS = ["Hel", "lo", " wörld", "", " 你好", " 🙂", '\n"quoted"', " end"]
COUNT = 20_000
VOCAB_SIZE, MAX_MODEL_LEN = 1000, 512
MODEL = "fake-model"


def text_of(prompt: Prompt) -> str:
    match prompt:
        case ChatPrompt():
            return str(prompt.messages[-1]["content"])
        case TextPrompt():
            return prompt.text
        case TokenPrompt():
            return " ".join(map(str, unpack_ids(prompt.ids)))


def logprob(token_id: int, text: str, num_top: int) -> TextLogprob:
    top = [(token_id + i, text if i == 0 else f"alt{i}", b"", -0.5 - i) for i in range(num_top)]
    return TextLogprob(token_id, text, text.encode(), -0.5, top, 1)


class Fake:
    """Tokenizer, engine and detokenizer at once."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.submits: deque[Submit] = deque()
        self.aborts: deque[int] = deque()
        self.dropped: deque[int] = deque()  # ids of aborts that reached the tokenizer
        self.held: deque[Encode] = deque()
        self.beating = True  # the engine's heartbeat
        self.has_profiler = True
        self.profiled: list[bool] = []
        self.listing = True  # it says which requests it has
        self.questions = 0
        self._aborted: set[int] = set()
        self._frontend = Sender(endpoints.frontends[0])
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._tokenizer: Receiver[TokenizerMessage] = Receiver(endpoints.tokenizers[0], TokenizerMessage)
        self._engine: Receiver[EngineMessage] = Receiver(endpoints.engine, EngineMessage)
        self._threads = [
            threading.Thread(target=self._loop, args=(self._tokenizer, self._on_tokenizer), daemon=True),
            threading.Thread(target=self._loop, args=(self._engine, self._on_engine), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        for receiver in (self._tokenizer, self._engine):
            receiver.wake()
        for thread in self._threads:
            thread.join()
        for receiver in (self._tokenizer, self._engine):
            receiver.close()
        self._frontend.close()

    def send(self, message: Any) -> None:
        with self._sending:
            self._frontend.send(message)

    def ready(self) -> None:
        facts = {"peaks": {"bytes": 2e9, "flops": 1e10}, "pids": {"frontend": os.getpid()}}
        self.send(ModelReady(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, facts=facts))

    def last(self) -> Submit:
        return self.submits[-1]

    def wait_for_aborts(self, ids: set[int], seconds: float = 60.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if ids <= set(self.aborts):
                return True
            time.sleep(0.005)
        return False

    def _loop(self, receiver: Receiver[Any], handle: Callable[[Any], None]) -> None:
        while not self._stop.is_set():
            for message in receiver.drain():
                handle(message)
            receiver.wait(0.5)
            if self.beating and receiver is self._engine:
                self.send(stats())

    def _on_engine(self, message: EngineMessage) -> None:
        match message:
            case Abort():
                self._aborted.update(message.request_ids)
                self.aborts.extend(message.request_ids)
            case ListRequests() if self.listing:
                self.questions += 1
                requests = [
                    RequestState(request_id, "decode", 1_500_000_000, 3, 7, 4)
                    for submit in list(self.submits)
                    for request_id in submit.request_ids
                ]
                self.send(RequestList(question=message.question, total=len(requests), requests=requests))
            case Profile():
                self.profiled.append(message.on)
                error = None if self.has_profiler else Error(400, "there is no CUDA device here", code="not_supported")
                self.send(Profiled(call_id=message.call_id, error=error))

    def _on_tokenizer(self, message: TokenizerMessage) -> None:
        if isinstance(message, Submit | Encode):  # tests look at what is in the prompt
            message = msgspec.structs.replace(message, prompt=unpack_prompt(message.prompt))
        match message:
            case Submit():
                self.submits.append(message)
                self._play(message)
            case Encode():
                text = text_of(message.prompt)
                if text == "/hold":
                    self.held.append(message)
                elif text == "/reject":
                    self.send(Encoded(call_id=message.call_id, error=Error(400, "template: no", param="messages")))
                else:
                    ids = [ord(c) % VOCAB_SIZE for c in text]
                    self.send(Encoded(call_id=message.call_id, ids=pack_ids(ids), tokens=list(text)))
            case Abort():
                self.dropped.extend(message.request_ids)
            case Decode():
                self.send(Decoded(call_id=message.call_id, text="".join(map(chr, unpack_ids(message.ids)))))

    def _play(self, submit: Submit) -> None:
        text = text_of(submit.prompt)
        if text == "/hold":
            return
        if text == "/reject":
            self.send(Rejected(request_ids=submit.request_ids, error=Error(400, "no template", param="messages")))
        elif text == "/too-long":
            error = Error(
                400, "prompt has 600 tokens, the context 512", param="messages", code="context_length_exceeded"
            )
            for request_id in submit.request_ids:
                self._row(request_id, "", 0, ended=Ended("rejected", Usage(600, 0), error=error))
        elif text == "/fail-late":
            self._row(submit.request_ids[0], "partial", 1, opened=True)
            time.sleep(0.2)
            self._row(submit.request_ids[0], "", 0, ended=Ended("error", Usage(3, 1), error=Error(500, "NaN in a row")))
        elif text in ("/endless", "/flood"):
            threading.Thread(target=self._endless, args=(submit, text == "/flood"), daemon=True).start()
        elif text == "/count":
            threading.Thread(target=self._count, args=(submit,), daemon=True).start()
        elif text == "/slow":
            threading.Thread(target=self._answer, args=(submit, 0.05), daemon=True).start()
        else:
            self._answer(submit, 0.0)

    def _endless(self, submit: Submit, flood: bool) -> None:
        first = True
        while not self._stop.is_set() and not self._aborted.issuperset(submit.request_ids):
            for request_id in submit.request_ids:
                self._row(request_id, "x" * 4000 if flood else "tick ", 1, opened=first)
            first = False
            time.sleep(0.0005 if flood else 0.005)

    def _count(self, submit: Submit) -> None:
        """COUNT numbers, more than sockets' buffers hold, as fast as they can be sent."""
        (request_id,) = submit.request_ids
        for i in range(COUNT):
            self._row(request_id, f"{i:<200}", 1, opened=i == 0)
        self._row(request_id, "", 0, ended=Ended("stop", Usage(1, COUNT)))

    def _answer(self, submit: Submit, pause: float) -> None:
        sampling = submit.sampling
        limit = len(TOKENS) if sampling.max_tokens is None else min(sampling.max_tokens, len(TOKENS))
        reason: FinishReason = "length" if limit < len(TOKENS) or sampling.max_tokens == limit else "stop"
        echo = text_of(submit.prompt) if submit.echo else ""
        num_prompt = len(text_of(submit.prompt)) or 1
        prompt_rows: list[TextLogprob | None] = []
        if sampling.prompt_logprobs is not None:
            prompt_rows = [TextLogprob(1, text_of(submit.prompt)[:1], b"", None)]
            prompt_rows += [logprob(ord(c) % 100, c, sampling.prompt_logprobs) for c in text_of(submit.prompt)[1:]]
        for i in range(limit):
            for request_id in submit.request_ids:
                rows = [] if sampling.logprobs is None else [logprob(10 + i, TOKENS[i], sampling.logprobs)]
                self._row(
                    request_id, (echo if i == 0 else "") + TOKENS[i], 1, opened=i == 0, logprobs=rows,
                    prompt_logprobs=prompt_rows if i == 0 else [], num_prompt=num_prompt,
                )  # fmt: skip
            time.sleep(pause)
        stop_reason = sampling.stop[0] if sampling.stop and reason == "stop" else None
        for request_id in submit.request_ids:
            ended = Ended(reason, Usage(num_prompt, limit, 2), stop_reason)
            self._row(
                request_id,
                echo if limit == 0 else "",
                0,
                ended=ended,
                prompt_logprobs=prompt_rows if limit == 0 else [],
            )

    def _row(
        self,
        request_id: int,
        text: str,
        count: int,
        *,
        opened: bool = False,
        num_prompt: int = 3,
        logprobs: list[TextLogprob] | None = None,
        prompt_logprobs: list[TextLogprob | None] | None = None,
        ended: Ended | None = None,
    ) -> None:
        details = []
        if opened or logprobs or prompt_logprobs or ended:
            news = Opened(request_id, 0, num_prompt, 2, 1_000_000, b"") if opened else None
            details = [Detail(0, news, logprobs or [], prompt_logprobs or [], ended)]
        self.send(Deltas(request_ids=pack_request_ids([request_id]), num_tokens=[count], texts=[text], details=details))


USAGE = DeviceUsage(
    busy_seconds=8.0,
    idle_seconds={"schedule": 0.25, "launch": 0.5, "collect": 0.25, "input": 0.5, "nothing": 2.5},
    bytes=4e9,
    flops=8e9,
    step_seconds=9.0,
    step_tokens=5000,
    steps_by_seconds=[0] * 10 + [100] + [0] * (len(STEP_SECONDS) - 10),
    steps_by_tokens=[60, 40] + [0] * (len(STEP_TOKENS) - 1),
)


def stats(step: int = 1, running: int = 0, waiting: int = 0, **fields: Any) -> EngineStats:
    known = {
        "kv_blocks_total": 100, "kv_blocks_free": 60, "kv_blocks_cached": 15, "prompt_tokens": 11, "output_tokens": 12,
        "prefix_queries": 13, "prefix_hits": 14, "preemptions": 15, "aborts": 16, "step_seconds": 0.25,
        "usage": USAGE,
    }  # fmt: skip
    return EngineStats(step=step, running=running, waiting=waiting, **{**known, **fields})


class FakeServer:
    """The real frontend on a free port, in a thread, with a `Fake` behind it."""

    def __init__(self, run_dir: Path, *, ready: bool = True, recorder: Recorder | None = None, **settings: Any) -> None:
        endpoints = Endpoints.make(lambda name: f"ipc://{run_dir}/{name}")
        known: dict[str, Any] = {"served_model_name": MODEL, "port": 0, "model_aliases": ("alias",)}
        self.config = FrontendProcessConfig(index=0, endpoints=endpoints, **{**known, **settings})
        self.inbox: Receiver[FrontendMessage] = Receiver(endpoints.frontends[0], FrontendMessage)
        self.fake = Fake(endpoints)
        self.sock = listen(self.config.host, self.config.port)
        self.port = int(self.sock.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._recorder = recorder
        self._started = threading.Event()
        self.failure: Exception | None = None  # what would have ended the process
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self._started.wait(60)
        if ready:
            self.fake.ready()
            self.fake.send(stats())
            self.wait_until_ready()

    def _serve(self) -> None:
        try:
            uvloop.run(self._run())
        except Exception as error:
            self.failure = error

    async def _run(self) -> None:
        outboxes = connect(self.config.endpoints, "tokenizers", "engine", "frontends")
        metrics = Metrics(MODEL)
        self.backend = Backend(self.config, outboxes, metrics, self._recorder)
        inbox = AsyncReceiver(self.inbox)
        asyncio.get_running_loop().call_soon(self._started.set)
        try:
            await serve(
                App(self.config, self.backend, metrics), self.backend, inbox, self.sock, self.config.grace_seconds
            )
        finally:
            inbox.close()
            for outbox in outboxes.values():
                outbox.close()

    def wait_until_ready(self) -> None:
        end = time.monotonic() + 60
        while self.backend.model is None or self.backend.stalled():
            assert time.monotonic() < end, "the frontend did not hear ModelReady"
            time.sleep(0.002)

    def close(self) -> None:
        if self.thread.is_alive():
            self.fake.send(Shutdown())
        self.thread.join(60)
        assert not self.thread.is_alive(), "the frontend did not stop"
        self.fake.close()

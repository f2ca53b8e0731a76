"""Long texts and large chats do not hold up short ones, and get the ids they would have got."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import msgspec
import pytest

from ipc.actor import run
from ipc.codec import pack_ids, pack_prompt
from ipc.memory import MemoryChannel
from ipc.messages import (
    Abort,
    ChatPrompt,
    Decode,
    Encode,
    EngineMessage,
    FrontendMessage,
    Generate,
    Rejected,
    Shutdown,
    Submit,
    TextPrompt,
    TokenizerMessage,
    TokenPrompt,
)
from ipc.sampling import SamplingParams
from tokenizer_proc.actor import TokenizerActor
from tokenizer_proc.encode import LONG_CHARS, from_bytes
from tokenizer_proc.lane import Work
from tokenizer_proc.lanes import LARGE_CHAT_BYTES, LONG_BYTES, Lanes, size_of
from tokenizer_proc.model import TextModel

DEADLINE_S = 120.0
SHORT, LONG = TextPrompt("hello world"), TextPrompt("hello world, " * LONG_CHARS)


def submit(prompt: Any, request_id: int) -> Submit:
    packed = pack_prompt(prompt)
    return Submit(request_ids=[request_id], frontend=0, prompt=packed, sampling=SamplingParams(), arrival=0)


class HeldActor(TokenizerActor):
    """Waits before it answers, as one that has much to encode."""

    def __init__(self, model: TextModel) -> None:
        super().__init__(model)
        self.begun, self.go = threading.Event(), threading.Event()
        self.handled: list[Work] = []

    def handle(self, batch: list[Work]) -> Any:
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        self.handled += batch
        return super().handle(batch)


class PanickingActor(TokenizerActor):
    """As a library that panics in Rust: what it raises is no `Exception`."""

    def handle(self, batch: list[Work]) -> Any:
        raise KeyboardInterrupt


def test_a_panic_in_the_lane_ends_the_process(smollm2: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr("os._exit", lambda _: ended.set())
    panicking = PanickingActor(smollm2.for_another_thread())
    lanes = Lanes(TokenizerActor(smollm2), panicking, panicking, NoHelper(), lambda _: None)
    assert lanes.handle([submit(LONG, 1)]) == []
    assert ended.wait(DEADLINE_S)


class NoHelper:
    def begin(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def lanes(smollm2: TextModel) -> Any:
    """(inbox, engine's inbox, frontend's inbox, the actor of long texts), driven in a thread."""
    inbox: MemoryChannel[Any] = MemoryChannel(TokenizerMessage)
    engine: MemoryChannel[Any] = MemoryChannel(EngineMessage)
    frontend: MemoryChannel[Any] = MemoryChannel(FrontendMessage)
    held = HeldActor(smollm2.for_another_thread())
    actor = Lanes(TokenizerActor(smollm2), held, TokenizerActor(smollm2), NoHelper(), inbox.post)
    driver = threading.Thread(target=run, args=(actor, inbox, {"engine": engine, "frontend.0": frontend}))
    driver.start()
    yield inbox, engine, frontend, held
    held.go.set()
    inbox.send(Shutdown())
    driver.join(DEADLINE_S)
    assert not driver.is_alive()


def take(channel: MemoryChannel[Any], count: int) -> list[Any]:
    got: list[Any] = []
    while len(got) < count:
        assert channel.wait(DEADLINE_S)
        got += channel.drain()
    return got


def test_short_prompts_pass_a_long_one(lanes: Any) -> None:
    inbox, engine, _, held = lanes
    inbox.send(submit(LONG, 0))
    for request_id in range(1, 11):
        inbox.send(submit(SHORT, request_id))
    assert [message.request_id for message in take(engine, 10)] == list(range(1, 11))
    held.go.set()
    (late,) = take(engine, 1)
    assert isinstance(late, Generate)
    assert late.request_id == 0
    assert len(late.prompt_ids) > 4 * LONG_CHARS


def test_long_ones_keep_their_order_and_their_refusals(lanes: Any, smollm2: TextModel) -> None:
    inbox, engine, frontend, held = lanes
    assert smollm2.max_chars is not None
    for request_id in range(3):
        inbox.send(submit(LONG, request_id))
    inbox.send(submit(TextPrompt("x" * (smollm2.max_chars + 1)), 3))
    held.go.set()
    assert [message.request_id for message in take(engine, 3)] == [0, 1, 2]
    (refused,) = take(frontend, 1)
    assert isinstance(refused, Rejected)
    assert refused.error.code == "context_length_exceeded"


def test_what_a_client_left_behind_is_never_encoded(lanes: Any) -> None:
    inbox, engine, frontend, held = lanes
    inbox.send(submit(LONG, 0))
    assert held.begun.wait(DEADLINE_S)
    calls = [
        Encode(call_id=1, frontend=0, prompt=pack_prompt(LONG)),
        Decode(call_id=2, frontend=0, ids=pack_ids([5] * 100_000)),
    ]
    for message in (*calls, submit(LONG, 3), submit(LONG, 4)):
        inbox.send(message)
    inbox.send(Abort(request_ids=[0, 1, 2, 3, 99]))
    inbox.send(submit(SHORT, 5))
    assert [message.request_id for message in take(engine, 1)] == [5]
    held.go.set()
    # The one that was being encoded loses its answer, and the others are forgotten.
    assert [message.request_id for message in take(engine, 1)] == [4]
    assert [message.request_ids[0] for message in held.handled] == [0, 4]
    assert not frontend.drain()


def test_a_prompt_stays_while_one_of_its_answers_is_wanted(lanes: Any) -> None:
    inbox, engine, _, held = lanes
    for ids in ([0, 1], [2, 3]):
        inbox.send(msgspec.structs.replace(submit(LONG, 0), request_ids=ids))
    inbox.send(Abort(request_ids=[0]))
    inbox.send(Abort(request_ids=[2]))
    held.go.set()
    assert [message.request_id for message in take(engine, 4)] == [0, 1, 2, 3]  # the engine knows which have gone


@pytest.mark.parametrize("special", [True, False])
def test_ids_of_long_texts_are_those_of_a_plain_encode(smollm2: TextModel, special: bool, rng: random.Random) -> None:
    words = ["hello ", "世界", "🙂", "\n\n", "  ", "naïve", "<|im_start|>", "123456", "\u0301", "a" * 50]
    text = "".join(rng.choices(words, k=LONG_CHARS))
    ((_, generate),) = TokenizerActor(smollm2).handle([submit(TextPrompt(text, special), 1)])
    assert isinstance(generate, Generate)
    assert from_bytes(generate.prompt_ids) == smollm2.tokenizer.encode(text, add_special_tokens=special).ids


def test_what_is_short_long_and_large() -> None:
    sentence = {"role": "user", "content": "x" * 100}
    documents = {"documents": ["x" * LONG_BYTES]}
    for prompt, size in (
        (SHORT, "short"),
        (LONG, "long"),
        (TextPrompt("x" * (2 * LARGE_CHAT_BYTES)), "long"),
        (ChatPrompt([sentence]), "short"),
        (ChatPrompt([sentence] * 500), "long"),
        (ChatPrompt([sentence] * 5_000), "large"),
        (ChatPrompt([sentence], tools=[{"name": "x" * LONG_BYTES}]), "long"),
        (ChatPrompt([sentence], tools=[{"name": "x" * LARGE_CHAT_BYTES}]), "large"),
        (ChatPrompt([sentence], template_kwargs=documents), "long"),
        (TokenPrompt(pack_ids(range(10))), "short"),
        (TokenPrompt(pack_ids(range(10_000))), "short"),
        (TokenPrompt(pack_ids(range(100_000))), "long"),
    ):
        assert size_of(submit(prompt, 1)) == size, prompt
        assert size_of(Encode(call_id=1, frontend=0, prompt=pack_prompt(prompt))) == size
    assert size_of(Decode(call_id=1, frontend=0, ids=pack_ids(range(10)))) == "short"
    assert size_of(Decode(call_id=1, frontend=0, ids=pack_ids(range(100_000)))) == "long"


def test_nothing_is_posted_once_the_lanes_are_closed(smollm2: TextModel) -> None:
    """The inbox may be closed by then."""
    posted: list[Any] = []
    held = HeldActor(smollm2)
    lanes = Lanes(TokenizerActor(smollm2), held, held, NoHelper(), posted.append)
    lanes.handle([submit(LONG, 0), submit(LONG, 1)])
    assert held.begun.wait(DEADLINE_S)
    lanes.close()
    held.go.set()
    late = threading.Event()
    lanes.handle([submit(TextPrompt("x" * (LONG_BYTES + 1)), 2)])  # behind the first, if the thread still lives
    end = time.monotonic() + DEADLINE_S
    while not posted and time.monotonic() < end:
        late.wait(0.01)
    assert [envelope[1].request_id for answered in posted for envelope in answered.envelopes] == [2]

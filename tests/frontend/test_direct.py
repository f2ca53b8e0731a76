"""The short cut of a stream's plain text: the same bytes in the same order as the long way, in fewer writes."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from frontend.handle import Event, Handle
from frontend.openai.answer import Identity
from frontend.openai.job import Job
from frontend.stream import Chunks, DirectText
from ipc.messages import Detail, Ended, Opened, Usage
from ipc.sampling import SamplingParams

TEXTS = ["a", " wörld", "", "\n", '"', "\\", "\u2028", "🙂", "\0", "</script>", "x" * 5000, "\x7f"]


class Connection:
    """Keeps what is written, in one list with what the long way renders."""

    def __init__(self, written: list[bytes]) -> None:
        self.blocked = False
        self._written = written

    def write_chunk(self, data: bytes) -> None:
        self._written.append(data)

    def cut(self) -> None:
        raise AssertionError("nobody is too slow here")


def job(kind: Any, choices: int = 1) -> Job:
    return Job(
        kind=kind, prompts=[], sampling=SamplingParams(n=choices), stream=True, include_usage=False, echo=False,
        priority=0, cache_salt="", show_prompt_logprobs=False,
    )  # fmt: skip


def chunks(kind: Any, choices: int = 1) -> Chunks:
    asked = job(kind, choices)
    object.__setattr__(asked, "prompts", [None])
    return Chunks(asked, Identity("id-1", 1234, "m"))


def first(choice: int, text: str) -> Event:
    return Event(choice, text, 1, Detail(0, opened=Opened(1, 0, 1, 0, 0, b"")))


def contents(data: bytes) -> dict[int, str]:
    """Text per choice in a stretch of events."""
    texts: dict[int, str] = {}
    for event in data.decode().split("\n\n")[:-1]:
        if event == "data: [DONE]":
            continue
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_that_keeps_up_gets_the_bytes_of_the_long_way(kind: Any) -> None:
    written: list[bytes] = []
    long_way, short_cut = chunks(kind), chunks(kind)
    assert long_way.render([first(0, "Hel")]) == short_cut.render([first(0, "Hel")])
    direct = DirectText(short_cut, Connection(written))
    for text in TEXTS:
        assert direct.add(0, text)
        direct.flush()
    expected = [long_way.render([Event(0, text, 1, None)]) for text in TEXTS]
    assert written == [data for data in expected if data]


def test_what_arrives_together_goes_out_in_one_write() -> None:
    written: list[bytes] = []
    shown = chunks("completion", 3)
    shown.render([first(i, "") for i in range(3)])
    direct = DirectText(shown, Connection(written))
    assert [direct.add(choice, text) for choice, text in ((0, "a"), (2, "x"), (0, "b"), (2, ""))] == [True] + [
        False
    ] * 3
    direct.flush()
    (data,) = written
    assert data.count(b"data: ") == 2
    assert contents(data) == {0: "ab", 2: "x"}
    direct.flush()  # nothing is left
    assert len(written) == 1
    direct.add(1, "")
    direct.flush()
    assert len(written) == 1  # text that is not there is no event


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_any_mix_of_both_ways_is_in_order_and_complete(kind: Any) -> None:
    """Steps, details, a connection that is blocked now and then, several wake-ups in one: the text is the text."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(30):
        choices = rng.randrange(1, 4)
        written: list[bytes] = []
        connection, shown = Connection(written), chunks(kind, choices)
        handle = Handle(0, choices, 1 << 30)
        expected = dict.fromkeys(range(choices), "")

        async def route(
            handle: Handle = handle, shown: Chunks = shown, connection: Connection = connection, out: Any = written
        ) -> None:
            begun = False
            while not shown.finished:
                events = await handle.next()
                out.append(shown.render(events))
                if not begun:
                    begun = True
                    handle.begin(DirectText(shown, connection))
                await asyncio.sleep(0)

        reader = asyncio.ensure_future(route())
        opened: set[int] = set()
        shortcuts = 0
        for _ in range(60):
            connection.blocked = rng.random() < 0.2
            unflushed = []
            for _ in range(rng.randrange(1, 3)):  # steps in one wake-up
                for choice in range(choices):
                    text = rng.choice(TEXTS)
                    expected[choice] += text
                    direct = handle.direct
                    if choice in opened and direct is not None and not direct.blocked:
                        if direct.add(choice, text):
                            unflushed.append(direct)
                        shortcuts += 1
                    elif choice in opened and rng.random() < 0.9:
                        handle.push(Event(choice, text, 1, None))
                    else:
                        handle.push(first(choice, text))
                        opened.add(choice)
            for direct in unflushed:
                direct.flush()
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        for choice in range(choices):
            handle.push(Event(choice, "", 0, Detail(0, ended=Ended("stop", Usage(1, 1)))))
        await asyncio.wait_for(reader, 60)
        data = b"".join(written)
        assert contents(data) == expected
        assert data.endswith(b"data: [DONE]\n\n")
        assert shortcuts > 0


async def test_a_closed_handle_writes_no_more() -> None:
    written: list[bytes] = []
    shown = chunks("completion")
    handle = Handle(0, 1, 1 << 20)
    handle.begin(DirectText(shown, Connection(written)))
    waiting = asyncio.ensure_future(handle.next())
    await asyncio.sleep(0)
    direct = handle.direct
    assert direct is not None
    direct.add(0, "too late")
    handle.close()
    direct.flush()
    assert (await waiting, handle.direct, written) == ([], None, [])

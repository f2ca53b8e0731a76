"""Large chats, in the process beside: the same ids and refusals, and no more than one request hurt by its death."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ipc.codec import pack_prompt
from ipc.messages import Abort, ChatPrompt, Encode, Encoded, Error, Generate, Rejected, Submit
from ipc.sampling import SamplingParams
from tokenizer_proc import lane
from tokenizer_proc.actor import TokenizerActor
from tokenizer_proc.encode import encode_prompt, from_bytes
from tokenizer_proc.errors import PromptError
from tokenizer_proc.lane import Answered
from tokenizer_proc.lanes import LARGE_CHAT_BYTES, Lanes
from tokenizer_proc.model import TextModel
from tokenizer_proc.renderer.client import Renderer
from tokenizer_proc.renderer.handover import pack_model

DEADLINE_S = 120.0
USER = {"role": "user", "content": "größer 你好 🙂"}
LARGE = ChatPrompt([USER] * (LARGE_CHAT_BYTES // 20), tools=[{"name": "f", "parameters": {"a": [1, None, 2.5]}}])


@pytest.fixture
def renderer(smollm2: TextModel, tmp_path: Path) -> Iterator[Renderer]:
    smollm2.tokenizer.save(str(tmp_path / "tokenizer.json"))
    renderer = Renderer(pack_model(smollm2, str(tmp_path / "tokenizer.json")))
    yield renderer
    renderer.close()
    assert not children()


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it is just ending
            if "renderer" in " ".join(child.cmdline()):
                found.append(child)
    return found


def until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)


def test_the_same_ids_and_refusals(smollm2: TextModel, renderer: Renderer) -> None:
    assert renderer.encode(pack_prompt(LARGE)) == encode_prompt(smollm2, LARGE)
    (first,) = children()
    for bad in (
        ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]),
        ChatPrompt([USER], template_kwargs={"messages": []}),
        ChatPrompt([USER] * 20_000),
    ):
        with pytest.raises(PromptError) as here:
            encode_prompt(smollm2, bad)
        with pytest.raises(PromptError) as there:
            renderer.encode(pack_prompt(bad))
        assert there.value.error == here.value.error
    assert children() == [first]


def test_a_killed_process_is_started_again(smollm2: TextModel, renderer: Renderer) -> None:
    prompt = pack_prompt(ChatPrompt([USER]))
    expected = renderer.encode(prompt)
    for _ in range(2):
        (process,) = children()
        process.kill()
        process.wait(DEADLINE_S)
        assert renderer.encode(prompt) == expected


def test_one_that_cannot_start_costs_the_request_alone(
    smollm2: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = Renderer(pack_model(smollm2, str(tmp_path / "none")))

    def refused() -> Error:
        with pytest.raises(PromptError) as refused:
            missing.encode(pack_prompt(LARGE))
        return refused.value.error

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    no_file = refused()
    assert (no_file.status, no_file.code) == (503, "overloaded")
    assert "does not start" in no_file.message
    assert "No such file" in caplog.text
    monkeypatch.setattr("subprocess.Popen", fail)
    assert refused() == no_file
    assert "no more processes" in caplog.text


@pytest.fixture
def lanes(smollm2: TextModel, renderer: Renderer) -> Iterator[tuple[Lanes, list[Answered]]]:
    posted: list[Answered] = []
    large = TokenizerActor(smollm2, encode=renderer.encode)
    lanes = Lanes(TokenizerActor(smollm2), TokenizerActor(smollm2), large, renderer, posted.append)
    yield lanes, posted
    lanes.close()


def submit(prompt: ChatPrompt, request_id: int) -> Submit:
    packed = pack_prompt(prompt)
    return Submit(request_ids=[request_id], frontend=0, prompt=packed, sampling=SamplingParams(), arrival=0)


def test_answers_and_refusals_of_a_large_chat(smollm2: TextModel, lanes: tuple[Lanes, list[Answered]]) -> None:
    actor, posted = lanes
    bad = ChatPrompt([USER] * 20_000 + [{"role": "user", "content": [{"type": "image_url"}]}])
    assert actor.handle([submit(LARGE, 1), submit(bad, 2)]) == []
    assert actor.handle([Encode(call_id=3, frontend=0, prompt=pack_prompt(LARGE))]) == []
    until(lambda: len(posted) == 3)
    (generate, rejected, encoded) = (answered.envelopes[0][1] for answered in posted)
    assert isinstance(generate, Generate)
    assert from_bytes(generate.prompt_ids) == encode_prompt(smollm2, LARGE)
    assert isinstance(rejected, Rejected)
    assert rejected.error.param == "messages"
    assert isinstance(encoded, Encoded)
    assert encoded.ids == generate.prompt_ids


def test_a_client_that_leaves_stops_the_work(lanes: tuple[Lanes, list[Answered]], renderer: Renderer) -> None:
    actor, posted = lanes
    endless = ChatPrompt([USER] * 300_000)  # refused after some seconds
    actor.handle([submit(endless, 1)])
    until(children)
    (process,) = children()
    actor.handle([Abort(request_ids=[1])])
    process.wait(DEADLINE_S)
    actor.handle([submit(LARGE, 2)])
    until(lambda: posted)
    assert isinstance(posted[0].envelopes[0][1], Generate)


def test_it_ends_when_there_is_nothing_to_do(
    lanes: tuple[Lanes, list[Answered]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "IDLE_S", 0.2)
    actor, posted = lanes
    for count in (1, 2):
        actor.handle([submit(LARGE, count)])
        until(lambda count=count: len(posted) == count)
        until(lambda: not children())


def test_short_prompts_are_answered_at_once(lanes: tuple[Lanes, list[Answered]]) -> None:
    """In the meantime Python's lock is free: the process's own thread goes on working."""
    actor, posted = lanes
    nested = ChatPrompt([USER], tools=[{"a": {"b": [1, {"c": None}]}}] * 300_000)
    small = submit(ChatPrompt([USER]), 2)
    actor.handle([submit(LARGE, 0)])
    until(lambda: posted)  # it has started
    actor.handle([submit(nested, 1)])
    count = 0
    while len(posted) < 2:
        assert len(actor.handle([small])) == 1
        count += 1
        threading.Event().wait(0.001)
    assert count > 20

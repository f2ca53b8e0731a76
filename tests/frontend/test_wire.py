"""The bytes on the wire: order of events, headers, schema of every chunk."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from frontend.handle import Event
from frontend.stream import coalesce
from ipc.messages import Detail
from tests.frontend.fake import MODEL, TOKENS

NULL = {"type": "null"}
LOGPROBS = {"anyOf": [NULL, {"type": "object"}]}
FINISH = {"enum": [None, "stop", "length"]}
USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
}


def chunk_schema(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices"],
        "additionalProperties": False,
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"const": MODEL},
            "usage": USAGE,
            "choices": {"type": "array", "maxItems": 1, "items": choice},
        },
    }


CHAT_CHUNK = chunk_schema(
    "chat.completion.chunk",
    {
        "type": "object",
        "required": ["index", "delta", "finish_reason", "logprobs"],
        "additionalProperties": False,
        "properties": {
            "index": {"type": "integer"},
            "delta": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}},
            },
            "finish_reason": FINISH,
            "stop_reason": {"type": ["string", "integer", "null"]},
            "logprobs": LOGPROBS,
        },
    },
)
COMPLETION_CHUNK = chunk_schema(
    "text_completion",
    {
        "type": "object",
        "required": ["index", "text", "finish_reason", "logprobs"],
        "additionalProperties": False,
        "properties": {
            "index": {"type": "integer"},
            "text": {"type": "string"},
            "finish_reason": FINISH,
            "stop_reason": {"type": ["string", "integer", "null"]},
            "logprobs": LOGPROBS,
        },
    },
)


def events_of(response: httpx.Response) -> list[str]:
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}


def test_order_of_a_chat_stream(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=chat(stream_options={"include_usage": True}, stop=["Z"]))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *events, done = events_of(response)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    for chunk in chunks:
        jsonschema.validate(chunk, CHAT_CHUNK)
    assert response.headers["x-request-id"] == chunks[0]["id"]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    contents = [choice["delta"] for choice in choices[1:-1]]
    assert all(list(delta) == ["content"] and delta["content"] for delta in contents)
    assert "".join(delta["content"] for delta in contents) == "".join(TOKENS)
    assert choices[-1]["delta"] == {}
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "Z")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 10
    assert all("usage" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_schema_of_completion_chunks(http: httpx.Client, n: int, logprobs: int | None) -> None:
    body = {"model": MODEL, "prompt": ["a", "bc"], "stream": True, "n": n, "logprobs": logprobs}
    *events, done = events_of(http.post("/v1/completions", json=body))
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    for chunk in chunks:
        jsonschema.validate(chunk, COMPLETION_CHUNK)
    for index in range(2 * n):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["text"] == ""
        assert "".join(choice["text"] for choice in mine) == "".join(TOKENS)


def test_role_comes_with_the_first_token_not_before(http: httpx.Client, server: Any) -> None:
    body = chat(messages=[{"role": "user", "content": "/slow"}])
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        first = next(response.iter_raw())
    assert first.count(b"data: ") == 2
    assert b'"role":"assistant"' in first
    assert b'"content":"Hel"' in first


def test_a_stream_refused_before_its_first_token_is_a_real_400(http: httpx.Client) -> None:
    for prompt, message in (("/reject", "no template"), ("/too-long", "600")):
        for stream in (True, False):
            response = http.post(
                "/v1/chat/completions", json=chat(messages=[{"role": "user", "content": prompt}], stream=stream)
            )
            assert response.status_code == 400
            assert response.headers["content-type"] == "application/json"
            assert message in response.json()["error"]["message"]


def test_an_error_in_mid_stream_is_an_event_and_then_done(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=chat(messages=[{"role": "user", "content": "/fail-late"}]))
    assert response.status_code == 200
    *_, error, done = events_of(response)
    assert done == "[DONE]"
    assert json.loads(error) == {
        "error": {"message": "NaN in a row", "type": "server_error", "param": None, "code": None}
    }


def test_stream_false_is_not_sse(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=chat(stream=False))
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content)


def test_texts_that_piled_up_are_joined_per_choice() -> None:
    ended = Detail(0)
    events = [
        Event(0, "a", 1, None),
        Event(1, "x", 1, None),
        Event(0, "b", 1, None),
        Event(0, "c", 1, ended),
        Event(0, "d", 1, None),
        Event(1, "y", 1, None),
    ]
    assert coalesce(events) == [
        Event(0, "ab", 2, None),
        Event(1, "xy", 2, None),
        Event(0, "c", 1, ended),
        Event(0, "d", 1, None),
    ]

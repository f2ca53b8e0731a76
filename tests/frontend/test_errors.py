"""The catalogue of refusals: each names the field, the value and the bound, and is a 4xx with an error object."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import jsonschema
import pytest

from frontend.http import BODIES_AT_ONCE
from frontend.openai.job import MAX_VALUES
from tests.frontend.fake import MAX_MODEL_LEN, MODEL, FakeServer

ERROR = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
CHAT = '{"model": "fake-model", "messages": [{"role": "user", "content": "hi"}], %s}'
COMPLETION = '{"model": "fake-model", "prompt": "hi", %s}'

# JSON of a field, the field that the error names, and words its message must hold.
BOTH: list[tuple[str, str, list[str]]] = [
    ('"temperature": -0.5', "temperature", ["-0.5", "between 0 and 100"]),
    ('"temperature": "1"', "temperature", ['must be a number or null, got "1"']),
    ('"temperature": true', "temperature", ["a number", "got true"]),
    ('"top_p": 0', "top_p", ["above 0", "at most 1"]),
    ('"top_p": 1.5', "top_p", ["1.5"]),
    ('"top_k": -2', "top_k", ["-2", "between 0"]),
    ('"top_k": 2.5', "top_k", ["2.5", "an integer"]),
    ('"top_k": 1180591620717411303424', "top_k", ["1180591620717411303424"]),
    ('"min_p": 2', "min_p", ["2", "between 0 and 1"]),
    ('"presence_penalty": 3', "presence_penalty", ["3", "between -2 and 2"]),
    ('"frequency_penalty": -3', "frequency_penalty", ["-3"]),
    ('"repetition_penalty": 0', "repetition_penalty", ["above 0"]),
    ('"n": 0', "n", ["0", "between 1 and 128"]),
    ('"n": 1000000000', "n", ["1000000000"]),
    ('"n": true', "n", ["got true"]),
    ('"best_of": 3', "best_of", ["3"]),
    ('"max_tokens": -1', "max_tokens", ["-1"]),
    ('"max_tokens": "10"', "max_tokens", ['max_tokens must be an integer or null, got "10"']),
    ('"max_tokens": "a\\u2028ü"', "max_tokens", ['got "a\\u2028\\u00fc"']),
    ('"max_tokens": 9223372036854775808', "max_tokens", ["9223372036854775808"]),
    ('"min_tokens": 5, "max_tokens": 2', "min_tokens", ["5", "max_tokens (2)"]),
    ('"min_tokens": 99999999999', "min_tokens", ["99999999999"]),
    ('"logit_bias": {"-1": 1}', "logit_bias", ["-1"]),
    ('"logit_bias": {"1000": 1}', "logit_bias", ["1000", "vocabulary size (1000)"]),
    ('"logit_bias": {"2147483648": 1}', "logit_bias", ["2147483648"]),
    ('"logit_bias": {"9223372036854775808": 1}', "logit_bias", ["9223372036854775808"]),
    ('"logit_bias": {"5": 101}', "logit_bias", ["101", "between -100 and 100"]),
    ('"logit_bias": {"x": 1}', "logit_bias", ['a key of logit_bias must be an integer, got {"x": 1}']),
    ('"logit_bias": [1]', "logit_bias", ["[1]"]),
    ('"stop_token_ids": [-1]', "stop_token_ids", ["-1"]),
    ('"stop_token_ids": [1000]', "stop_token_ids", ["1000"]),
    ('"stop_token_ids": [1, "a"]', "stop_token_ids", ['stop_token_ids[1] must be an integer, got "a"']),
    ('"allowed_token_ids": []', "allowed_token_ids", ["non-empty"]),
    ('"stop": ""', "stop", ['""']),
    ('"stop": 5', "stop", ["must be a string, an array or null, got 5"]),
    ('"stop": [1]', "stop", ["1"]),
    (f'"stop": {json.dumps(["x"] * 65)}', "stop", ["65", "at most 64"]),
    ('"seed": 9223372036854775808', "seed", ["9223372036854775808"]),
    ('"seed": 1.5', "seed", ["1.5"]),
    ('"prompt_logprobs": 21', "prompt_logprobs", ["21", "between 0 and 20"]),
    ('"priority": 2147483648', "priority", ["2147483648"]),
    (f'"cache_salt": "{"x" * 1025}"', "cache_salt", ["1025", "1024"]),
    ('"stream": "yes"', "stream", ['must be true, false or null, got "yes"']),
    ('"stream_options": 1', "stream_options", ["1"]),
    ('"response_format": {"type": "json_schema"}', "response_format", ["json_schema"]),
    ('"response_format": {"type": "json_object"}', "response_format", ["json_object"]),
    ('"guided_json": {}', "guided_json", ["not supported"]),
    ('"bad_words": ["x"]', "bad_words", ["not supported"]),
    ('"model": "gpt-4"', "model", ['"gpt-4"', "fake-model"]),
    ('"model": 7', "model", ["7"]),
]
ONLY_CHAT: list[tuple[str, str, list[str]]] = [
    ('"messages": []', "messages", ["[]"]),
    ('"messages": "hi"', "messages", ['must be an array, got "hi"']),
    ('"messages": [1]', "messages", ["messages[0]", "1"]),
    ('"messages": [{"content": "x"}]', "messages", ["messages[0] must have the field role"]),
    ('"messages": [{"role": "wizard", "content": "x"}]', "messages", ["messages[0].role", "wizard"]),
    ('"messages": [{"role": "user"}]', "messages", ["messages[0].content", "null"]),
    ('"messages": [{"role": "user", "content": 5}]', "messages", ["messages[0].content", "5"]),
    (
        '"messages": [{"role": "user", "content": [{"type": "image_url"}]}]',
        "messages",
        ["content[0].type", "image_url"],
    ),
    ('"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]', "messages", ["input_audio"]),
    ('"messages": [{"role": "user", "content": [{"type": "text"}]}]', "messages", ["content[0].text"]),
    ('"logprobs": true, "top_logprobs": 21', "top_logprobs", ["21", "between 0 and 20"]),
    ('"logprobs": true, "top_logprobs": -1', "top_logprobs", ["-1"]),
    ('"top_logprobs": 2', "top_logprobs", ["logprobs", "2"]),
    ('"logprobs": 1', "logprobs", ["1"]),
    ('"max_completion_tokens": -1', "max_completion_tokens", ["-1"]),
    ('"tools": [{"a": 1}], "tool_choice": "required"', "tool_choice", ["required"]),
    ('"tool_choice": {"type": "function"}', "tool_choice", ["function"]),
    ('"functions": [{"name": "f"}]', "functions", ["not supported"]),
    ('"modalities": ["text", "audio"]', "modalities", ["audio"]),
    ('"chat_template": "{{ 1 }}"', "chat_template", ["chat_template"]),
    ('"chat_template_kwargs": {"chat_template": "x"}', "chat_template_kwargs", ["chat_template"]),
    ('"chat_template_kwargs": {"a": [18446744073709551616]}', "chat_template_kwargs", ["64 bits"]),
    (f'"chat_template_kwargs": {{"a": {"[" * 80}{"]" * 80}}}', "chat_template_kwargs", ["64 deep"]),
    (f'"tools": [{{"a": {2**70}}}]', "tools", ["64 bits"]),
    ('"continue_final_message": true, "add_generation_prompt": true', "continue_final_message", ["both"]),
]
ONLY_COMPLETIONS: list[tuple[str, str, list[str]]] = [
    ('"prompt": []', "prompt", ["[]"]),
    ('"prompt": [[]]', "prompt", ["prompt[0]", "[]"]),
    ('"prompt": 5', "prompt", ["5"]),
    ('"prompt": null', "prompt", ["null"]),
    ('"prompt": [1, "a"]', "prompt", ["prompt[0]", "1"]),
    ('"prompt": [1, -1]', "prompt", ["-1", "between 0 and 999"]),
    ('"prompt": [1000]', "prompt", ["1000", "999"]),
    ('"prompt": [[1], [1001]]', "prompt", ["prompt[1]", "1001"]),
    ('"prompt": [2147483648]', "prompt", ["2147483648"]),
    ('"prompt": [9223372036854775808]', "prompt", ["9223372036854775808"]),
    ('"prompt": [true]', "prompt", ["prompt[0]", "true"]),
    ('"prompt": [1.5]', "prompt", ["1.5"]),
    (f'"prompt": {json.dumps([1] * 513)}', "prompt", ["513", "512"]),
    (f'"prompt": {json.dumps(["x"] * 1025)}', "prompt", ["1025", "1024"]),
    (f'"prompt": {json.dumps(["x"] * 100)}, "n": 100', "n", ["100 times 100", "1024"]),
    ('"logprobs": 21', "logprobs", ["21", "between 0 and 20"]),
    ('"logprobs": true', "logprobs", ["got true"]),
    ('"suffix": "x"', "suffix", ["not supported"]),
]
CASES = (
    [("/v1/chat/completions", CHAT, *case) for case in BOTH + ONLY_CHAT]
    + [("/v1/completions", COMPLETION, *case) for case in BOTH + ONLY_COMPLETIONS]
)  # fmt: skip


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    jsonschema.validate(body, ERROR)
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("path", "template", "field", "param", "words"), CASES, ids=[f"{c[0][4:8]}-{c[2][:60]}" for c in CASES]
)
def test_bad_values(
    http: httpx.Client, server: FakeServer, path: str, template: str, field: str, param: str, words: list[str]
) -> None:
    before = len(server.fake.submits)
    response = http.post(path, content=template % field)
    error = refused(response, 404 if param == "model" and "gpt" in field else 400)
    assert error["param"] == param
    for word in [param, *words]:
        assert word in error["message"]
    assert error["message"].count("got ") <= 1
    assert "`" not in error["message"]
    assert len(error["message"]) < 400
    assert len(server.fake.submits) == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": "\xed\xa0\x80", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b"[" * 100_000,
        b'{"x":' * 1_000 + b"1" + b"}" * 1_000,
        b'{"prompt":' + b"[" * 1_000 + b"]" * 1_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x", "tool_calls": ['
        + b'{"a":' * 2000
        + b"1"
        + b"}" * 2000
        + b"]}]}",
    ],
    ids=lambda body: repr(body[:40]),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_requests(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body), 400)


def test_a_body_of_another_kind_is_told(http: httpx.Client) -> None:
    for body, message in (
        (b"[]", "the request body must be an object, got []"),
        (b"{}", "the request body must have the field messages, got {}"),
    ):
        assert refused(http.post("/v1/chat/completions", content=body), 400)["message"] == message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('"a\\u0000b"', "a\0b"),
        ('"\\ud83d\\ude42"', "🙂"),
        ('"x", "unknown": {"deep": [1, 1e5]}, "seed": 1, "seed": 2', "x"),
    ],
)
def test_odd_bodies_that_are_fine(http: httpx.Client, server: FakeServer, content: str, expected: str) -> None:
    response = http.post("/v1/completions", content=f'{{"prompt": {content}}}')
    assert response.status_code == 200
    assert server.fake.last().prompt.text == expected  # type: ignore[union-attr]


def test_wrong_paths_and_methods(http: httpx.Client) -> None:
    for path in (
        "/nothing",
        "/v1",
        "/v1/chat/completions/",
        "/V1/completions",
        "/v1//completions",
        "/%2e%2e/etc/passwd",
    ):
        assert "there is no" in refused(http.get(path), 404)["message"]
    for path, meant in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/metrics", "/metrics"),
    ):
        assert refused(http.post(path), 404)["message"] == f"there is no {path} here; did you mean {meant}?"
    for path in ("/v1/embeddings", "/x" * 5_000):
        assert "did you mean" not in refused(http.post(path), 404)["message"]
    for method, path, allow in (
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/health", "GET"),
        ("PUT", "/tokenize", "POST"),
    ):
        response = http.request(method, path)
        refused(response, 405)
        assert allow in response.headers["allow"]


def test_large_bodies_are_cut_off(server: FakeServer, make_server: Any) -> None:
    small = make_server(max_body_bytes=2000)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        with httpx.Client(base_url=small.url, trust_env=False) as http:
            body = json.dumps({"prompt": "x" * 3000}).encode()
            assert "2000" in refused(http.post(path, content=body), 413)["message"]
        with httpx.Client(base_url=small.url, trust_env=False) as http:  # no content-length: chunked
            refused(http.post(path, content=iter([body[:1500], body[1500:]])), 413)
    with httpx.Client(base_url=small.url, trust_env=False) as http:
        assert http.post("/v1/completions", json={"prompt": "x" * 100}).status_code == 200


def test_more_values_than_can_be_parsed_in_passing_are_refused(http: httpx.Client) -> None:
    for body in (b'{"prompt": [1%s]}' % (b",1" * (MAX_VALUES + 1)), b'{"x": [{}%s]}' % (b",{}" * (MAX_VALUES + 1))):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert str(MAX_VALUES) in refused(http.post(path, content=body), 413)["message"]


def test_large_bodies_together_are_bounded(make_server: Any) -> None:
    """Those whose answers are being made count as long as they are."""
    small = make_server(max_body_bytes=2000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2000\r\n\r\n"
    held = b'{"prompt": "/hold", "x": "' + b"x" * (2000 - 28) + b'"}'
    clients = [socket.create_connection(("127.0.0.1", small.port)) for _ in range(BODIES_AT_ONCE)]
    try:
        for client in clients:
            client.sendall(head + held)
        end = time.monotonic() + 60
        while len(small.fake.submits) < len(clients):
            assert time.monotonic() < end
            time.sleep(0.005)
        with httpx.Client(base_url=small.url, trust_env=False) as http:
            for path in ("/v1/completions", "/tokenize"):
                response = http.post(path, json={"prompt": "x"})
                assert refused(response, 503)["code"] == "overloaded"
                assert response.headers["retry-after"] == "1"
            clients.pop().close()
            while http.post("/v1/completions", json={"prompt": "x"}).status_code != 200:
                assert time.monotonic() < end
    finally:
        for client in clients:
            client.close()


def test_detokenize_takes_no_more_ids_than_the_context_holds(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [65] * MAX_MODEL_LEN}).status_code == 200
    error = refused(http.post("/detokenize", json={"tokens": [65] * (MAX_MODEL_LEN + 1)}), 400)
    assert (error["param"], error["code"]) == ("tokens", "context_length_exceeded")
    assert str(MAX_MODEL_LEN) in error["message"]


def test_huge_headers_are_refused(http: httpx.Client, server: FakeServer) -> None:
    response = http.get("/health", headers={"x": "y" * 200_000})
    assert response.status_code in (400, 431)
    jsonschema.validate(response.json(), ERROR)
    many = httpx.get(f"{server.url}/health", headers=[(f"x-{i}", "y" * 50) for i in range(3000)], trust_env=False)
    assert many.status_code in (400, 431)
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


def test_prompt_with_no_model_is_answered(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "x"}).json()["model"] == MODEL

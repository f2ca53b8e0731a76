"""Random bodies: whatever comes, the answer is a 200 or a 4xx with an error object, and it comes."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import jsonschema

from tests.frontend.fake import MODEL
from tests.frontend.test_errors import ERROR

SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, -1e308, 5e-324, 2**31, 2**31 - 1, 2**63, 2**70, -(2**70), "", "1",
    "x", "\0", "\n", "\u2028",
    "🙂", "𐍈" * 50, "auto", "none", [], {}, [[]], [0], [1, 2], [-1], [999], [1000], ["a"], ["", "a"],
    [None], [{}], {"a": 1}, {"1": 1}, {"1": -100.0}, {"type": "text"}, {"type": "json_object"}, {"include_usage": True},
    [{"role": "user", "content": "hi"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"role": 1}],
    {"role": "user"}, [[1, 2], [3]], ["a", [1]], [2**70], "x" * 5000,
]  # fmt: skip
FIELDS = [
    "model", "prompt", "messages", "stream", "stream_options", "n", "best_of", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "min_tokens",
    "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed",
    "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "skip_special_tokens", "add_special_tokens",
    "priority", "cache_salt", "tools", "tool_choice", "response_format", "chat_template", "chat_template_kwargs",
    "continue_final_message", "add_generation_prompt", "modalities", "audio", "functions", "function_call", "tokens",
    "return_token_strs", "user", "nonsense",
]  # fmt: skip
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65, 66]},
}


def mangle(rng: random.Random, body: bytes) -> bytes:
    """Cut, double, or overwrite a piece of the JSON."""
    at = rng.randrange(len(body))
    kind = rng.randrange(3)
    if kind == 0:
        return body[:at]
    if kind == 1:
        return body[:at] + body[at // 2 :]
    return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]


def test_random_bodies(http: httpx.Client) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    answered = 0
    for _ in range(800):
        path = rng.choice(PATHS)
        fields = dict(BASE[path])
        for name in rng.sample(FIELDS, rng.randrange(1, 4)):
            fields[name] = rng.choice(SCALARS)
        body = json.dumps(fields).encode()
        if rng.random() < 0.2:
            body = mangle(rng, body)
        response = http.post(path, content=body)
        if response.status_code == 200:
            answered += 1
        else:
            assert 400 <= response.status_code < 500, (body[:500], response.text)
            jsonschema.validate(response.json(), ERROR)
    assert answered > 40
    assert http.get("/ready").status_code == 200

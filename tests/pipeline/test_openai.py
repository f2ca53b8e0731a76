"""The official client against the real four processes: what each field does to the answer of a real model."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from frontend.topology import Server

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"
MESSAGES: list[Any] = [{"role": "user", "content": "Name three colours."}]
MAX_MODEL_LEN, EOS = 8192, 2


@pytest.fixture(scope="module")
def http(running_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running_server.url, trust_env=False, timeout=600) as http:
        yield http


@pytest.fixture(scope="module")
def client(running_server: Server) -> Iterator[openai.OpenAI]:
    http_client = openai.DefaultHttpxClient(trust_env=False, timeout=600)
    with openai.OpenAI(
        base_url=f"{running_server.url}/v1", api_key="x", max_retries=0, http_client=http_client
    ) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    extra = {"temperature": 0, "max_tokens": 6, **fields}
    return client.completions.create(model="smollm2", prompt=prompt, extra_body=extra)


def chat(client: openai.OpenAI, messages: Any = None, **fields: Any) -> Any:
    extra = {"temperature": 0, "max_tokens": 6, **fields}
    return client.chat.completions.create(model="smollm2", messages=messages or MESSAGES, extra_body=extra)


def text(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> str:
    return str(complete(client, prompt, **fields).choices[0].text)


def ids_of(http: httpx.Client, text: str) -> list[int]:
    answer = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    return list(answer["tokens"])


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> str:
    return text(client)


def test_joined_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
    messages: list[Any] = [{"role": "user", "content": "Say hello in Chinese and with an emoji."}]
    whole = client.chat.completions.create(model="smollm2", messages=messages, **fields)
    stream = list(
        client.chat.completions.create(
            model="smollm2", messages=messages, stream=True, stream_options={"include_usage": True}, **fields
        )
    )
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert joined == whole.choices[0].message.content
    assert joined
    usage = stream[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert stream[-2].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_async_client_and_many_at_once(running_server: Server, greedy: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{running_server.url}/v1",
        api_key="x",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=600),
    ) as client:

        async def one(stream: bool) -> str:
            answer: Any = await client.completions.create(
                model="smollm2", prompt=PROMPT, temperature=0, max_tokens=6, stream=stream
            )
            if not stream:
                return str(answer.choices[0].text)
            return "".join([chunk.choices[0].text async for chunk in answer])

        assert set(await asyncio.gather(*(one(i % 2 == 0) for i in range(8)))) == {greedy}


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_narrowest_sampling_is_greedy(client: openai.OpenAI, greedy: str, fields: dict[str, Any]) -> None:
    assert text(client, temperature=1.0, seed=1, **fields) == greedy


@pytest.mark.parametrize("fields", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"min_p": 0}], ids=str)
def test_off_is_off(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    assert text(client, temperature=1.2, seed=5, **fields) == text(client, temperature=1.2, seed=5)


def test_seed(client: openai.OpenAI) -> None:
    texts = [text(client, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_change_what_repeats(client: openai.OpenAI, name: str) -> None:
    prompt = "1 2 3 1 2 3 1 2 3 1 2"  # greedy, the answer goes on like that
    assert text(client, prompt, max_tokens=12, **{name: 2.0}) != text(client, prompt, max_tokens=12)


def test_logit_bias_and_allowed_ids(client: openai.OpenAI, http: httpx.Client) -> None:
    (blue,), (red,) = ids_of(http, " blue"), ids_of(http, " red")
    assert text(client, logit_bias={str(blue): 100}, max_tokens=3) == " blue blue blue"
    words = text(client, temperature=2.0, seed=3, allowed_token_ids=[blue, red], max_tokens=8).split()
    assert set(words) <= {"blue", "red"}
    assert len(words) == 8


def test_max_and_min_tokens(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=3)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")
    end_now = {"logit_bias": {str(EOS): 100}}
    answer = complete(client, **end_now)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    answer = complete(client, **end_now, min_tokens=4)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 5  # the fifth is the end
    answer = complete(client, **end_now, ignore_eos=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage.completion_tokens == 6
    answer = complete(client, **end_now, ignore_eos=True, skip_special_tokens=False)
    assert answer.choices[0].text == "<|im_end|>" * 6
    assert chat(client, max_completion_tokens=2, max_tokens=9).usage.completion_tokens == 2


def test_stop(client: openai.OpenAI, http: httpx.Client, greedy: str) -> None:
    stop = greedy[4:7]
    before = greedy[: greedy.index(stop)]
    for given in (stop, ["never in there", stop]):
        choice = complete(client, stop=given).choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (before, "stop", stop)
    assert text(client, stop=stop, include_stop_str_in_output=True) == before + stop
    streamed = client.completions.create(
        model="smollm2", prompt=PROMPT, temperature=0, max_tokens=6, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == before
    (blue,) = ids_of(http, " blue")
    choice = complete(client, logit_bias={str(blue): 100}, stop_token_ids=[blue]).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", blue)


def test_n_and_lists_of_prompts(client: openai.OpenAI, http: httpx.Client, greedy: str) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert text(client, ids) == greedy
    answer = complete(client, [PROMPT, "One two three"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[:2]] == [greedy, greedy]
    assert answer.choices[2].text == answer.choices[3].text == text(client, "One two three")
    assert [choice.text for choice in complete(client, [ids, ids]).choices] == [greedy, greedy]
    sampled = complete(client, n=3, temperature=1.5, seed=9).choices
    assert len({choice.text for choice in sampled}) > 1


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode().startswith(choice.message.content)
    for token in content:
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == pytest.approx(tops[0])
        assert sum(map(math.exp, tops)) <= 1.0001


def test_echo_and_prompt_logprobs(client: openai.OpenAI, http: httpx.Client, greedy: str) -> None:
    choice = complete(client, echo=True, logprobs=2).choices[0]
    assert choice.text == PROMPT + greedy
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens).startswith(choice.text)
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    scored = complete(client, echo=True, logprobs=2, max_tokens=0)
    assert scored.choices[0].text == PROMPT
    assert scored.usage.completion_tokens == 0
    count = len(ids_of(http, PROMPT))
    assert scored.choices[0].logprobs.tokens == logprobs.tokens[:count]
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1:count], abs=1e-4)
    entries = complete(client, prompt_logprobs=0).choices[0].prompt_logprobs
    assert entries[0] is None
    assert [next(iter(entry.values()))["decoded_token"] for entry in entries[1:]] == logprobs.tokens[1:count]


def test_usage_of_a_warm_prefix_and_of_a_salted_one(client: openai.OpenAI) -> None:
    prompt = "A sentence that is long enough to fill a few blocks of the cache. " * 8 + str(time.time_ns())

    def cached(**fields: Any) -> int:
        return int(complete(client, prompt, max_tokens=1, **fields).usage.prompt_tokens_details.cached_tokens)

    assert [cached(), cached() > 64, cached(cache_salt="a"), cached(cache_salt="a") > 64] == [0, True, 0, True]


def test_priority_and_ignored_fields(client: openai.OpenAI, greedy: str) -> None:
    assert text(client, priority=5, user="me", metadata={"a": "b"}, no_such_field={"x": 1}) == greedy


def test_chat_template_fields(http: httpx.Client) -> None:
    def rendered(**fields: Any) -> str:
        ids = http.post("/tokenize", json={"messages": MESSAGES, **fields}).json()["tokens"]
        return str(http.post("/detokenize", json={"tokens": ids}).json()["prompt"])

    assert rendered().endswith("<|im_start|>assistant\n")
    assert rendered(add_generation_prompt=False).endswith("Name three colours.<|im_end|>\n")
    partial = [*MESSAGES, {"role": "assistant", "content": "Red, green"}]
    assert rendered(messages=partial, continue_final_message=True).endswith("<|im_start|>assistant\nRed, green")
    assert rendered(chat_template_kwargs={"unused": 1}) == rendered()


def test_continue_final_message(client: openai.OpenAI) -> None:
    partial = [*MESSAGES, {"role": "assistant", "content": "Red, green and"}]
    answer = chat(client, partial, continue_final_message=True)
    assert not answer.choices[0].message.content.startswith("Red, green and")
    assert answer.choices[0].message.content


@pytest.mark.parametrize("text", ["hello", "你好 🙂", " leading", "a\n\nb\t", "naïve café"])
def test_tokenize_and_back(http: httpx.Client, text: str) -> None:
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_a_prompt_over_the_context_names_both_lengths(http: httpx.Client) -> None:
    for body in ({"prompt": "word " * 9000}, {"prompt": [5] * 9000}):
        for stream in (False, True):
            response = http.post("/v1/completions", json={**body, "stream": stream})
            assert response.status_code == 400
            error = response.json()["error"]
            assert "8192" in error["message"]
            assert "9000" in error["message"] or "9001" in error["message"]
    response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "word " * 9000}]})
    assert response.status_code == 400


def test_models_and_health(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("smollm2", MAX_MODEL_LEN)  # type: ignore[attr-defined]
    for path in ("/health", "/ready", "/version"):
        assert http.get(path).status_code == 200


def engine_metric(http: httpx.Client, name: str) -> float:
    prefix = f"gapless:{name}"
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(prefix)]
    assert len(lines) == 1, (name, lines)
    return float(lines[0].rsplit(" ", 1)[1])


USED = 'kv_blocks{model_name="smollm2",state="used"}'


def idle(http: httpx.Client) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "num_requests_in_flight", USED)
    return all(engine_metric(http, name) == 0 for name in names)


def wait_until_idle(http: httpx.Client) -> None:
    end = time.monotonic() + 120
    while not idle(http):
        assert time.monotonic() < end, http.get("/metrics").text
        time.sleep(0.1)


def test_a_hundred_clients_vanish(running_server: Server, http: httpx.Client, greedy: str) -> None:
    wait_until_idle(http)
    pids = dict(running_server.pids)
    body = b'{"prompt": "Once upon a time there was a", "stream": true, "max_tokens": 2000, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    port = int(running_server.url.rsplit(":", 1)[1])
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for sock in socks:
        sock.sendall(head + body)
    for sock in socks[::4]:  # some leave in mid-stream, the others wherever they are by then
        sock.settimeout(120)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    assert engine_metric(http, USED) > 0
    for sock in socks:
        sock.close()
    wait_until_idle(http)
    assert running_server.pids == pids
    response = http.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "max_tokens": 6})
    assert response.json()["choices"][0]["text"] == greedy

"""The official client against the frontend: every field arrives in the Submit, every answer is understood."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from ipc.codec import unpack_ids
from ipc.messages import ChatPrompt, TextPrompt, TokenPrompt
from ipc.sampling import SamplingParams
from tests.frontend.fake import MAX_MODEL_LEN, MODEL, TOKENS, Fake, FakeServer

TEXT = "".join(TOKENS)
USER: list[Any] = [{"role": "user", "content": "hi"}]

FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 40}, {"top_k": 40}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 0}, {"top_k": 0}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"frequency_penalty": -1.5}, {"frequency_penalty": -1.5}),
    ({"logit_bias": {"7": 5, "9": -100}}, {"logit_bias": {7: 5.0, 9: -100.0}}),
    ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
    ({"min_tokens": 2, "max_tokens": 3}, {"min_tokens": 2, "max_tokens": 3}),
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"stop": "X"}, {"stop": ("X",)}),
    ({"stop": ["X", "Y"]}, {"stop": ("X", "Y")}),
    ({"stop_token_ids": [3, 4]}, {"stop_token_ids": (3, 4)}),
    ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"seed": 42}, {"seed": 42}),
    ({"n": 3}, {"n": 3}),
    ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"user": "me", "metadata": {"a": "b"}, "store": True, "no_such_field": [1]}, {}),
    ({"temperature": None, "stop": None, "n": None, "max_tokens": None, "logit_bias": None}, {}),
]


@pytest.mark.parametrize(("given", "expected"), FIELDS, ids=[str(given) for given, _ in FIELDS])
def test_sampling_fields_reach_the_engine(
    client: openai.OpenAI, fake: Fake, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=USER, extra_body=given)
    assert fake.last().sampling == SamplingParams(**expected)
    assert len(chat.choices) == expected.get("n", 1)
    completion = client.completions.create(model=MODEL, prompt="hi", extra_body=given)
    assert fake.last().sampling == SamplingParams(**expected)
    assert len(completion.choices) == expected.get("n", 1)


def test_chat_answer(client: openai.OpenAI, fake: Fake) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=USER)
    answer = raw.parse()
    assert raw.headers["x-request-id"] == answer.id
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 8, 10)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    submit = fake.last()
    assert submit.prompt == ChatPrompt(messages=USER)
    assert (submit.priority, submit.cache_salt, submit.echo, submit.frontend) == (0, "", False, 0)


def test_chat_stream_equals_whole(client: openai.OpenAI) -> None:
    stream: Any = client.chat.completions.create(
        model="alias", messages=USER, stream=True, n=2, stream_options={"include_usage": True}
    )  # fmt: skip
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1
    assert {chunk.model for chunk in chunks} == {MODEL}
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == TEXT
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1].delta.content is None
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 16)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_only_when_asked_for(client: openai.OpenAI, options: Any) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options=options
    )  # fmt: skip
    for chunk in stream:
        assert chunk.usage is None
        assert len(chunk.choices) == 1


async def test_async_client_streams_and_does_not(server: FakeServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=USER)
        assert answer.choices[0].message.content == TEXT
        stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
        assert "".join(texts) == TEXT


def test_max_completion_tokens_wins_and_length_is_told(client: openai.OpenAI, fake: Fake) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=7, max_completion_tokens=2
    )  # fmt: skip
    assert fake.last().sampling.max_tokens == 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "Hello"


def test_chat_logprobs(client: openai.OpenAI, fake: Fake) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**request).choices[0].logprobs
    assert fake.last().sampling.logprobs == 2
    assert whole is not None
    assert whole.content is not None
    assert [token.token for token in whole.content] == TOKENS
    assert bytes(whole.content[2].bytes or []).decode() == TOKENS[2]
    assert [(top.token, top.logprob) for top in whole.content[0].top_logprobs] == [("Hel", -0.5), ("alt1", -1.5)]
    streamed = [
        token
        for chunk in client.chat.completions.create(**request, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == whole.content
    alone = client.chat.completions.create(model=MODEL, messages=USER, logprobs=True)
    assert fake.last().sampling.logprobs == 0
    assert alone.choices[0].logprobs is not None


def test_completion_logprobs_and_echo(client: openai.OpenAI, fake: Fake) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": "abc", "logprobs": 1, "echo": True}
    whole = client.completions.create(**request).choices[0]
    submit = fake.last()
    assert (submit.echo, submit.sampling.logprobs, submit.sampling.prompt_logprobs) == (True, 1, 1)
    assert whole.text == "abc" + TEXT
    assert whole.logprobs is not None
    assert whole.logprobs.tokens == ["a", "b", "c", *TOKENS]
    assert whole.logprobs.token_logprobs == [None, *[-0.5] * 10]
    assert whole.logprobs.text_offset is not None
    for token, offset in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        assert whole.text[offset:].startswith(token)
    chunks = [chunk.choices[0] for chunk in client.completions.create(**request, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert [offset for part in parts for offset in part.text_offset or []] == whole.logprobs.text_offset


def test_scoring_a_prompt_without_generating(client: openai.OpenAI, fake: Fake) -> None:
    for stream in (False, True):
        answer: Any = client.completions.create(
            model=MODEL, prompt="abc", logprobs=1, echo=True, max_tokens=0, stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        assert fake.last().sampling.max_tokens == 0
        assert "".join(choice.text for choice in choices) == "abc"
        assert [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens] == ["a", "b", "c"]
        assert choices[-1].finish_reason == "length"


def test_prompt_logprobs(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1}
    entries = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1] == {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "prompt_logprobs": 0}
    entries = http.post("/v1/chat/completions", json=body).json()["prompt_logprobs"]
    assert entries[1] == {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [TextPrompt("hi")]),
        ("", [TextPrompt("")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2, 999], [[1, 2, 999]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], [TextPrompt("a"), [3]]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_kinds_of_prompt(client: openai.OpenAI, fake: Fake, prompt: Any, expected: list[Any], n: int) -> None:
    fake.submits.clear()
    answer = client.completions.create(model=MODEL, prompt=prompt, n=n)
    assert [choice.index for choice in answer.choices] == list(range(len(expected) * n))
    submits = list(fake.submits)
    got = [unpack_ids(s.prompt.ids) if isinstance(s.prompt, TokenPrompt) else s.prompt for s in submits]
    assert got == expected
    ids = [request_id for submit in submits for request_id in submit.request_ids]
    assert len(set(ids)) == len(ids) == len(expected) * n
    assert all(len(submit.request_ids) == n == submit.sampling.n for submit in submits)


def test_chat_fields_reach_the_tokenizer(client: openai.OpenAI, fake: Fake) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "so"},
    ]
    client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[tool],
        tool_choice="auto",
        extra_body={
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False},
            "priority": -3,
            "cache_salt": "tenant",
        },
    )
    submit = fake.last()
    assert submit.prompt == ChatPrompt(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a\nb", "name": "bob"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            {"role": "assistant", "content": "so"},
        ],
        tools=[tool],
        add_generation_prompt=False,
        continue_final_message=True,
        template_kwargs={"enable_thinking": False},
    )
    assert (submit.priority, submit.cache_salt) == (-3, "tenant")


@pytest.mark.parametrize(
    "extra", [{"tool_choice": None, "tools": []}, {"tools": None}, {"response_format": {"type": "text"}}]
)
def test_fields_that_ask_for_nothing_are_tolerated(client: openai.OpenAI, fake: Fake, extra: Any) -> None:
    client.chat.completions.create(model=MODEL, messages=USER, extra_body=extra)
    assert fake.last().prompt == ChatPrompt(messages=USER)


def test_tool_choice_none_hides_the_tools(client: openai.OpenAI, fake: Fake) -> None:
    body = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    client.chat.completions.create(model=MODEL, messages=USER, extra_body=body)
    assert fake.last().prompt == ChatPrompt(messages=USER)


def test_add_special_tokens(client: openai.OpenAI, fake: Fake) -> None:
    client.completions.create(model=MODEL, prompt="x", extra_body={"add_special_tokens": False})
    assert fake.last().prompt == TextPrompt("x", add_special_tokens=False)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == MAX_MODEL_LEN
    assert client.models.retrieve(MODEL).id == client.models.retrieve("alias").id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=USER)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bound:
        client.chat.completions.create(model=MODEL, messages=USER, temperature=-1)
    assert bound.value.param == "temperature"
    stream = client.completions.create(model=MODEL, prompt="/fail-late", stream=True)
    with pytest.raises(openai.APIError, match="NaN"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="NaN"):
        client.completions.create(model=MODEL, prompt="/fail-late")

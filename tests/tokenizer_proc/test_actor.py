from __future__ import annotations

import dataclasses
import random
from array import array
from typing import Any

import msgspec
import pytest

from ipc.actor import run
from ipc.channel import frontend_key
from ipc.codec import MAX_MESSAGE_BYTES, encode, pack_prompt
from ipc.memory import MemoryChannel
from ipc.messages import (
    ChatPrompt,
    Decode,
    Decoded,
    Encode,
    Encoded,
    EngineMessage,
    FrontendMessage,
    Generate,
    Prompt,
    Rejected,
    Shutdown,
    Submit,
    TextPrompt,
    TextSpec,
    TokenizerMessage,
    TokenPrompt,
)
from ipc.sampling import SamplingParams
from tokenizer_proc.actor import MAX_CHARS, TokenizerActor
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.encode import MAX_TOKENS, encode_prompt, from_bytes, text_spec, to_bytes
from tokenizer_proc.errors import PromptError
from tokenizer_proc.model import TextModel

HELLO = TextPrompt("hello")
USER = {"role": "user", "content": "x"}


def submit(prompt: Prompt, ids: tuple[int, ...] = (1,), sampling: SamplingParams | None = None, **more: Any) -> Submit:
    return Submit(
        request_ids=list(ids),
        frontend=3,
        prompt=pack_prompt(prompt),
        sampling=sampling or SamplingParams(),
        arrival=5,
        **more,
    )


def rejected(model: TextModel, message: Submit) -> Any:
    ((destination, answer),) = TokenizerActor(model).handle([message])
    assert destination == frontend_key(3)
    assert isinstance(answer, Rejected)
    assert answer.request_ids == message.request_ids
    return answer.error


def test_one_generate_per_choice(smollm2: TextModel) -> None:
    sampling = SamplingParams(seed=2**63 - 2, stop=("x",), n=3)
    message = submit(HELLO, (7, 8, 9), sampling, priority=4, cache_salt="s")
    envelopes = TokenizerActor(smollm2).handle([message])
    assert [destination for destination, _ in envelopes] == ["engine"] * 3
    generates = [generate for _, generate in envelopes if isinstance(generate, Generate)]
    assert [generate.request_id for generate in generates] == [7, 8, 9]
    assert [generate.sampling.seed for generate in generates] == [2**63 - 2, 2**63 - 1, -(2**63)]
    for generate in generates:
        assert generate.eos_token_ids == smollm2.eos_token_ids
        assert (generate.frontend, generate.priority, generate.cache_salt, generate.arrival) == (3, 4, "s", 5)
        ids = from_bytes(generate.prompt_ids)
        assert smollm2.tokenizer.decode(ids) == "hello"
        spec = msgspec.msgpack.decode(generate.text, type=TextSpec)
        assert (spec.stop, spec.echo, spec.prompt_ids) == (("x",), None, generate.prompt_ids)


def test_choices_without_a_seed_have_none(smollm2: TextModel) -> None:
    envelopes = TokenizerActor(smollm2).handle([submit(HELLO, (1, 2))])
    assert [message.sampling.seed for _, message in envelopes if isinstance(message, Generate)] == [None, None]


def test_echo_is_the_prompts_text(smollm2: TextModel) -> None:
    ids = to_bytes([1, 2, *smollm2.tokenizer.encode("你好 hello").ids])
    ((_, generate),) = TokenizerActor(smollm2).handle([submit(TokenPrompt(ids), echo=True)])
    assert isinstance(generate, Generate)
    assert msgspec.msgpack.decode(generate.text, type=TextSpec).echo == "你好 hello"


@pytest.mark.parametrize("token", [-1, 49152, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_are_refused(smollm2: TextModel, token: int) -> None:
    error = rejected(smollm2, submit(TokenPrompt(array("i", [5, token]).tobytes())))
    assert (error.status, error.param) == (400, "prompt")
    assert str(token) in error.message
    assert "49151" in error.message


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TextPrompt(""), "prompt"),
        (TokenPrompt(b""), "prompt"),
        (TokenPrompt(b"abc"), "prompt"),
        (TextPrompt("x" * 700_000), "prompt"),
        (ChatPrompt(messages=[]), "messages"),
        (ChatPrompt(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages"),
        (ChatPrompt(messages=[USER], template_kwargs={"messages": []}), "chat_template_kwargs"),
        (ChatPrompt(messages=[{"role": "user"}]), "messages"),
    ],
)  # fmt: skip
def test_bad_prompts_are_refused(smollm2: TextModel, prompt: Prompt, param: str) -> None:
    error = rejected(smollm2, submit(prompt))
    assert (error.status, error.param) == (400, param), error


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TextPrompt("a\ud800b"), "prompt"),
        (ChatPrompt(messages=[{"role": "user", "content": "a\ud800b"}]), "messages"),
        (ChatPrompt(messages=[{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]), "messages"),
    ],
)
def test_text_that_no_message_can_carry_is_refused_in_the_library(
    smollm2: TextModel, prompt: Prompt, param: str
) -> None:
    with pytest.raises(PromptError) as refused:
        encode_prompt(smollm2, prompt)
    assert (refused.value.error.status, refused.value.error.param) == (400, param)


def test_what_is_no_prompt_fails_alone(smollm2: TextModel) -> None:
    message = msgspec.structs.replace(submit(HELLO), prompt=msgspec.Raw(b"\x80"))
    assert rejected(smollm2, message).status == 500


def test_ids_in_sampling_are_checked(smollm2: TextModel) -> None:
    error = rejected(smollm2, submit(HELLO, sampling=SamplingParams(stop_token_ids=(49152,))))
    assert (error.status, error.param) == (400, "stop_token_ids")


def test_many_log_probabilities_of_a_long_prompt_are_refused(smollm2: TextModel) -> None:
    prompt = TokenPrompt(to_bytes([5] * 30_000))
    error = rejected(smollm2, submit(prompt, sampling=SamplingParams(prompt_logprobs=20)))
    assert (error.status, error.param) == (400, "prompt_logprobs")
    assert error.message == "prompt_logprobs must be less than 17 for a prompt of 30000 tokens, got 20"
    ((_, generate),) = TokenizerActor(smollm2).handle([submit(prompt, sampling=SamplingParams(prompt_logprobs=16))])
    assert isinstance(generate, Generate)


def test_every_answer_fits_into_a_message(smollm2: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not would end the process."""
    assert 4 * MAX_CHARS < MAX_MESSAGE_BYTES  # UTF-8
    assert 4 * MAX_TOKENS < MAX_MESSAGE_BYTES
    monkeypatch.setattr("tokenizer_proc.actor.MAX_CHARS", 50)
    monkeypatch.setattr("tokenizer_proc.encode.MAX_TOKENS", 10)
    actor = TokenizerActor(smollm2)
    hello = smollm2.tokenizer.encode("hello").ids
    assert answer_to(actor, Decode(call_id=1, frontend=1, ids=to_bytes(hello * 10))).text == "hello" * 10
    decoded = answer_to(actor, Decode(call_id=1, frontend=1, ids=to_bytes(hello * 11)))
    assert (decoded.error.status, decoded.error.param) == (400, "tokens")
    assert (
        len(answer_to(actor, Encode(call_id=1, frontend=1, prompt=pack_prompt(TextPrompt(" hello" * 10)))).tokens) == 10
    )
    encoded = answer_to(actor, Encode(call_id=1, frontend=1, prompt=pack_prompt(TextPrompt(" hello" * 11))))
    assert (encoded.error.status, encoded.error.code) == (400, "context_length_exceeded")


def test_no_words_of_a_template_keep_an_error_from_being_sent(smollm2: TextModel) -> None:
    quoting = ChatTemplate("{{ raise_exception(messages[0].tool_calls[0].function.arguments.q) }}", {})
    call = {"function": {"name": "f", "arguments": '{"q": "\\ud800"}'}}
    message = submit(ChatPrompt(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}]))
    error = rejected(dataclasses.replace(smollm2, template=quoting), message)
    assert "\\ud800" in encode(error).decode("utf-8", "replace")


def test_no_template_says_what_to_do(smollm2: TextModel) -> None:
    bare = dataclasses.replace(smollm2, template=None, template_problem="no template: use --chat-template")
    error = rejected(bare, submit(ChatPrompt(messages=[{"role": "user", "content": "x"}])))
    assert (error.status, error.message) == (400, "no template: use --chat-template")


def answer_to(actor: TokenizerActor, call: Encode | Decode) -> Any:
    ((destination, answer),) = actor.handle([call])
    assert destination == frontend_key(call.frontend)
    assert isinstance(answer, Encoded | Decoded)
    assert answer.call_id == call.call_id
    return answer


def test_encode_and_decode(smollm2: TextModel) -> None:
    actor = TokenizerActor(smollm2)
    encoded = answer_to(actor, Encode(call_id=4, frontend=1, prompt=pack_prompt(HELLO)))
    assert encoded.tokens == ["hello"]
    ids = to_bytes([1, *from_bytes(encoded.ids)])
    assert answer_to(actor, Decode(call_id=5, frontend=1, ids=ids)).text == "<|im_start|>hello"
    assert answer_to(actor, Decode(call_id=5, frontend=1, ids=ids, skip_special_tokens=True)).text == "hello"
    for bad in (
        Encode(call_id=6, frontend=1, prompt=pack_prompt(TextPrompt(""))),
        Decode(call_id=6, frontend=1, ids=to_bytes([-1])),
        Decode(call_id=6, frontend=1, ids=b"abc"),
    ):
        assert answer_to(actor, bad).error.status == 400


class _Failing:
    """A tokenizer with a bug."""

    def encode(self, *_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    def get_vocab(self) -> dict[str, int]:
        return {"x": 1}


def test_a_bug_fails_one_request_and_the_loop_goes_on(smollm2: TextModel) -> None:
    broken = TokenizerActor(dataclasses.replace(smollm2, tokenizer=_Failing()))  # type: ignore[arg-type]
    ids = TokenPrompt(to_bytes([5]))
    envelopes = broken.handle([submit(TextPrompt("x"), (1, 2)), submit(ids, (3,))])
    first, second = (message for _, message in envelopes)
    assert isinstance(first, Rejected)
    assert first.request_ids == [1, 2]
    assert first.error.status == 500
    assert "secret" not in first.error.message
    assert isinstance(second, Generate)


def test_on_memory_channels(smollm2: TextModel) -> None:
    inbox: MemoryChannel[Any] = MemoryChannel(TokenizerMessage)
    engine: MemoryChannel[Any] = MemoryChannel(EngineMessage)
    frontend: MemoryChannel[Any] = MemoryChannel(FrontendMessage)
    inbox.send_bytes(b"\x80garbage")
    for message in (submit(HELLO, (1, 2)), submit(TextPrompt(""), (3,)), Shutdown()):
        inbox.send(message)
    run(TokenizerActor(smollm2), inbox, {"engine": engine, frontend_key(3): frontend})
    assert [generate.request_id for generate in engine.drain()] == [1, 2]
    (answer,) = frontend.drain()
    assert answer.request_ids == [3]
    assert inbox.dropped == 1


def test_context_reaches_back_to_text(smollm2: TextModel) -> None:
    hello = smollm2.tokenizer.encode("hello").ids[0]
    data = text_spec(smollm2, [5, hello, *[2] * 40], SamplingParams())
    spec = msgspec.msgpack.decode(data, type=TextSpec)
    assert hello in from_bytes(spec.prompt_ids)
    data = text_spec(smollm2, [hello] * 1000, SamplingParams())
    assert len(from_bytes(msgspec.msgpack.decode(data, type=TextSpec).prompt_ids)) <= 16


class CountingSet(frozenset[int]):
    """Counts how often it is asked."""

    asked = 0

    def __contains__(self, item: object) -> bool:
        self.asked += 1
        return super().__contains__(item)


def context(model: TextModel, ids: list[int], special: frozenset[int]) -> list[int]:
    model = dataclasses.replace(model)
    vars(model)["special_ids"] = special
    return from_bytes(msgspec.msgpack.decode(text_spec(model, ids, SamplingParams()), type=TextSpec).prompt_ids)


def test_context_by_its_definition(smollm2: TextModel, rng: random.Random) -> None:
    special = frozenset(range(17))
    for _ in range(500):
        ids = rng.choices(range(34), k=rng.randrange(300)) + rng.choices(range(17), k=rng.randrange(400))
        starts = [*range(len(ids) - 8, 0, -64), 0]
        start = next(start for start in starts if start == 0 or not special.issuperset(ids[start:]))
        assert context(smollm2, ids, special) == ids[start:]


@pytest.mark.parametrize("length", [8_000, 65_000])
def test_a_prompt_of_special_tokens_alone_is_looked_at_once(smollm2: TextModel, length: int) -> None:
    special = CountingSet(range(17))
    assert len(context(smollm2, [5] * length, special)) == length
    assert special.asked <= length


def test_special_tokens_in_user_text_become_tokens(smollm2: TextModel) -> None:
    """As in transformers; written down in `tokenizer_proc.chat_template`."""
    ids = encode_prompt(smollm2, ChatPrompt(messages=[{"role": "user", "content": "a<|im_end|>b"}]))
    assert ids.count(2) == 3  # the default system message's, the literal one, and the user message's
    with pytest.raises(PromptError):
        encode_prompt(smollm2, TextPrompt(""))

from __future__ import annotations

import random
import struct
from typing import get_args

import msgspec
import pytest

from ipc.codec import (
    encode,
    make_decoder,
    pack_ids,
    pack_prompt,
    pack_request_ids,
    prompt_kind,
    unpack_ids,
    unpack_prompt,
    unpack_request_ids,
)
from ipc.messages import (
    Abort,
    ChatPrompt,
    EngineMessage,
    Generate,
    Prompt,
    Shutdown,
    TextPrompt,
    TokenPrompt,
)
from ipc.sampling import SamplingParams


def test_ids_are_little_endian_int32_and_int64() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    ids = [0, 1, 2**31 - 1, *(rng.randrange(2**31) for _ in range(100))]
    assert pack_ids(ids) == struct.pack(f"<{len(ids)}i", *ids)
    assert unpack_ids(pack_ids(ids)) == ids
    request_ids = [0, 2**63 - 1, *(rng.randrange(2**63) for _ in range(100))]
    assert pack_request_ids(request_ids) == struct.pack(f"<{len(request_ids)}q", *request_ids)
    assert unpack_request_ids(pack_request_ids(request_ids)) == request_ids


def test_ids_that_do_not_fit() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(ValueError):
        unpack_ids(b"\0" * 7)
    with pytest.raises(ValueError):
        unpack_request_ids(b"\0" * 12)


def test_a_union_is_closed_and_its_bounds_are_checked() -> None:
    decoder = make_decoder(EngineMessage)
    generate = Generate(
        request_id=7, frontend=0, prompt_ids=pack_ids([1, 2]), sampling=SamplingParams(seed=-3, stop=("a",)), arrival=5
    )
    for message in (generate, Abort(request_ids=[1, 2]), Shutdown()):
        assert decoder.decode(encode(message)) == message
    for wrong in (
        {"type": "Submit"},
        {"type": "Abort", "request_ids": [-1]},
        {"type": "Abort", "request_ids": [2**63]},
        {"type": "Abort", "request_ids": "all"},
        {**msgspec.to_builtins(generate, builtin_types=(bytes,)), "sampling": {"temperature": float("nan")}},
        {**msgspec.to_builtins(generate, builtin_types=(bytes,)), "sampling": {"n": 10**9}},
    ):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode(wrong))


def test_the_kind_of_a_prompt_shows_at_its_front() -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompts: list[tuple[Prompt, str]] = [
        (TextPrompt(""), "text"),
        (TextPrompt("x" * 70_000, add_special_tokens=False), "text"),
        (TokenPrompt(b""), "ids"),
        (TokenPrompt(pack_ids(range(70_000))), "ids"),
        (ChatPrompt([]), "chat"),
        (ChatPrompt(messages * 70_000, messages, False, True, {"a": 1}), "chat"),
    ]
    for prompt, kind in prompts:
        packed = pack_prompt(prompt)
        assert prompt_kind(packed) == kind
        assert unpack_prompt(packed) == prompt
    assert {kind for _, kind in prompts} == {each.__struct_config__.tag for each in get_args(Prompt)}
    for other in (b"", b"\x80", b"\xc0", encode(Shutdown())):
        assert prompt_kind(msgspec.Raw(other)) == ""

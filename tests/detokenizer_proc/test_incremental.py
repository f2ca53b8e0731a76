from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from detokenizer_proc.incremental import MAX_HELD_BYTES, TextDecoder

TEXTS = (
    "你好，世界。日本語のテキスト 한국어",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪",
    "naïve café — “quotes”",
    "ab  ab\n\ta",
    "two words日本é",  # added tokens; the byte-level decoder takes this "é" for the byte 0xE9
)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return int(found)


def joined(decoder: TextDecoder, ids: Sequence[int], skip: bool, prompt: Sequence[int] = ()) -> str:
    stream = decoder.stream(prompt, skip)
    return "".join([*map(stream.push, ids), stream.flush()])


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Random ids (some without a token), ids of real text, the same cut and damaged, or single bytes of real text."""
    size = tokenizer.get_vocab_size()
    match rng.randrange(4):
        case 0:
            return [rng.randrange(size + 5) for _ in range(rng.randrange(60))]
        case 1:
            return list(tokenizer.encode("".join(rng.sample(TEXTS, 2))).ids)
        case 2:
            ids = list(tokenizer.encode(rng.choice(TEXTS)).ids)
            for _ in range(rng.randrange(4)):
                ids.insert(rng.randrange(len(ids) + 1), rng.randrange(size))
            return ids[rng.randrange(5) : len(ids) - rng.randrange(5)]
        case _:
            data = "".join(rng.sample(TEXTS, 2)).encode()[rng.randrange(4) :][: rng.randrange(40)]
            names = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data)
            return [rng.randrange(size) if token is None or rng.random() < 0.03 else token for token in names]


def test_joined_stream_is_the_one_shot_decode(kind: str, tokenizer: Tokenizer, rng: random.Random) -> None:
    decoder = TextDecoder(tokenizer)
    for _ in range(300 if kind in ("wordpiece", "bpe_suffix") else 2000):
        ids = random_ids(tokenizer, rng)
        for skip in (True, False):
            assert joined(decoder, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip), (ids, skip)


def test_smollm2_joined_stream_is_the_one_shot_decode(smollm2: Tokenizer, rng: random.Random) -> None:
    decoder = TextDecoder(smollm2)
    for _ in range(2000):
        ids = random_ids(smollm2, rng)
        skip = rng.random() < 0.5
        assert joined(decoder, ids, skip) == smollm2.decode(ids, skip_special_tokens=skip), (ids, skip)


def test_no_replacement_character_before_its_time(kind: str, tokenizer: Tokenizer) -> None:
    if kind in ("no_decoder", "metaspace", "metaspace_never", "wordpiece", "bpe_suffix"):
        # These have no way to put bytes together.
        ids = [token for token in tokenizer.encode("你好🙂").ids if token >= 259]
    else:
        ids = tokenizer.encode("".join(TEXTS[:2])).ids
    stream = TextDecoder(tokenizer).stream()
    for token in ids:
        assert "\ufffd" not in stream.push(token)
    assert "\ufffd" not in stream.flush()


def test_byte_level_holds_at_most_one_character(byte_level: Tokenizer, rng: random.Random) -> None:
    """What is out after each token is the one-shot decode, less the bytes of an unfinished character."""
    decoder = TextDecoder(byte_level)
    for _ in range(200):
        ids = random_ids(byte_level, rng)
        stream, out = decoder.stream(), ""
        for count, token in enumerate(ids, 1):
            out += stream.push(token)
            whole = byte_level.decode(ids[:count])
            assert whole in (out, *(out + "\ufffd" * held for held in (1, 2, 3))), ids[:count]


@pytest.mark.parametrize("byte", [0xFF, 0x80, 0xE4])
def test_endless_invalid_bytes_come_out(llama: Tokenizer, byte: int) -> None:
    token = token_id(llama, f"<0x{byte:02X}>")
    stream = TextDecoder(llama).stream()
    out = [stream.push(token) for _ in range(1000)]
    assert len("".join(out)) >= 998
    assert "".join(out) + stream.flush() == "\ufffd" * 1000


def test_long_run_of_valid_bytes_streams(llama: Tokenizer) -> None:
    data = ("語" * 1000).encode()
    stream = TextDecoder(llama).stream()
    out, longest = "", 0
    for count, byte in enumerate(data, 1):
        out += stream.push(token_id(llama, f"<0x{byte:02X}>"))
        longest = max(longest, count - len(out.encode()))
    assert longest <= MAX_HELD_BYTES
    assert out + stream.flush() == "語" * 1000


def test_cost_per_token_does_not_grow(llama: Tokenizer, byte_level: Tokenizer) -> None:
    """Counted, not timed: nothing a stream keeps grows with the output."""
    for tokenizer in (llama, byte_level):
        stream = TextDecoder(tokenizer).stream()
        for token in tokenizer.encode("".join(TEXTS) * 50).ids:
            stream.push(token)
            assert len(stream._held) <= MAX_HELD_BYTES  # type: ignore[attr-defined]


def test_output_that_continues_a_prompt_keeps_its_space(llama: Tokenizer) -> None:
    decoder = TextDecoder(llama)
    prompt, ids = [token_id(llama, "a")], [token_id(llama, "▁a"), token_id(llama, "b")]
    assert joined(decoder, ids, True, prompt) == " ab"
    assert joined(decoder, ids, True) == "ab" == llama.decode(ids)
    assert llama.decode(prompt) + joined(decoder, ids, True, prompt) == llama.decode(prompt + ids)
    only_bos = [token_id(llama, "<s>")]
    assert joined(decoder, ids, True, only_bos) == llama.decode(only_bos + ids) == "ab"


def test_prompt_and_output_join_to_the_decode_of_both(kind: str, tokenizer: Tokenizer, rng: random.Random) -> None:
    if kind in ("byte_level", "bpe_suffix", "strip_three"):
        # Decoded by itself; the last token depends on what follows; spaces of a prompt count towards the strip.
        return
    decoder = TextDecoder(tokenizer)
    plain = [token for token in tokenizer.get_vocab().values() if token >= 259]  # no bytes, no specials
    for _ in range(300):
        prompt, ids = rng.choices(plain, k=rng.randrange(4)), rng.choices(plain, k=rng.randrange(6))
        assert tokenizer.decode(prompt) + joined(decoder, ids, True, prompt) == tokenizer.decode(prompt + ids)


def test_negative_id_is_an_error(tokenizer: Tokenizer) -> None:
    stream = TextDecoder(tokenizer).stream()
    with pytest.raises(ValueError, match="-1"):
        stream.push(-1)


def test_id_without_a_token_is_nothing(tokenizer: Tokenizer) -> None:
    stream = TextDecoder(tokenizer).stream()
    assert stream.push(2**31 - 1) + stream.flush() == ""


def test_token_bytes(byte_level: Tokenizer, llama: Tokenizer) -> None:
    decoder = TextDecoder(byte_level)
    text = TEXTS[0] + TEXTS[1]
    assert b"".join(map(decoder.token_bytes, byte_level.encode(text).ids)).decode() == text
    assert decoder.token_bytes(token_id(byte_level, "<|im_end|>")) == b"<|im_end|>"
    assert decoder.token_bytes(10**6) == b""
    decoder = TextDecoder(llama)
    assert decoder.token_bytes(token_id(llama, "<0xE4>")) == b"\xe4"
    assert decoder.token_bytes(token_id(llama, "▁a")) == b" a"

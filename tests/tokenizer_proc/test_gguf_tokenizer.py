from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from ipc.errors import UserError
from tokenizer_proc.gguf_metadata import read_metadata
from tokenizer_proc.gguf_tokenizer import build_tokenizer, eos_token_ids
from tokenizer_proc.load import load_text_model
from tokenizer_proc.model import TextModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its generated bindings
    import sentencepiece

PARTS = (
    *("Hello", " world", "  ", "\n\n", "\t", "12345", " 3.14", "it's", "I'LL", "def f(x):\n    return x", "\r\n"),
    *("你好世界", "日本語", "🙂", "👍🏽", "é", "e\u0301", "naïve", "\u00a0", "\u3000", "!!!", "ß", "ﬁ", "\u200b", "𝔘"),
    *("한국어", "עברית", "'s", "_", "//", "%", "[INST]", "▁", "\x00", "\ufffd", "²", "٣"),
)
MakeFile = Callable[[dict[str, Any]], Path]
MakeKeys = Callable[..., dict[str, Any]]


def random_texts(rng: random.Random, count: int) -> list[str]:
    return ["", " ", *("".join(rng.choices(PARTS, k=rng.randrange(1, 12))) for _ in range(count))]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


def test_smollm2_against_transformers(smollm2: TextModel, smollm2_path: Path, rng: random.Random) -> None:
    """SmolLM2 cuts at every digit, then as GPT-2 does: transformers' GPT-2 tokenizer on each part."""
    metadata = read_metadata(smollm2_path)
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    reference = GPT2Tokenizer(vocab=vocab, merges=merges, add_prefix_space=False)
    for text in random_texts(rng, 1500):
        parts = [part for part in regex.split(r"(\p{N})", text) if part]
        expected = [token for part in parts for token in reference(part)["input_ids"]]
        assert ids(smollm2.tokenizer, text) == expected, text
        assert smollm2.tokenizer.decode(expected) == text


def test_smollm2_special_tokens(smollm2: TextModel) -> None:
    assert ids(smollm2.tokenizer, "a<|im_end|>\n<|im_start|>") == [81, 2, 198, 1]
    assert smollm2.tokenizer.encode("a").ids == [81]  # no BOS
    assert smollm2.tokenizer.decode([81, 2]) == "a"
    assert smollm2.tokenizer.decode([81, 2], skip_special_tokens=False) == "a<|im_end|>"
    assert smollm2.eos_token_ids == (0, 2)
    assert (smollm2.vocab_size, smollm2.context_length) == (49152, 8192)


def test_qwen2_against_transformers(keys: MakeKeys, rng: random.Random) -> None:
    metadata = keys(**{"ggml.pre": "qwen2"})
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    reference = Qwen2Tokenizer(vocab=vocab, merges=merges, unk_token="<pad>", eos_token="</s>", pad_token="<pad>")
    tokenizer = build_tokenizer(metadata)
    for text in random_texts(rng, 1000):
        assert ids(tokenizer, text) == reference(text)["input_ids"], text


def test_gpt2_round_trip_of_a_trained_tokenizer(trained: Tokenizer, keys: MakeKeys, rng: random.Random) -> None:
    tokenizer = build_tokenizer(keys())
    for text in [*random_texts(rng, 500), "<s>a</s>"]:
        assert ids(tokenizer, text) == ids(trained, text), text


def test_llama3_takes_whole_words_and_three_digits(keys: MakeKeys) -> None:
    metadata = keys(**{"ggml.pre": "llama-bpe"})
    metadata["tokenizer.ggml.tokens"] += ["Ġzebra", "789"]
    metadata["tokenizer.ggml.token_type"] += [1, 1]
    size = len(metadata["tokenizer.ggml.tokens"])
    tokenizer = build_tokenizer(metadata)
    assert ids(tokenizer, " zebra") == [size - 2]  # no merge makes it
    assert ids(tokenizer, "789789") == [size - 1, size - 1]
    assert tokenizer.encode("a").tokens == ["<s>", "a"]  # this kind adds BOS unless the file says no
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert build_tokenizer(metadata).encode("a").tokens == ["a"]


def test_sentencepiece_vocabularies_against_sentencepiece(gguf_file: MakeFile, rng: random.Random) -> None:
    corpus = [
        "the quick brown fox",
        "hello hello world",
        "你好 世界",
        "naïve café",
        "x\ty",
        "    a  b",
        "aa aaa",
        "abab",
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus * 30), model_writer=model, vocab_size=360, model_type="bpe", byte_fallback=True,
        character_coverage=0.99, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, user_defined_symbols=["<|im_start|>"], minloglevel=2,
    )  # fmt: skip
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = range(reference.get_piece_size())
    types = [6 if reference.is_byte(i) else 3 if reference.is_control(i) else 1 for i in pieces]
    types[reference.unk_id()], types[reference.piece_to_id("<|im_start|>")] = 2, 4
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in pieces],
        "tokenizer.ggml.scores": [float(reference.get_score(i)) for i in pieces],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    text_model = load_text_model(gguf_file(keys))
    for _ in range(3000):
        text = "".join(rng.choices("ab 1\t\n你好naïve🙂   thequickworld", k=rng.randrange(1, 25)))
        expected = reference.encode(text)
        assert ids(text_model.tokenizer, text) == expected, text
        assert text_model.tokenizer.decode(expected) == reference.decode(expected)
    assert text_model.tokenizer.encode("a").ids == [1, *reference.encode("a")]
    assert text_model.eos_token_ids == (2,)


def test_eos_ids_are_all_the_file_knows(keys: MakeKeys) -> None:
    metadata = keys(**{"ggml.eot_token_id": 2})
    assert eos_token_ids(metadata) == {1, 2}
    metadata["tokenizer.ggml.tokens"].append("<|eot_id|>")
    metadata["tokenizer.ggml.token_type"].append(3)
    assert eos_token_ids(metadata) == {1, 2, len(metadata["tokenizer.ggml.tokens"]) - 1}
    metadata["tokenizer.ggml.token_type"][-1] = 1  # ordinary text that looks like it
    assert eos_token_ids(metadata) == {1, 2}


def test_unused_entries_are_no_text(keys: MakeKeys, gguf_file: MakeFile) -> None:
    metadata = keys()
    metadata["tokenizer.ggml.tokens"].append("[PAD500]")
    metadata["tokenizer.ggml.token_type"].append(5)
    model = load_text_model(gguf_file(metadata))
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert model.vocab_size == last + 1
    assert model.tokenizer.decode([last]) == ""
    assert last not in ids(model.tokenizer, "[PAD500]")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "bert", "'bert' is not supported"),
        ("tokenizer.ggml.pre", "klingon", "'klingon' is not supported"),
        ("tokenizer.ggml.token_type", [1], "1 token types"),
        ("tokenizer.ggml.merges", None, "no tokenizer.ggml.merges"),
        ("tokenizer.ggml.tokens", None, "no tokenizer.ggml.tokens"),
    ],
)
def test_unsupported_kinds_are_named(keys: MakeKeys, key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_tokenizer(keys() | {key: value})

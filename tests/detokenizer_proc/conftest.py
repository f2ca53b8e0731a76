"""Small tokenizers of every decoder kind. Their one-shot `decode` is the reference of these tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenizer_proc.load import load_text_model

CORPUS = ["hello world 你好 世界 🙂👍🏽 naïve café", "the quick brown fox jumps ", "日本語テキスト"] * 20
PIECES = ["▁", "a", "b", "▁a", "ab", "▁▁", "▁▁b", "你", "好", "🙂", "é", "##c", "a</w>"]
_MARK_TO_SPACE = decoders.Replace("▁", " ")


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("日本"), AddedToken("é"), AddedToken("Ġ\u00ad")])
    return tokenizer


def _pieces(decoder: decoders.Decoder | None) -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["▁added token", "xx"])
    return tokenizer


def _fallback(*last: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([_MARK_TO_SPACE, decoders.ByteFallback(), decoders.Fuse(), *last])


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "llama": lambda: _pieces(_fallback(decoders.Strip(" ", 1, 0))),
    "strip_three": lambda: _pieces(_fallback(decoders.Strip(" ", 3, 0))),
    "gemma": lambda: _pieces(_fallback()),
    "metaspace": lambda: _pieces(decoders.Metaspace()),
    "metaspace_never": lambda: _pieces(decoders.Metaspace(prepend_scheme="never")),
    "no_decoder": lambda: _pieces(None),
    "wordpiece": lambda: _pieces(decoders.WordPiece()),
    "bpe_suffix": lambda: _pieces(decoders.BPEDecoder()),
}


@pytest.fixture(scope="session")
def tokenizers_by_kind() -> dict[str, Tokenizer]:
    return {kind: make() for kind, make in MAKERS.items()}


@pytest.fixture(params=list(MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(kind: str, tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_kind[kind]


@pytest.fixture
def byte_level(tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_kind["byte_level"]


@pytest.fixture
def llama(tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_kind["llama"]


@pytest.fixture
def rng() -> random.Random:
    """Seeded anew in each run; the seed is shown when a test fails."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_text_model(smollm2_path).tokenizer

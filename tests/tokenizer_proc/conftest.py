"""Models' text sides to test with, small ones made here and the real SmolLM2."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenizer_proc.load import load_text_model
from tokenizer_proc.model import TextModel

CORPUS = ["hello world 你好 世界 🙂 naïve café", "the quick brown fox 123 456", "it's here, isn't it?"] * 20
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def rng() -> random.Random:
    """Seeded anew in each run; the seed is shown when a test fails."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> TextModel:
    return load_text_model(smollm2_path)


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    """Byte-level BPE with <s>, </s> and <pad> as ids 0 to 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<pad>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture
def hf_directory(trained: Tokenizer, tmp_path: Path) -> Callable[..., Path]:
    """Makes a model directory: keyword arguments are file names (without .json) and their contents."""

    def make(**files: Any) -> Path:
        trained.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(content))
        return tmp_path

    return make


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Writes a GGUF file of the keys given, with the `gguf` package."""

    def make(keys: dict[str, Any]) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in keys.items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
                case list():
                    writer.add_array(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return make


def gguf_keys(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """The keys that describe a byte-level BPE tokenizer."""
    model = msgspec.json.decode(tokenizer.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in vocab],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "llama.context_length": 64,
    }
    return keys | {f"tokenizer.{key}": value for key, value in more.items()}


@pytest.fixture
def keys(trained: Tokenizer) -> Callable[..., dict[str, Any]]:
    return lambda **more: gguf_keys(trained, **more)

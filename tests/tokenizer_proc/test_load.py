from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ipc.errors import UserError
from ipc.messages import ChatPrompt
from tokenizer_proc.encode import encode_prompt
from tokenizer_proc.load import load_text_model

MakeDirectory = Callable[..., Path]
CHAT = ChatPrompt(messages=[{"role": "user", "content": "hello"}])
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_directory_against_transformers(hf_directory: MakeDirectory, flags: dict[str, bool], adds_bos: bool) -> None:
    path = hf_directory(tokenizer_config=NAMES | flags | {"chat_template": TEMPLATE})
    if adds_bos:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
        tokenizer.save(str(path / "tokenizer.json"))
    reference = PreTrainedTokenizerFast.from_pretrained(path)
    model = load_text_model(path)
    for text in ("hello world", "", "<s>x</s>", "你好 🙂"):
        assert model.tokenizer.encode(text).ids == reference(text)["input_ids"]
    expected = reference.apply_chat_template(CHAT.messages, add_generation_prompt=True)["input_ids"]
    assert encode_prompt(model, CHAT) == expected
    assert expected.count(model.bos_token_id) == 1


def test_truncation_and_padding_in_the_file_are_off(hf_directory: MakeDirectory) -> None:
    path = hf_directory()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path / "tokenizer.json"))
    assert len(load_text_model(path).tokenizer.encode("hello " * 9).ids) > 16
    assert len(load_text_model(path).tokenizer.encode("hello").ids) < 4


def test_eos_ids_come_from_every_file(hf_directory: MakeDirectory) -> None:
    path = hf_directory(
        tokenizer_config={"eos_token": {"content": "</s>"}},
        generation_config={"eos_token_id": [2, 7]},
        config={"eos_token_id": 9, "vocab_size": 512, "max_position_embeddings": 128},
    )
    model = load_text_model(path)
    assert model.eos_token_ids == (1, 2, 7, 9)
    assert (model.vocab_size, model.context_length) == (512, 128)


def test_template_sources(hf_directory: MakeDirectory, tmp_path: Path) -> None:
    def rendered(tools: list[Any] | None = None, override: Path | None = None) -> str:
        model = load_text_model(path, override)
        prompt = ChatPrompt(messages=CHAT.messages, tools=tools)
        return str(model.tokenizer.decode(encode_prompt(model, prompt)))

    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    path = hf_directory(tokenizer_config={"chat_template": named})
    assert rendered() == "one"
    assert rendered(tools=[{"type": "function"}]) == "two"
    (path / "chat_template.jinja").write_text("three")
    assert rendered() == "three"
    (tmp_path / "mine.jinja").write_text("four")
    assert rendered(override=tmp_path / "mine.jinja") == "four"


def test_broken_template_leaves_completions_working(hf_directory: MakeDirectory, tmp_path: Path) -> None:
    model = load_text_model(hf_directory(tokenizer_config={"chat_template": "{% if %}"}))
    assert model.template is None
    assert "--chat-template" in model.template_problem
    (tmp_path / "mine.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match="cannot be used"):
        load_text_model(tmp_path, tmp_path / "mine.jinja")


def test_what_is_missing_is_said(tmp_path: Path, hf_directory: MakeDirectory) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_text_model(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_text_model(tmp_path)
    path = hf_directory(tokenizer_config=[1])
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        load_text_model(path)
    (path / "tokenizer_config.json").unlink()
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot read"):
        load_text_model(path)


def test_gguf_chat_gets_one_bos(
    gguf_file: Callable[[dict[str, Any]], Path], keys: Callable[..., dict[str, Any]]
) -> None:
    for template in ("{{ bos_token }}x", "x"):
        for adds in (True, False):
            metadata = keys(**{"ggml.add_bos_token": adds, "chat_template": template})
            model = load_text_model(gguf_file(metadata))
            count = encode_prompt(model, CHAT).count(0)
            assert count == (1 if adds or "bos" in template else 0)

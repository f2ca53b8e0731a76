"""A renderer works with what the tokenizer has loaded, all of it, whatever becomes of the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from ipc.messages import ChatPrompt
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.encode import encode_prompt
from tokenizer_proc.load import load_text_model
from tokenizer_proc.model import TextModel
from tokenizer_proc.renderer.handover import pack_model, unpack_model

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
CHAT = ChatPrompt([{"role": "user", "content": "hello 你好</s> world"}])


def plain(value: Any) -> Any:
    match value:
        case Tokenizer():
            return value.to_str()
        case ChatTemplate():
            return value.source, value.variables, value.engine
    return value


def fields(model: TextModel) -> dict[str, Any]:
    return {field.name: plain(getattr(model, field.name)) for field in dataclasses.fields(model)}


@pytest.fixture(params=["directory", "template of tools", "broken template", "GGUF", "SmolLM2"])
def loaded(
    request: pytest.FixtureRequest,
    hf_directory: Callable[..., Path],
    gguf_file: Callable[[dict[str, Any]], Path],
    keys: Callable[..., dict[str, Any]],
) -> TextModel:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    config = {"max_position_embeddings": 64, "vocab_size": 600}
    match request.param:
        case "directory":
            return load_text_model(hf_directory(tokenizer_config=names | {"chat_template": TEMPLATE}, config=config))
        case "template of tools":
            return load_text_model(hf_directory(tokenizer_config=names | {"chat_template": named}))
        case "broken template":
            return load_text_model(hf_directory(tokenizer_config={"chat_template": "{% if %}"}))
        case "GGUF":
            return load_text_model(gguf_file(keys(**{"ggml.add_bos_token": True, "chat_template": "{{ messages }}"})))
    smollm2: TextModel = request.getfixturevalue("smollm2")
    return smollm2


@pytest.mark.parametrize("warm", [False, True])
def test_the_whole_model_is_handed_over(loaded: TextModel, warm: bool, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved.json")
    loaded.tokenizer.save(saved, pretty=False)
    handed = unpack_model(pack_model(loaded.warm_up() if warm else dataclasses.replace(loaded), saved))
    assert fields(handed) == fields(loaded)
    assert (handed.special_ids, handed.max_chars) == (loaded.special_ids, loaded.max_chars)
    if loaded.template is not None:
        assert encode_prompt(handed, CHAT) == encode_prompt(loaded, CHAT)

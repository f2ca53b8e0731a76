"""The tokenizer and its settings in a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from ipc.errors import UserError

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """An empty dict if there is no such file. Raises `UserError` if it is not a JSON object."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def load_tokenizer(directory: Path, settings: dict[str, Any]) -> Tokenizer:
    """`settings`: tokenizer_config.json. Whether BOS is added is tokenizer.json's own rule, as in transformers 5.

    Raises `UserError` if there is no usable tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{directory} has no tokenizer.json. If the model has another kind of tokenizer file, convert it: "
            f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{directory}')"
            f".save_pretrained('{directory}')\""
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_missing_tokens(tokenizer, settings)
    return tokenizer


def special_tokens(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The strings chat templates know by name."""
    values = read_json(directory / "special_tokens_map.json") | {k: v for k, v in settings.items() if v is not None}
    return {name: text for name in _NAMES if (text := _content(values.get(name))) is not None}


def chat_templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates by name; "default" and "tool_use" are the usual ones. Later sources win, as in transformers."""
    found: dict[str, str] = {}
    for source in (settings, read_json(directory / "chat_template.json")):
        template = source.get("chat_template")
        if isinstance(template, str):
            found["default"] = template
        elif isinstance(template, list):
            named = [item for item in template if isinstance(item, dict)]
            found |= {str(item["name"]): str(item["template"]) for item in named if {"name", "template"} <= item.keys()}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if (path := directory / "chat_template.jinja").is_file():
        found["default"] = path.read_text(encoding="utf-8")
    return found


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    """Some models name tokens only in tokenizer_config.json. They get the ids given there or are left out."""
    listed = settings.get("added_tokens_decoder")
    items = listed.items() if isinstance(listed, dict) else ()
    for key, value in sorted(items, key=lambda item: int(item[0])):
        content = _content(value)
        if content is None or tokenizer.token_to_id(content) is not None:
            continue
        if int(key) == tokenizer.get_vocab_size():
            flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
            tokenizer.add_tokens([AddedToken(content, normalized=bool(value.get("normalized", False)), **flags)])

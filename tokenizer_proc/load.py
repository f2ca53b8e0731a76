"""`load_text_model`: everything about a model's text, from a GGUF file or a Hugging Face directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ipc.errors import UserError
from tokenizer_proc import gguf_tokenizer, hf_tokenizer
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.gguf_metadata import read_metadata
from tokenizer_proc.model import TextModel
from tokenizer_proc.template_limits import TemplateError

log = logging.getLogger(__name__)

_NO_TEMPLATE = (
    "this model has no chat template: start the server with --chat-template FILE.jinja, or use /v1/completions"
)


def load_text_model(path: str | Path, chat_template: str | Path | None = None) -> TextModel:
    """`path`: a .gguf file or a directory with tokenizer.json. `chat_template`: a Jinja file instead of the model's.

    Raises `ipc.errors.UserError` if a file is missing or broken, or its kind of tokenizer is not supported.
    """
    path = Path(path)
    override = None if chat_template is None else _read_text(Path(chat_template))
    if path.is_dir():
        return _from_directory(path, override)
    if path.is_file():
        return _from_gguf(path, override)
    raise UserError(f"no such file or directory: {path}")


def _from_gguf(path: Path, override: str | None) -> TextModel:
    metadata = read_metadata(path)
    tokenizer = gguf_tokenizer.build_tokenizer(metadata)
    names = gguf_tokenizer.special_tokens(metadata)
    key = "tokenizer.chat_template"
    templates = {"default": metadata[key]} if key in metadata else {}
    if f"{key}.tool_use" in metadata:
        templates["tool_use"] = metadata[f"{key}.tool_use"]
    context_length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return TextModel(
        tokenizer=tokenizer,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        eos_token_ids=tuple(sorted(gguf_tokenizer.eos_token_ids(metadata))),
        bos_token_id=tokenizer.token_to_id(names["bos_token"]) if "bos_token" in names else None,
        context_length=context_length if isinstance(context_length, int) else None,
        chat_adds_bos=_adds_bos(tokenizer, names.get("bos_token")),
        **_templates(templates, override, names),
    )


def _from_directory(path: Path, override: str | None) -> TextModel:
    settings = hf_tokenizer.read_json(path / "tokenizer_config.json")
    config = hf_tokenizer.read_json(path / "config.json")
    generation = hf_tokenizer.read_json(path / "generation_config.json")
    tokenizer = hf_tokenizer.load_tokenizer(path, settings)
    names = hf_tokenizer.special_tokens(path, settings)
    eos = _ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id"))
    if (token := tokenizer.token_to_id(names.get("eos_token", ""))) is not None:
        eos.add(token)
    vocab_size, context_length = config.get("vocab_size"), config.get("max_position_embeddings")
    size = vocab_size if isinstance(vocab_size, int) else _next_id(tokenizer)
    return TextModel(
        tokenizer=tokenizer,
        vocab_size=size,
        eos_token_ids=tuple(sorted(token for token in eos if 0 <= token < size)),
        bos_token_id=tokenizer.token_to_id(names["bos_token"]) if "bos_token" in names else None,
        context_length=context_length if isinstance(context_length, int) else None,
        **_templates(hf_tokenizer.chat_templates(path, settings), override, names),
    )


def _templates(sources: dict[str, str], override: str | None, names: dict[str, str]) -> dict[str, Any]:
    """The template fields of `TextModel`. A broken template must not keep the completions API from working."""
    if override is not None:
        sources = {"default": override}
    if "default" not in sources:
        return {"template_problem": _NO_TEMPLATE}
    try:
        fields: dict[str, Any] = {"template": ChatTemplate(sources["default"], names)}
        if "tool_use" in sources:
            fields["tool_template"] = ChatTemplate(sources["tool_use"], names)
    except TemplateError as error:
        if override is not None:
            raise UserError(f"the chat template given cannot be used: {error}") from error
        log.warning("the model's chat template cannot be used: %s", error)
        return {
            "template_problem": f"this model's chat template cannot be used ({error}): start the server with "
            "--chat-template FILE.jinja, or use /v1/completions"
        }
    return fields


def _adds_bos(tokenizer: Tokenizer, bos: str | None) -> bool:
    return bos is not None and tokenizer.encode("", add_special_tokens=True).tokens[:1] == [bos]


def _next_id(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the chat template {path}: {error}") from error

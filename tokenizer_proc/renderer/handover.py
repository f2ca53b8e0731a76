"""The model as a renderer gets it: what the tokenizer has loaded, whatever has become of the files since."""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import Tokenizer

from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.model import TextModel


def pack_model(model: TextModel, tokenizer_json: str) -> bytes:
    """`tokenizer_json`: where `model.tokenizer` is saved."""

    def plain(value: Any) -> Any:
        match value:
            case Tokenizer():
                return tokenizer_json
            case ChatTemplate():
                return value.source, value.variables
        raise NotImplementedError(type(value).__name__)

    return msgspec.msgpack.encode(model, enc_hook=plain)


def unpack_model(data: bytes | bytearray) -> TextModel:
    """Raises what `tokenizers` and `msgspec` raise if `data` or the tokenizer's file cannot be read."""

    def made(kind: type, value: Any) -> Any:
        return Tokenizer.from_file(value) if kind is Tokenizer else ChatTemplate(*value)

    return msgspec.msgpack.decode(data, type=TextModel, dec_hook=made)

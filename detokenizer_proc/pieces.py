"""What each token of a vocabulary contributes to decoded text, worked out once per tokenizer.

Decoding in the `tokenizers` library is: drop unknown ids (and special tokens, if asked), then run a decoder over the
token strings. For the decoders that language models use, a token's contribution depends on nothing but itself and on
whether it is the first, so it can be tabulated; a stream then costs one list lookup per token.

    ByteLevel (GPT-2, Llama 3, Qwen, SmolLM)      every token is some bytes; the text is their UTF-8, lossily
    Replace, ByteFallback, Fuse, Strip (Llama 2)  every token is a string or one byte
    Metaspace, none                               every token is a string, other when it comes first
    anything else                                 None: decode with a window (`incremental.WindowStream`)
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class BytePieces:
    """`data[id]`: the token's bytes, b"" for ids without one. `texts[id]`: the same as text, if it is whole UTF-8."""

    data: list[bytes]
    texts: list[str | None]

    @classmethod
    def of(cls, data: list[bytes]) -> BytePieces:
        return cls(data, [_whole_text(piece) for piece in data])

    def without(self, ids: frozenset[int]) -> BytePieces:
        data, texts = list(self.data), list(self.texts)
        for token in ids:
            data[token], texts[token] = b"", ""
        return BytePieces(data, texts)


@dataclass(frozen=True, slots=True)
class StringPieces:
    """`first[id]` and `rest[id]`: the token as text in first place and elsewhere; None: an id without a token.

    `bytes_of[id]` is set for byte-fallback tokens. `strip`: up to so many of this character are cut from the start.
    """

    first: list[str | None]
    rest: list[str | None]
    bytes_of: dict[int, int]
    strip: tuple[str, int] = ("", 0)

    def without(self, ids: frozenset[int]) -> StringPieces:
        first, rest = list(self.first), list(self.rest)
        for token in ids:
            first[token] = rest[token] = None
        return StringPieces(first, rest, {k: v for k, v in self.bytes_of.items() if k not in ids}, self.strip)


Pieces = BytePieces | StringPieces


def token_strings(tokenizer: Tokenizer) -> list[str | None]:
    """Token string by id, added tokens included; None for holes."""
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    added = {token: value.content for token, value in tokenizer.get_added_tokens_decoder().items()}
    strings: list[str | None] = [None] * (1 + max([*vocab.values(), *added, -1]))
    for string, token in vocab.items():
        strings[token] = string
    for token, string in added.items():
        strings[token] = string
    return strings


def special_ids(tokenizer: Tokenizer, strings: list[str | None]) -> frozenset[int]:
    """Ids that `skip_special_tokens` drops. The library goes by the token's string, so this does too."""
    contents = {value.content for value in tokenizer.get_added_tokens_decoder().values() if value.special}
    return frozenset(token for token, string in enumerate(strings) if string is not None and string in contents)


def build_pieces(tokenizer: Tokenizer, strings: list[str | None]) -> Pieces | None:
    """The table of a tokenizer, or None if its decoder is of a kind that cannot be tabulated."""
    if tokenizer.decoder is None:
        return StringPieces(strings, [None if s is None else " " + s for s in strings], {})
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level(strings)
    if kinds == ["Metaspace"]:
        return _metaspace(strings, steps[0])
    return _string_steps(strings, steps)


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE: printable Latin-1 as itself, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _byte_level(strings: list[str | None]) -> BytePieces:
    alphabet = byte_alphabet()
    to_latin = str.maketrans({char: chr(byte) for char, byte in alphabet.items()})
    encoded = re.compile(f"[{re.escape(''.join(alphabet))}]*").fullmatch

    def piece(string: str) -> bytes:
        # A token with any other character is an added token in plain text.
        return string.translate(to_latin).encode("latin-1") if encoded(string) else string.encode()

    return BytePieces.of([b"" if string is None else piece(string) for string in strings])


def _metaspace(strings: list[str | None], step: dict[str, Any]) -> StringPieces:
    mark = step["replacement"]
    rest = [None if s is None else s.replace(mark, " ") for s in strings]
    if step.get("prepend_scheme", "always") == "never":
        return StringPieces(rest, rest, {})
    return StringPieces([None if s is None else s.replace(mark, "") for s in strings], rest, {})


def _string_steps(strings: list[str | None], steps: list[dict[str, Any]]) -> StringPieces | None:
    """Replace (plain) × any, then at most one each of ByteFallback, Fuse, Strip (left, after Fuse), in this order."""
    order = ["ByteFallback", "Fuse", "Strip"]
    kinds = [step["type"] for step in steps]
    tail = [kind for kind in kinds if kind != "Replace"]
    if kinds != ["Replace"] * (len(kinds) - len(tail)) + tail or tail != [kind for kind in order if kind in tail]:
        return None
    table = strings
    strip = ("", 0)
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if not pattern:
                return None
            table = [None if s is None else s.replace(pattern, step["content"]) for s in table]
        elif step["type"] == "Strip":
            if step["stop"] or "Fuse" not in tail:
                return None
            strip = (step["content"], step["start"])
    bytes_of: dict[int, int] = {}
    if "ByteFallback" in tail:
        for token, string in enumerate(table):
            if string is not None and (match := _BYTE_TOKEN.fullmatch(string)):
                bytes_of[token] = int(match[1], 16)
    return StringPieces(table, table, bytes_of, strip)


def _whole_text(piece: bytes) -> str | None:
    text, used = utf_8_decode(piece, "replace", False)
    # The piece must not only be complete but also unable to complete bytes before it: those cases have U+FFFD here.
    return text if used == len(piece) and "\ufffd" not in text else None

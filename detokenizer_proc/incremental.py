"""Ids to text, one token at a time, with the text of a one-shot decode.

    joined pushes + flush  ==  tokenizer.decode(output_ids, skip_special_tokens)

for every sequence of ids: a character is emitted when its last byte has come and never as U+FFFD before, at most three
bytes are held back by a byte-level tokenizer, and each token costs the same however long the text is.

Relation to the prompt. Tokenizers in the style of SentencePiece drop the space in front of the first word they decode.
An answer that continues a prompt is not at the start of a text, so if any prompt token makes text, the output is
decoded as what follows (its leading space is kept), as a decode of prompt and output together would show. Byte-level
tokenizers have no such rule and the output is decoded by itself; a prompt of ids that ends inside a character does not
lend its bytes to the answer.

Ids that the tokenizer has no token for (a model's padded vocabulary) decode to nothing, as in the library. Negative ids
are an error.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from detokenizer_proc.pieces import BytePieces, Pieces, StringPieces, build_pieces, special_ids, token_strings

# Byte-fallback decoders turn a whole run of byte tokens into U+FFFD if any of it is invalid. A valid run is therefore
# held until it ends, but no longer than this many bytes: an answer in a script without tokens of its own must stream.
MAX_HELD_BYTES = 256
# Tokens of context, and most tokens held back, when a decoder can only be used as a black box.
WINDOW = 16


class TextStream(Protocol):
    """The text of one request's output, in order."""

    def push(self, token: int) -> str:
        """Text that became certain with this token. Raises ValueError if `token` is negative."""
        ...

    def flush(self) -> str:
        """What was held back, when no more tokens will come."""
        ...


class TextDecoder:
    """A tokenizer's decoding side: makes one `TextStream` per request and names single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        strings = token_strings(tokenizer)
        self._special = special_ids(tokenizer, strings)
        self._strings = strings
        self._all = build_pieces(tokenizer, strings)
        self._plain = self._all.without(self._special) if self._all else None

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """`prompt_ids`: the end of the prompt, at least back to its last token that makes text."""
        skipped = self._special if skip_special_tokens else frozenset()
        pieces: Pieces | None = self._plain if skip_special_tokens else self._all
        if isinstance(pieces, BytePieces):
            return ByteStream(pieces)
        context = [token for token in prompt_ids if self._has_token(token) and token not in skipped]
        if isinstance(pieces, StringPieces):
            return StringStream(pieces, first=not context)
        return WindowStream(self._tokenizer, context[-WINDOW:], skipped)

    def token_bytes(self, token: int) -> bytes:
        """A token's exact bytes inside a text; special tokens as they are written, b"" for an unknown id."""
        if not self._has_token(token):
            return b""
        if isinstance(self._all, BytePieces):
            return self._all.data[token]
        if isinstance(self._all, StringPieces):
            if (byte := self._all.bytes_of.get(token)) is not None:
                return bytes([byte])
            return (self._all.rest[token] or "").encode()
        return (self._strings[token] or "").encode()

    def _has_token(self, token: int) -> bool:
        return 0 <= token < len(self._strings) and self._strings[token] is not None


class ByteStream:
    """Byte-level vocabularies."""

    __slots__ = ("_data", "_held", "_texts")

    def __init__(self, pieces: BytePieces) -> None:
        self._data = pieces.data
        self._texts = pieces.texts
        self._held = b""  # the first one to three bytes of a character

    def push(self, token: int) -> str:
        if token < 0:
            raise ValueError(f"token id must not be negative, got {token}")
        try:
            if not self._held and (text := self._texts[token]) is not None:
                return text
            data = self._held + self._data[token]
        except IndexError:
            return ""
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        text = utf_8_decode(self._held, "replace", True)[0]
        self._held = b""
        return text


class StringStream:
    """Vocabularies of strings, with or without byte fallback."""

    __slots__ = ("_broken", "_bytes_of", "_emitted", "_first", "_held", "_is_first", "_rest", "_strip")

    def __init__(self, pieces: StringPieces, first: bool) -> None:
        self._first, self._rest, self._bytes_of = pieces.first, pieces.rest, pieces.bytes_of
        self._is_first = first
        self._strip = pieces.strip if first else ("", 0)
        self._held = b""  # bytes of the current run that are not emitted, valid UTF-8 as far as they go
        self._emitted = False  # part of the current run was emitted because it was too long to hold
        self._broken = False  # the current run holds an invalid byte: each of its bytes is a U+FFFD

    def push(self, token: int) -> str:
        if token < 0:
            raise ValueError(f"token id must not be negative, got {token}")
        try:
            text = self._first[token] if self._is_first else self._rest[token]
        except IndexError:
            return ""
        if text is None:
            return ""
        self._is_first = False
        if (byte := self._bytes_of.get(token)) is not None:
            text = self._push_byte(byte)
        elif self._held or self._broken or self._emitted:
            text = self._end_run() + text
        return self._stripped(text) if self._strip[1] else text

    def flush(self) -> str:
        text = self._end_run()
        return self._stripped(text) if self._strip[1] else text

    def _push_byte(self, byte: int) -> str:
        if self._broken:
            return "\ufffd"
        self._held += bytes([byte])
        try:
            text, used = utf_8_decode(self._held, "strict", False)
        except UnicodeDecodeError:
            return self._break_run()
        if len(self._held) < MAX_HELD_BYTES:
            return ""
        self._held = self._held[used:]
        self._emitted = True
        return text

    def _break_run(self) -> str:
        self._broken = True
        count, self._held = len(self._held), b""
        return "\ufffd" * count

    def _end_run(self) -> str:
        try:
            text = utf_8_decode(self._held, "strict", True)[0]
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._held)
        self._held, self._broken, self._emitted = b"", False, False
        return text

    def _stripped(self, text: str) -> str:
        char, count = self._strip
        cut = 0
        while cut < count and text[cut : cut + 1] == char:
            cut += 1
        if text:
            self._strip = (char, count - cut) if cut == len(text) else ("", 0)
        return text[cut:]


class WindowStream:
    """Any other decoder, as a black box: the difference between two decodes of the last few tokens.

    Exact for decoders that look no further than `WINDOW` tokens back.
    """

    __slots__ = ("_before", "_ids", "_read", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, context: list[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids = context  # context whose text is out, then tokens whose text is not
        self._read = len(context)
        self._before = self._decode()  # text of the first `_read` ids

    def push(self, token: int) -> str:
        if token < 0:
            raise ValueError(f"token id must not be negative, got {token}")
        if token in self._skipped or self._tokenizer.id_to_token(token) is None:
            return ""
        self._ids.append(token)
        text = self._decode()
        certain = not text.endswith("\ufffd") and text.startswith(self._before)
        return self._advance(text) if certain or len(self._ids) - self._read >= WINDOW else ""

    def flush(self) -> str:
        return self._advance(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)

    def _advance(self, text: str) -> str:
        delta = text[_common_length(self._before, text) :]
        self._before = text
        if len(self._ids) > 2 * WINDOW:
            self._ids = self._ids[-WINDOW:]
            self._before = self._decode()
        self._read = len(self._ids)
        return delta


def _common_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

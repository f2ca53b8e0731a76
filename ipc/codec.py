"""Messages to bytes and back: msgpack with a type for every field.

Decoding checks every field against its type and bound, so what comes out of `make_decoder` needs no further checks of
shape. Nothing here can run code that a peer sent: no pickle, no names looked up.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from ipc.messages import Prompt

# Above the largest message we make (a 32 MiB request body, the prompt log-probabilities of a long context) and far
# below what would exhaust memory.
MAX_MESSAGE_BYTES = 128 * 2**20


_encoder = msgspec.msgpack.Encoder()  # holds no state between calls
_prompt_decoder: msgspec.msgpack.Decoder[Prompt] = msgspec.msgpack.Decoder(Prompt)
# How encoded prompts begin, after a byte with the number of their fields: tags come first.
_FRONTS = {kind: _encoder.encode("type") + _encoder.encode(kind) for kind in ("chat", "text", "ids")}


def encode(message: msgspec.Struct) -> bytes:
    """Raises OverflowError for an int beyond 64 bits and UnicodeEncodeError (a ValueError) for a lone surrogate."""
    return _encoder.encode(message)


def make_decoder(union_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """A reusable decoder of one struct or of a tagged union. Its `decode` raises on anything else."""
    return msgspec.msgpack.Decoder(union_type)


def pack_prompt(prompt: Prompt) -> msgspec.Raw:
    """A prompt as a message carries it. Raises what `encode` raises."""
    return msgspec.Raw(_encoder.encode(prompt))


def unpack_prompt(data: msgspec.Raw | bytes | bytearray) -> Prompt:
    """Raises `msgspec.MsgspecError` if it is none."""
    return _prompt_decoder.decode(data)


def prompt_kind(prompt: msgspec.Raw) -> str:
    """Its tag, "chat", "text" or "ids", by a look at its front alone: stepping over a large one takes long, too. Empty
    if it is none of them."""
    front = bytes(memoryview(prompt)[1:16])
    return next((kind for kind, begin in _FRONTS.items() if front.startswith(begin)), "")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as int32 bytes, little endian. OverflowError if one does not fit."""
    return _to_bytes(array("i", ids))


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`. ValueError if the length is no multiple of 4."""
    return _from_bytes(array("i"), data)


def pack_request_ids(ids: Iterable[int]) -> bytes:
    """Request ids as int64 bytes, little endian."""
    return _to_bytes(array("q", ids))


def unpack_request_ids(data: bytes) -> list[int]:
    """The inverse of `pack_request_ids`. ValueError if the length is no multiple of 8."""
    return _from_bytes(array("q"), data)


def _to_bytes(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_bytes(values: array[int], data: bytes) -> list[int]:
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()

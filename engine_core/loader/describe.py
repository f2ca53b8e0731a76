"""What a model on disk is, without loading it and without torch: its config, and how its weights are stored."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_core.errors import UserError
from engine_core.loader.hf_config import read_config
from engine_core.models.config import ModelConfig

MAX_HEADER = 1 << 30


@dataclass(frozen=True, slots=True)
class Stored:
    """The weights of one storage type."""

    type: str  # "BF16", "Q4_K"
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Description:
    config: ModelConfig
    stored: tuple[Stored, ...]  # largest first; empty if the weights are not there


def describe(path: Path) -> Description:
    """Of a .gguf file, or of a directory with config.json and perhaps safetensors. Raises `UserError`."""
    if path.is_dir():
        tensors = (tensor for file in sorted(path.glob("*.safetensors")) for tensor in _safetensors(file))
        return Description(read_config(path), _by_type(tensors))
    from engine_core.loader.gguf_config import config_of
    from engine_core.loader.gguf_file import GGUFFile

    file = GGUFFile(path)
    infos = file.tensors.values()
    return Description(
        config_of(file), _by_type((info.ggml_type.name, math.prod(info.shape), info.num_bytes) for info in infos)
    )


def _by_type(tensors: Iterable[tuple[str, int, int]]) -> tuple[Stored, ...]:
    totals: dict[str, tuple[int, int]] = {}
    for kind, parameters, num_bytes in tensors:
        before = totals.get(kind, (0, 0))
        totals[kind] = before[0] + parameters, before[1] + num_bytes
    found = [Stored(kind, *counts) for kind, counts in totals.items()]
    return tuple(sorted(found, key=lambda each: -each.bytes))


def _safetensors(path: Path) -> list[tuple[str, int, int]]:
    """(type, number of weights, bytes) of each tensor, from the file's header."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header: dict[str, dict[str, Any]] = json.loads(file.read(size)) if size < MAX_HEADER else {}
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        return [
            (str(entry["dtype"]), math.prod(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{path} is damaged or incomplete ({error}); download it again") from None

"""The two ways to read a header agree: long arrays are either read or stepped over."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest

from ipc.gguf import HeaderReader

LONG: dict[str, Any] = {"strings": ["a", "größer", ""] * 3, "ints": list(range(9)), "floats": [0.5] * 9}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in LONG.items():
        writer.add_array(f"long.{name}", values)
        writer.add_array(f"short.{name}", values[:2])
    writer.add_string("last", "z")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def read(path: Path, longest: int | None = None) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = HeaderReader(path, data, longest)
        return reader.metadata()[0], reader.offset


def test_long_arrays_are_stepped_over(written: Path) -> None:
    everything, end = read(written)
    assert {name: everything[f"long.{name}"] for name in LONG} == LONG
    assert end == written.stat().st_size
    assert read(written, 9) == (everything, end)
    skipped, same_end = read(written, 8)
    assert same_end == end
    assert skipped == {key: None if key.startswith("long.") else value for key, value in everything.items()}


@pytest.mark.parametrize("longest", [None, 8])
def test_a_header_cut_anywhere_is_an_error(written: Path, tmp_path: Path, longest: int | None) -> None:
    data, cut = written.read_bytes(), tmp_path / "cut.gguf"
    for length in range(1, len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises((ValueError, struct.error)):
            read(cut, longest)

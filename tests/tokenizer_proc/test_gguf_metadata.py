from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from ipc.errors import UserError
from tokenizer_proc.gguf_metadata import read_metadata

KEYS: dict[str, Any] = {
    "a.bool": True,
    "a.int": 2**31,
    "a.float": 0.5,
    "a.text": "größer 你好 🙂\n",
    "a.strings": ["", "Ġt", "你"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.25, -1e9],
    "a.last": "z",
}


def test_reads_what_the_gguf_package_wrote(gguf_file: Callable[[dict[str, Any]], Path]) -> None:
    path = gguf_file(KEYS)
    assert read_metadata(path) == {"general.architecture": "llama", **KEYS}
    fields = gguf.GGUFReader(path).fields
    for key, value in read_metadata(path).items():
        assert fields[key].contents() == value


def test_a_file_cut_anywhere_is_an_error(gguf_file: Callable[[dict[str, Any]], Path], tmp_path: Path) -> None:
    data = gguf_file(KEYS).read_bytes()
    cut = tmp_path / "cut.gguf"
    end = data.rindex(b"a.last") + 6 + 4 + 8 + 1
    for length in range(end):
        cut.write_bytes(data[:length])
        with pytest.raises(UserError):
            read_metadata(cut)
    cut.write_bytes(data[:end])
    assert read_metadata(cut)["a.last"] == "z"


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"PK\x03\x04" + b"\0" * 40, "not a GGUF"), (b"GGUF\x01\0\0\0" + b"\0" * 40, "version 1"), (b"", "cannot read")],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_metadata(path)


def test_absurd_lengths_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for length in (2**40, 2**63, 2**64 - 1):
        path.write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 8 + (1).to_bytes(8, "little") + length.to_bytes(8, "little"))
        with pytest.raises(UserError):
            read_metadata(path)

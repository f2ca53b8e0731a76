"""What a container's limits leave of the machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine_core import device
from ipc.config import EngineConfig

MIB = 2**20


def container(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    monkeypatch.setattr(device, "CGROUP", folder)


def test_memory_is_what_the_limit_leaves_without_cached_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = f"anon {50 * MIB}\nfile {41 * MIB}\nactive_file {MIB}\ninactive_file {40 * MIB}\nslab 7\n"
    container(tmp_path, monkeypatch, memory_max=f"{100 * MIB}\n", memory_current=f"{95 * MIB}\n", memory_stat=stat)
    assert device.available_memory() == 45 * MIB
    (tmp_path / "memory.stat").unlink()
    assert device.available_memory() == 5 * MIB


def test_without_a_limit_memory_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container(tmp_path, monkeypatch, memory_max="max\n", memory_current=f"{95 * MIB}\n")
    assert 95 * MIB < device.available_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(("quota", "threads"), [("150000 100000", 1), ("1000 100000", 1), ("max 100000", None)])
def test_threads_stay_below_the_quota(
    quota: str, threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container(tmp_path, monkeypatch, cpu_max=quota + "\n")
    chosen = device.choose_threads(EngineConfig(model="m"))
    assert chosen == threads if threads else 1 <= chosen <= (psutil.cpu_count() or 1)
    assert device.choose_threads(EngineConfig(model="m", threads=7)) == 7

"""Memory for the CPU kernels: pieces of regions."""

from __future__ import annotations

import mmap
from pathlib import Path

import psutil
import pytest
import torch

from engine_core.errors import UserError
from engine_core.kernels import cpu_memory
from engine_core.kernels.cpu_memory import CACHE_LINE, HUGE_PAGE, REGION, Arena, zeros
from engine_core.memory import out_of_memory


def test_pieces_are_aligned_zero_and_apart() -> None:
    arena = Arena()
    sizes = [1, 63, 64, 65, 1000, HUGE_PAGE + 1, REGION // 2, REGION // 2 + 1, REGION // 2, REGION + 5, 7]
    pieces = [arena.take(size) for size in sizes]
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True), 1):
        assert len(piece) == size
        assert piece.data_ptr() % CACHE_LINE == 0
        assert not piece.any()
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces, 1))


@pytest.fixture(autouse=True)
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "_REST", 0)


def gather(arena: Arena) -> None:
    thread = arena.gather()
    assert thread is not None
    thread.join()
    assert arena.gather() is None


def test_what_is_gathered_stays_as_it_is() -> None:
    arena = Arena()
    first, large = arena.take(100).fill_(1), arena.take(REGION).fill_(2)
    gather(arena)
    second = arena.take(100)
    assert not second.any()
    second.fill_(3)
    gather(arena)
    assert [piece.unique().tolist() for piece in (first, large, second)] == [[1], [2], [3]]


def test_gathering_takes_no_memory_for_what_is_unused() -> None:
    arena, process = Arena(), psutil.Process()
    piece = arena.take(3 * HUGE_PAGE + 5).fill_(1)
    before = process.memory_info().rss
    gather(arena)
    assert process.memory_info().rss - before < 2 * HUGE_PAGE
    assert (piece == 1).all()


def test_gathering_ends_with_its_region() -> None:
    arena, process = Arena(), psutil.Process()
    before = process.memory_info().rss
    piece = arena.take(100 * HUGE_PAGE).fill_(1)
    thread = arena.gather()
    assert thread is not None
    del piece
    thread.join()
    assert process.memory_info().rss - before < 10 * HUGE_PAGE


def test_weights_in_use_while_they_are_moved_stay_as_they_are() -> None:
    arena = Arena()
    piece = arena.take(20 * HUGE_PAGE).view(torch.int64)
    torch.arange(len(piece), out=piece)
    thread = arena.gather()
    assert thread is not None
    expected = len(piece) * (len(piece) - 1) // 2
    sums = {int(piece.sum())}
    while thread.is_alive():
        sums.add(int(piece.sum()))
    assert sums == {expected}


@pytest.mark.parametrize("advice", [None, 1 << 20])  # one that Python does not know, one that the system refuses
def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch, advice: int | None) -> None:
    monkeypatch.setattr(cpu_memory, "_ADVISE", advice)
    monkeypatch.setattr(cpu_memory, "_COLLAPSE", 1 << 20)
    arena = Arena()
    piece = arena.take(HUGE_PAGE * 2).fill_(1)
    if advice is None:
        assert arena.gather() is None
    else:
        gather(arena)
    assert (piece == 1).all()


def test_a_system_whose_owner_wants_no_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arena = Arena()
    arena.take(HUGE_PAGE * 2).fill_(1)
    monkeypatch.setattr(cpu_memory, "_SETTING", tmp_path / "enabled")
    cpu_memory._SETTING.write_text("always madvise [never]\n")
    assert arena.gather() is None
    arena.take(HUGE_PAGE * 2).fill_(1)
    cpu_memory._SETTING.write_text("always [madvise] never\n")
    gather(arena)


def test_a_pool_takes_no_memory_until_it_is_written() -> None:
    before = psutil.Process().memory_info().rss
    pool = zeros(1 << 30)
    pool[1 << 29] = 1
    assert psutil.Process().memory_info().rss - before < 1 << 27
    assert pool[:: 1 << 27].sum() == 1
    assert pool.data_ptr() % mmap.PAGESIZE == 0


def test_a_piece_outlives_its_arena() -> None:
    arena = Arena()
    first, second = arena.take(100).fill_(1), arena.take(100).fill_(2)
    gather(arena)
    del arena
    assert (first == 1).all()
    assert (second == 2).all()


def test_a_region_goes_with_its_last_piece() -> None:
    arena, process = Arena(), psutil.Process()
    before = process.memory_info().rss
    for gathers in (False, True):  # a model that was not loaded to its end, and one that was
        pieces = [arena.take(REGION).fill_(1) for _ in range(2)]
        if gathers:
            gather(arena)
        assert process.memory_info().rss - before > 3 * REGION // 2
        del pieces
        assert process.memory_info().rss - before < REGION // 2


def test_what_the_system_refuses_is_explained() -> None:
    for allocate in (zeros, Arena().take):
        explained = pytest.raises(UserError, match="not enough memory for all of it; take less")
        with explained, out_of_memory("all of it", "take less"):
            allocate(1 << 60)

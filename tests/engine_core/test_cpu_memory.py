"""Memory for the CPU kernels: pieces of regions."""

from __future__ import annotations

from engine_core.kernels.cpu_memory import CACHE_LINE, HUGE_PAGE, REGION, Arena


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


def test_a_piece_outlives_its_arena() -> None:
    arena = Arena()
    first, second = arena.take(100).fill_(1), arena.take(100).fill_(2)
    del arena
    assert (first == 1).all()
    assert (second == 2).all()

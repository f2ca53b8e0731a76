"""What known GPUs can do at most: memory, bandwidth, and dense products without sparsity."""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.errors import UserError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    memory: int  # bytes that programs can have
    bandwidth: float  # bytes per second
    half_flops: float  # per second, bfloat16 and float16
    float32_flops: float
    measured: bool = False  # else from its data sheet, which no program reaches

    def flops(self, dtype: str) -> float:
        """Operations per second in a compute dtype."""
        return self.float32_flops if dtype == "float32" else self.half_flops


def _card(name: str, gib: float, gb_s: float, half: float, full: float, measured: bool = False) -> Card:
    return Card(name, int(gib * GIB), gb_s * 1e9, half * 1e12, full * 1e12, measured)


CARDS = {
    card.name: card
    for card in (
        _card("b200", 178, 7700, 2250, 75),
        _card("h200", 139.8, 4300, 790, 67, measured=True),  # a copy and bfloat16 products; float32 from the data sheet
        _card("h100", 79.1, 3350, 989, 67),
        _card("h100-pcie", 79.1, 2000, 756, 51),
        _card("a100", 79.2, 2039, 312, 19.5),
        _card("a100-40gb", 39.4, 1555, 312, 19.5),
        _card("l40s", 44.4, 864, 362, 91.6),
        _card("l4", 22, 300, 121, 30.3),
        _card("a10", 22, 600, 125, 31.2),
        _card("t4", 14.6, 320, 65, 8.1),
        _card("rtx5090", 31.4, 1792, 209.5, 104.8),
        _card("rtx4090", 23.5, 1008, 165.2, 82.6),
        _card("rtx3090", 23.6, 936, 71, 35.6),
    )
}


def find_card(name: str) -> Card:
    """Raises `UserError` that lists the known cards."""
    card = CARDS.get(name.lower().replace(" ", "").replace("_", "-"))
    if card is None:
        raise UserError(f"unknown GPU {name!r}; the known ones are: {', '.join(CARDS)}")
    return card

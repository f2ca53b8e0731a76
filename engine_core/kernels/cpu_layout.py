"""What the CPU kernels and their callers agree on: how weights and rounded inputs lie in memory, and sizes of tasks."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 32  # outputs whose weights lie side by side, the unit of work
BLOCK = 32  # inputs that share a scale
# A block of rounded inputs: 32 int8, float32 scale, float32 scale * sum of the integers, int32 -offset * sum, 4 unused.
X_BLOCK_BYTES = BLOCK + 16
X_GROUP = 8  # rows of rounded inputs whose blocks lie side by side: the first of all of them, then the second, ...
X_STEP = X_GROUP * X_BLOCK_BYTES  # from one block of a row to its next
TASK_ROWS = 4  # rows in a task of what is done row by row: the blocks of as many fill whole cache lines
PIECE = 18  # blocks of inputs of which a tile computes the sums at once
# In fixed point an input's scale is a whole number of steps, those of a row's piece together this many, but for
# rounding: so a scale fits 16 bits and a piece's sums 32, whatever the inputs. See `WeightFormat.fixed`.
X_STEPS = min(2**15 - 1, 2**31 // (2 * 127 * 8 * BLOCK)) - PIECE
# What becomes of a product: it lies in memory, is added to what does, SiLU(half) * half, or with the largest of chunks.
STORE, ADD, GATE, LARGEST = 0, 1, 2, 3
GROUP = 16  # outputs of a tile with many rows: widths of heads and KV blocks are multiples of it
QUERY_ROWS = 48  # query tokens times heads that share a KV head, in a task of attention
TASK_NUMBERS = 4  # of a task of attention: batch row, first query token, how many, first row of the result
CONTEXT = 64  # positions per step of attention's softmax
NO_WINDOW = 1 << 40  # positions: every query sees all before it


@dataclass(frozen=True)
class WeightFormat:
    """How a block of 32 weights is kept: as integers of 4 bits with a scale in fixed point, of 8 bits with one in half
    precision, or as plain floats (32); and whether a block has a minimum that is added to each of its weights."""

    bits: int
    minimum: bool = False

    @property
    def fixed(self) -> bool:
        """Whether sums stay integers through all of a piece, with scales that are whole numbers too.

        A lane of 32 bits holds two numbers of 16: the sum of 32 products with weights less 8, which is what 16 bits can
        hold, and above it 8 times the sum of the inputs, for the minimum. Both are multiplied at once, with scale and
        minimum + 8 * scale, 16 bits each, in units of the output's own: 2^-15 and 2^-12 of `PackedWeight.units`.
        """
        return self.bits == 4

    @property
    def offset(self) -> int:
        """Less this times the sum of its inputs a sum begins: what integers were raised by to be unsigned, and in fixed
        point also the upper number of a lane."""
        return 128 if self.bits == 8 else 8 - (8 << 16) if self.fixed else 0

    @property
    def kinds(self) -> int:
        """How many numbers of 16 bits a block has for each output."""
        return 0 if self.bits == 32 else 2 if self.minimum else 1

    @property
    def scales_at(self) -> int:
        """Where in a block of all the outputs of a chunk the integers or floats end, and the scales begin."""
        return CHUNK * BLOCK * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Of a block of all the outputs of a chunk."""
        return self.scales_at + self.kinds * CHUNK * 2


@dataclass(frozen=True)
class PoolFormat:
    """How the KV pool keeps numbers: as floats (32 bits), in half precision (16), or as int8 with scales (8).

    For each KV block and head K has a line for each dimension, with a cell for each position of the block; as int8 a
    cell holds four dimensions, which one instruction multiplies, each of them more by `KEY_OFFSET`, so that it is
    unsigned; and after each eight lines comes one of their float32 scales. V has the dimensions of one position side by
    side; as int8 a float32 scale for each position comes last.
    """

    bits: int

    @property
    def scaled(self) -> bool:
        return self.bits == 8

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return self.bits // 8

    @property
    def cell(self) -> int:
        """Bytes of a position in a line of K."""
        return 4 if self.scaled else self.item

    @property
    def scales(self) -> int:
        """Bytes of scales for `BLOCK` dimensions of K. V has as much room."""
        return 4 if self.scaled else 0


KEY_LINES = BLOCK // 4 + 1  # of int8 for `BLOCK` dimensions, the scales included
KEY_OFFSET = 128


# The shared state of a team: int64 cells, those that are written often in cache lines of their own.
GENERATION, OPEN, INSIDE, SLEEPERS = 0, 8, 16, 24
KERNEL, ARGS, SYSCALL, FUTEX, STOP, LAUNCHES, COUNT = 32, 33, 34, 35, 36, 37, 38
CELLS = 40
LAUNCH_BYTES = 24  # of a launch: int64 kernel, its arguments, and whether all threads share it
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # private to this process

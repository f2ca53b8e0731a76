"""The launches of one forward pass, written down stage by stage, with the memory that lies between them."""

from __future__ import annotations

import torch
from gguf.constants import GGMLQuantizationType

from engine_core.attention.cpu import CpuAttention
from engine_core.kernels.cpu_cache import kernel
from engine_core.kernels.cpu_elementwise import Largest, fixed_point
from engine_core.kernels.cpu_layout import BLOCK, CHUNK
from engine_core.kernels.cpu_linear import PackedLinear, largest_bytes, rounded_bytes
from engine_core.kernels.cpu_program import Launch
from engine_core.layers.norm import RMSNorm
from engine_core.loader.weights import QuantizedWeight
from engine_core.models.config import ModelConfig

SHARED = 2  # rows from which on threads share what is done row by row
NEW = 0  # in the place of what each step sets
# Numbers of arguments that a step sets, as the kernels' own descriptions count: the counter is number 0.
NORM_INDEX = 14
EMBED_IDS = GATHER_INDEX = 2
PRODUCT_OUT = 6
ENTER_STEP = ATTEND_STEP = slice(1, 6)


class Stages:
    """A pass of up to `capacity` tokens through layers of the shapes in `linears`.

    `total` [capacity, hidden] is the residual stream.
    """

    def __init__(self, config: ModelConfig, linears: list[PackedLinear], capacity: int) -> None:
        self.launches: list[Launch] = []
        self.total = torch.empty(capacity, config.hidden_size)
        self._heads = torch.empty(capacity, config.num_heads * config.head_dim)  # what attention gives
        self._inputs = torch.empty(max(_input_size(linear, capacity) for linear in linears))  # of a product
        self._gated = torch.empty_like(self._inputs)  # likewise
        self._results = torch.empty(capacity, max(linear.width for linear in linears))
        self._width, self._bias = 0, 0  # of the last product's results

    def embed(self, table: QuantizedWeight) -> bool:
        """The total becomes rows of `table`. False: there is no kernel for its blocks."""
        if table.ggml_type is not GGMLQuantizationType.Q8_0:
            return False
        data, blocks = table.data, table.shape[1] // BLOCK
        given = (data.ctypes.data, data.strides[0], blocks, self.total.data_ptr())
        self._add(kernel("elementwise:embed"), (NEW, NEW, *given))
        return True

    def choose(self) -> None:
        """The total shrinks to the rows that the step chooses by an index."""
        chosen, hidden = torch.empty_like(self.total), self.total.shape[1]
        self._add(kernel("elementwise:gather"), (NEW, NEW, self.total.data_ptr(), chosen.data_ptr(), hidden))
        self.total = chosen

    def product(self, linear: PackedLinear, x: torch.Tensor | None = None, out: torch.Tensor | None = None) -> None:
        """The inputs that lie ready, or float `x`, times the weights. The bias is left to the next stage."""
        inputs, results = (self._inputs if x is None else x), (self._results if out is None else out)
        self._add(*linear.product(NEW, inputs.data_ptr(), linear.in_features, results.data_ptr()), least=1)
        self._width, self._bias = linear.width, _address(linear.bias)

    def added_product(self, linear: PackedLinear, x: torch.Tensor | None = None) -> None:
        """The same, added to the total with its bias."""
        total, hidden, inputs = self.total.data_ptr(), self.total.shape[1], self._inputs if x is None else x
        if linear.rounds:
            self._add(*linear.added_product(NEW, inputs.data_ptr(), total, hidden), least=1)
            return
        self.product(linear, x)
        given = (NEW, self._results.data_ptr(), self._width, self._bias)
        self._add(kernel("elementwise:add"), (*given, total, hidden))

    def mlp(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        """SiLU of the first half of `gate_up` times the second, through `down`, added to the total."""
        if gate_up.rounds and down.rounds:
            inputs, gated = self._inputs.data_ptr(), self._gated.data_ptr()
            self._add(*gate_up.gated_product(NEW, inputs, down, gated), least=1)
        else:
            self.product(gate_up)
            given = (NEW, self._results.data_ptr(), self._width, self._bias, down.in_features)
            self._add(kernel("elementwise:silu_and_mul"), (*given, *self._target(down, self._gated)))
        self.added_product(down, self._gated)

    def norm(self, norm: RMSNorm, consumer: PackedLinear) -> None:
        """Norm the total for `consumer`: all rows, or those that the step chooses by an index."""
        hidden = self.total.shape[1]
        given = (self.total.data_ptr(), hidden, 0, 0, 0, 0)
        weight = (norm.weight.data_ptr(), hidden, fixed_point(norm.eps))
        self._add(kernel("elementwise:add_rms_norm"), (NEW, *given, *weight, *self._target(consumer, self._inputs), 0))

    def enter(self, layer: int, attention: CpuAttention, norms: tuple[RMSNorm, RMSNorm] | None) -> None:
        """Biases, the `norms` of Q and K, RoPE; K and V go to the pool."""
        weights = (0, 0, 0)
        if norms is not None:
            weights = (norms[0].weight.data_ptr(), norms[1].weight.data_ptr(), fixed_point(norms[0].eps))
        s = attention.spec
        shape = (s.num_heads, s.num_kv_heads, s.head_dim, s.block_size)
        given = (self._results.data_ptr(), self._width, self._bias, *weights)
        self._add(attention.enter_kernel, (*[NEW] * 5, *given, *attention.pools[layer], *shape))

    def attend(self, layer: int, attention: CpuAttention, consumer: PackedLinear) -> None:
        """Attend with Q as it lies in the last product, then multiply with `consumer` and add to the total."""
        args = attention.layer_args(layer, self._results.data_ptr(), self._width, self._heads.data_ptr())
        self._add(attention.attend_kernel, (*[NEW] * 5, *args), least=1)
        if not consumer.rounds:
            self.added_product(consumer, self._heads)
            return
        width, offset = self._heads.shape[1], consumer.weight.form.offset
        given = (NEW, self._heads.data_ptr(), width, width // BLOCK, self._inputs.data_ptr(), offset)
        self._add(kernel("linear:quantize"), given)
        self.added_product(consumer)

    def head(self, linear: PackedLinear, logits: torch.Tensor, vocab_size: int, best: Largest) -> None:
        """`logits` [rows, width], which a step may leave out if `linear` rounds; and `best` of each row: the largest of
        the first `vocab_size`."""
        found = best.indices.ctypes.data, best.values.ctypes.data
        if not linear.rounds:
            self.product(linear, out=logits)
            self._add(kernel("largest:argmax"), (NEW, logits.data_ptr(), logits.stride(0), vocab_size, *found))
            return
        self._largest = torch.empty(largest_bytes(len(logits), linear.width) // 4)
        largest = self._largest.data_ptr()
        self._add(*linear.telling_product(NEW, self._inputs.data_ptr(), NEW, largest), least=1)
        self._add(kernel("largest:of_chunks"), (NEW, largest, linear.width // CHUNK, *found))

    def _target(self, consumer: PackedLinear, memory: torch.Tensor) -> tuple[int, int, int]:
        """Where a product's inputs go: `out`, `rounded` and `offset` of the kernels that write them."""
        inputs = memory.data_ptr()
        return (0, inputs, consumer.weight.form.offset) if consumer.rounds else (inputs, 0, 0)

    def _add(self, kernel: int, args: tuple[int, ...], least: int = SHARED) -> None:
        self.launches.append(Launch(kernel, args, least))


def _input_size(linear: PackedLinear, rows: int) -> int:
    """Floats."""
    return rounded_bytes(rows, linear.in_features) // 4 if linear.rounds else rows * linear.in_features


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

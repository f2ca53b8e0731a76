"""The launches of one forward pass, written down stage by stage, with the memory that lies between them."""

from __future__ import annotations

import torch

from engine_core.attention.cpu import CpuAttention
from engine_core.kernels.cpu_cache import kernel
from engine_core.kernels.cpu_elementwise import fixed_point
from engine_core.kernels.cpu_layout import BLOCK
from engine_core.kernels.cpu_linear import PackedLinear, rounded_bytes
from engine_core.kernels.cpu_program import Launch
from engine_core.layers.norm import RMSNorm
from engine_core.models.config import ModelConfig

SHARED = 2  # rows from which on threads share what is done row by row
NEW = 0  # in the place of what each step sets
# Numbers of arguments that a step sets, as the kernels' own descriptions count: the counter is number 0.
NORM_X, NORM_RESIDUAL, NORM_INDEX = 2, 5, 14
ENTER_STEP = ATTEND_STEP = slice(1, 6)


class Stages:
    """A pass of up to `capacity` tokens through layers of the shapes in `linears`.

    `total` [capacity, hidden] is the residual stream. What the last product gave is yet to be added to it.
    """

    def __init__(self, config: ModelConfig, linears: list[PackedLinear], capacity: int) -> None:
        self.launches: list[Launch] = []
        self.total = torch.empty(capacity, config.hidden_size)
        self._heads = torch.empty(capacity, config.num_heads * config.head_dim)  # what attention gives
        self._inputs = torch.empty(max(_input_size(linear, capacity) for linear in linears))  # of a product
        self._results = torch.empty(capacity, max(linear.width for linear in linears))
        self._width, self._bias = 0, 0  # of the last product's results

    def product(self, linear: PackedLinear, x: torch.Tensor | None = None, out: torch.Tensor | None = None) -> None:
        """The inputs that lie ready, or float `x`, times the weights. The bias is left to the next stage."""
        inputs, results = (self._inputs if x is None else x), (self._results if out is None else out)
        self._add(*linear.product(NEW, inputs.data_ptr(), linear.in_features, results.data_ptr()), least=1)
        self._width, self._bias = linear.width, _address(linear.bias)

    def norm(self, norm: RMSNorm, consumer: PackedLinear, add: bool = True) -> None:
        """Add the last product to the total, or to what is given to the step as residual; norm it for `consumer`."""
        total, hidden = self.total.data_ptr(), self.total.shape[1]
        given = (self._results.data_ptr(), self._width, self._bias, total, hidden, total)
        if not add:
            given = (NEW, hidden, 0, 0, 0, 0)
        weight = (norm.weight.data_ptr(), hidden, fixed_point(norm.eps))
        self._add(kernel("elementwise:add_rms_norm"), (NEW, *given, *weight, *self._target(consumer), 0))

    def last_norm(self, norm: RMSNorm, consumer: PackedLinear) -> None:
        """Norm the rows of the total that the step chooses."""
        hidden = self.total.shape[1]
        given = (self.total.data_ptr(), hidden, 0, 0, 0, 0)
        weight = (norm.weight.data_ptr(), hidden, fixed_point(norm.eps))
        self._add(kernel("elementwise:add_rms_norm"), (NEW, *given, *weight, *self._target(consumer), NEW))

    def add(self) -> None:
        """Add the last product to the total."""
        given = (NEW, self._results.data_ptr(), self._width, self._bias)
        self._add(kernel("elementwise:add"), (*given, self.total.data_ptr(), self.total.shape[1]))

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
        """Attend with Q as it lies in the last product, then multiply with `consumer`."""
        args = attention.layer_args(layer, self._results.data_ptr(), self._width, self._heads.data_ptr())
        self._add(attention.attend_kernel, (*[NEW] * 5, *args), least=1)
        if not consumer.rounds:
            self.product(consumer, self._heads)
            return
        width, offset = self._heads.shape[1], consumer.weight.form.offset
        given = (NEW, self._heads.data_ptr(), width, width // BLOCK, self._inputs.data_ptr(), offset)
        self._add(kernel("linear:quantize"), given)
        self.product(consumer)

    def gate(self, consumer: PackedLinear) -> None:
        """SiLU of the last product's first half times the second, for `consumer`."""
        given = (NEW, self._results.data_ptr(), self._width, self._bias, consumer.in_features)
        self._add(kernel("elementwise:silu_and_mul"), (*given, *self._target(consumer)))

    def _target(self, consumer: PackedLinear) -> tuple[int, int, int]:
        """Where a product's inputs go: `out`, `rounded` and `offset` of the kernels that write them."""
        inputs = self._inputs.data_ptr()
        return (0, inputs, consumer.weight.form.offset) if consumer.rounds else (inputs, 0, 0)

    def _add(self, kernel: int, args: tuple[int, ...], least: int = SHARED) -> None:
        self.launches.append(Launch(kernel, args, least))


def _input_size(linear: PackedLinear, rows: int) -> int:
    """Floats."""
    return rounded_bytes(rows, linear.in_features) // 4 if linear.rounds else rows * linear.in_features


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

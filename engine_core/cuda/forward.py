"""One forward pass of a decoder on the GPU in its fused stages, five a layer, whatever kernels do them:

    qkv = norm_linear(x)        RMSNorm and the QKV product
    a   = attend(qkv)           QK-norm, RoPE, the KV write, attention
    x   = linear_add(a, x)      output projection, added to the residual
    h   = norm_gated(x)         RMSNorm, gate and up, SiLU * up
    x   = linear_add(h, x)      down projection, added to the residual

With a mixture of experts the last two are RMSNorm, the router and `triton_moe`, added to the residual.

One row, or four of a narrow model, stream the weights through GEMV kernels; few go to tensor-core kernels shaped for
them, of a narrow model up to 256, where those win; more to cuBLAS. `x` is the only state between stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_core.kernels import triton_gemm, triton_gemv, triton_moe, triton_pointwise
from engine_core.layers.linear import DenseLinear
from engine_core.layers.norm import RMSNorm
from engine_core.models.llama import LlamaForCausalLM, LlamaLayer, LlamaMLP

Attend = Callable[[int, torch.Tensor], torch.Tensor]  # layer, qkv [rows, ...] -> [rows, heads * head_dim]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    input_norm: RMSNorm
    qkv: DenseLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: DenseLinear
    mlp: FusedMLP | FusedMoE


@dataclass(frozen=True, slots=True)
class FusedMLP:
    norm: RMSNorm
    gate_up: DenseLinear
    down: DenseLinear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_add(norm_gated(x, self.norm, self.gate_up), self.down, x)


@dataclass(frozen=True, slots=True)
class FusedMoE:
    norm: RMSNorm
    router: DenseLinear
    gate_up: torch.Tensor  # [experts, 2 * intermediate, hidden]
    down: torch.Tensor  # [experts, hidden, intermediate]
    top_k: int
    normalize: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = triton_pointwise.rms_norm(x, self.norm.weight, self.norm.eps)
        ids, weights = triton_moe.route(linear_float32(y, self.router), self.top_k, self.normalize)
        return triton_moe.experts(y, ids, weights, self.gate_up, self.down, x)


def _mlp(layer: LlamaLayer) -> FusedMLP | FusedMoE:
    norm, mlp = layer.post_attention_norm, layer.mlp
    if isinstance(mlp, LlamaMLP):
        return FusedMLP(norm, _dense(mlp.gate_up_proj), _dense(mlp.down_proj))
    gate_up, down = mlp.experts.stacked_gate_up, mlp.experts.stacked_down
    assert gate_up is not None
    assert down is not None
    return FusedMoE(norm, _dense(mlp.router), gate_up, down, mlp.top_k, mlp.normalize)


def _dense(linear: object) -> DenseLinear:
    assert isinstance(linear, DenseLinear)  # weights on a GPU are dense
    return linear


class FusedModel:
    """The layers of `model` as fused stages. Holds no state between steps."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.eps = model.config.rms_norm_eps
        self.layers = [
            FusedLayer(
                layer.input_norm,
                _dense(layer.attention.qkv_proj),
                getattr(getattr(layer.attention, "q_norm", None), "weight", None),
                getattr(getattr(layer.attention, "k_norm", None), "weight", None),
                _dense(layer.attention.o_proj),
                _mlp(layer),
            )
            for layer in model.layers
        ]
        self.norm, self.head = model.norm, _dense(model.lm_head)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, hidden], which is overwritten -> [rows, hidden] before the last norm."""
        for index, layer in enumerate(self.layers):
            qkv = norm_linear(x, layer.input_norm, layer.qkv)
            x = linear_add(attend(index, qkv), layer.output, x)
            x = layer.mlp(x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        if triton_gemv.suits(x.shape[0], self.head.weight):
            return triton_gemv.gemv(x, self.head.weight, self.head.bias, norm=self.norm, dtype=torch.float32)
        return linear_float32(triton_pointwise.rms_norm(x, self.norm.weight, self.norm.eps), self.head)


def norm_linear(x: torch.Tensor, norm: RMSNorm, linear: DenseLinear) -> torch.Tensor:
    rows = x.shape[0]
    if triton_gemv.suits(rows, linear.weight):
        return triton_gemv.gemv(x, linear.weight, linear.bias, norm=norm)
    y = triton_pointwise.rms_norm(x, norm.weight, norm.eps)
    if triton_gemm.suits(rows, linear.weight):
        return triton_gemm.gemm(y, linear.weight, linear.bias)
    return functional.linear(y, linear.weight, linear.bias)


def linear_float32(x: torch.Tensor, linear: DenseLinear) -> torch.Tensor:
    """Not rounded to the dtype of x."""
    rows = x.shape[0]
    if triton_gemv.suits(rows, linear.weight):
        return triton_gemv.gemv(x, linear.weight, linear.bias, dtype=torch.float32)
    if triton_gemm.suits(rows, linear.weight):
        return triton_gemm.gemm(x, linear.weight, linear.bias, dtype=torch.float32)
    out = torch.mm(x, linear.weight.t(), out_dtype=torch.float32)
    return out if linear.bias is None else out + linear.bias


def linear_add(x: torch.Tensor, linear: DenseLinear, residual: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    if triton_gemv.suits(rows, linear.weight):
        return triton_gemv.gemv(x, linear.weight, linear.bias, residual=residual)
    if triton_gemm.suits(rows, linear.weight):
        return triton_gemm.gemm(x, linear.weight, linear.bias, residual=residual)
    out = residual.addmm_(x, linear.weight.t())  # in place: out of place torch copies the residual first
    return out if linear.bias is None else out.add_(linear.bias)


def norm_gated(x: torch.Tensor, norm: RMSNorm, linear: DenseLinear) -> torch.Tensor:
    rows = x.shape[0]
    if linear.bias is None and triton_gemv.suits(rows, linear.weight):
        return triton_gemv.gemv(x, linear.weight, None, norm=norm, gated=True)
    y = triton_pointwise.rms_norm(x, norm.weight, norm.eps)
    if linear.bias is None and triton_gemm.suits(rows, linear.weight, gated=True):
        return triton_gemm.gemm(y, linear.weight, None, gated=True)
    return triton_pointwise.silu_mul(functional.linear(y, linear.weight, linear.bias))

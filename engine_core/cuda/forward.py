"""One forward pass of a dense decoder on the GPU in its fused stages, five a layer, whatever kernels do them:

    qkv = norm_linear(x)        RMSNorm and the QKV product
    a   = attend(qkv)           QK-norm, RoPE, the KV write, attention
    x   = linear_add(a, x)      output projection, added to the residual
    h   = norm_gated(x)         RMSNorm, gate and up, SiLU * up
    x   = linear_add(h, x)      down projection, added to the residual

One row, or four of a narrow model, stream the weights through GEMV kernels, up to 64 go to tensor-core kernels shaped
for few rows, more to cuBLAS. `x` is the only state between stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_core.kernels import triton_gemm, triton_gemv, triton_pointwise
from engine_core.layers.linear import DenseLinear
from engine_core.layers.norm import RMSNorm
from engine_core.models.llama import LlamaForCausalLM

Attend = Callable[[int, torch.Tensor], torch.Tensor]  # layer, qkv [rows, ...] -> [rows, heads * head_dim]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    input_norm: RMSNorm
    qkv: DenseLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: DenseLinear
    mlp_norm: RMSNorm
    gate_up: DenseLinear
    down: DenseLinear


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
                layer.post_attention_norm,
                _dense(layer.mlp.gate_up_proj),
                _dense(layer.mlp.down_proj),
            )
            for layer in model.layers
        ]
        self.norm, self.head = model.norm, _dense(model.lm_head)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, hidden], which is overwritten -> [rows, hidden] before the last norm."""
        for index, layer in enumerate(self.layers):
            qkv = norm_linear(x, layer.input_norm, layer.qkv)
            x = linear_add(attend(index, qkv), layer.output, x)
            x = linear_add(norm_gated(x, layer.mlp_norm, layer.gate_up), layer.down, x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        rows = x.shape[0]
        if triton_gemv.suits(rows, self.head.weight):
            return triton_gemv.gemv(x, self.head.weight, self.head.bias, norm=self.norm, dtype=torch.float32)
        y = triton_pointwise.rms_norm(x, self.norm.weight, self.norm.eps)
        if triton_gemm.suits(rows, self.head.weight):
            return triton_gemm.gemm(y, self.head.weight, self.head.bias, dtype=torch.float32)
        out = torch.mm(y, self.head.weight.t(), out_dtype=torch.float32)
        return out if self.head.bias is None else out + self.head.bias


def norm_linear(x: torch.Tensor, norm: RMSNorm, linear: DenseLinear) -> torch.Tensor:
    rows = x.shape[0]
    if triton_gemv.suits(rows, linear.weight):
        return triton_gemv.gemv(x, linear.weight, linear.bias, norm=norm)
    y = triton_pointwise.rms_norm(x, norm.weight, norm.eps)
    if triton_gemm.suits(rows, linear.weight):
        return triton_gemm.gemm(y, linear.weight, linear.bias)
    return functional.linear(y, linear.weight, linear.bias)


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

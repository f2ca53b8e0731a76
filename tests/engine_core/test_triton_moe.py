"""The kernels of a mixture of experts against plain torch: fresh random inputs, poisoned workspaces, compiled on a GPU
and in Triton's interpreter without one."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine_core.cuda.forward import FusedMoE
from engine_core.kernels import triton_moe
from engine_core.layers.linear import DenseLinear
from engine_core.layers.moe import Experts, SparseMoE
from engine_core.layers.norm import RMSNorm

GPU = torch.cuda.is_available()  # if not, tests/conftest.py has chosen the interpreter
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]  # the interpreter gets bf16 products wrong
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seed() -> int:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def poisoned_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel wrote is NaN, or a number far out of range."""

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else 10**9, dtype=dtype, device=device)

    def empty_like(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, float("nan"))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", empty_like)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (5, 3), (4, 4), (60, 1)])
@pytest.mark.parametrize("normalize", [False, True])
def test_route(num_experts: int, top_k: int, normalize: bool) -> None:
    # Never two so close that their probabilities are equal: torch does not say which of those comes first.
    steps = (0.1 + torch.rand(7, num_experts)) * 20 / num_experts
    logits = steps.cumsum(1).gather(1, torch.rand(7, num_experts).argsort(1)).to(DEVICE)
    ids, weights = triton_moe.route(logits, top_k, normalize)
    expected, chosen = logits.softmax(-1).topk(top_k)
    if normalize:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(ids.long(), chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_a_row_of_nan_or_infinity_names_different_experts_that_exist() -> None:
    logits = torch.randn(4, 5, device=DEVICE)
    logits[0], logits[1, 3], logits[2], logits[3, 1] = float("nan"), float("nan"), float("inf"), float("-inf")
    ids, _ = triton_moe.route(logits, 3, True)
    for row in ids.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(5))


def uneven(tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Some experts are popular, some unused."""
    return (torch.randn(tokens, num_experts) + 2 * torch.randn(num_experts)).topk(top_k).indices


def all_to_the_last(tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    return torch.arange(num_experts - top_k, num_experts).expand(tokens, top_k)


def all_to_the_first(tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    return torch.arange(top_k).expand(tokens, top_k)


Choice = Callable[[int, int, int], torch.Tensor]
CHOICES = pytest.mark.parametrize("choose", [uneven, all_to_the_last, all_to_the_first])


@CHOICES
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "rows"),
    [(9, 5, 2, 16), (16, 3, 1, 16), (17, 3, 1, 16), (33, 6, 4, 16), (70, 4, 2, 32), (70, 4, 2, 64), (1100, 6, 2, 128)],
)
def test_sorting(choose: Choice, tokens: int, num_experts: int, top_k: int, rows: int) -> None:
    """Every pair is in one tile of its expert, the rest of the tile says so, and tiles left over are marked."""
    ids = choose(tokens, num_experts, top_k).int().contiguous().to(DEVICE)
    order, tile_experts = triton_moe.sort_by_expert(ids, num_experts, rows)
    flat, pairs = ids.flatten().tolist(), tokens * top_k
    expected_pairs: list[list[int]] = []
    expected_experts = []
    for expert in range(num_experts):
        own = [pair for pair in range(pairs) if flat[pair] == expert]
        own += [pairs] * (-len(own) % rows)
        expected_pairs += [own[at : at + rows] for at in range(0, len(own), rows)]
        expected_experts += [expert] * (len(own) // rows)
    left_over = len(tile_experts) - len(expected_experts)
    assert left_over >= 0
    assert tile_experts.tolist() == expected_experts + [-1] * left_over
    assert order.view(-1, rows)[: len(expected_pairs)].tolist() == expected_pairs


def expected_sum(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """float64 [tokens, hidden]."""
    rows = []
    for row, chosen, scales in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        parts = []
        for expert, scale in zip(chosen, scales, strict=True):
            gate, up = (gate_up[expert].double() @ row).chunk(2)
            parts.append(scale * (down[expert].double() @ (torch.nn.functional.silu(gate) * up)))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@CHOICES
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "hidden", "intermediate"),
    [
        (1, 5, 2, 256, 64),  # a tile per pair
        (8, 4, 3, 80, 40),
        (9, 4, 3, 80, 40),  # tiles of 16
        (12, 70, 2, 64, 32),  # more experts than pairs
        (40, 2, 1, 96, 72),  # tiles of 32, or of 16 in float32
        (50, 2, 2, 64, 66),  # tiles of 64
        (70, 2, 2, 64, 130),  # tiles of 128
    ],
)
def test_experts(
    choose: Choice, tokens: int, num_experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype
) -> None:
    x, residual = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype)
    gate_up = random(num_experts, 2 * intermediate, hidden, dtype=dtype, scale=hidden**-0.5)
    down = random(num_experts, hidden, intermediate, dtype=dtype, scale=intermediate**-0.5)
    ids = choose(tokens, num_experts, top_k).int().contiguous().to(DEVICE)
    weights = torch.rand(tokens, top_k, device=DEVICE)
    unused = sorted(set(range(num_experts)) - set(ids.flatten().tolist()))
    gate_up[unused], down[unused] = float("nan"), float("nan")
    out = triton_moe.experts(x, ids, weights, gate_up, down, residual)
    expected = residual.double() + expected_sum(x, ids, weights, gate_up, down)
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < TOLERANCE[dtype]
    assert torch.equal(out, triton_moe.experts(x, ids, weights, gate_up, down, residual))


def test_a_tokens_nan_stays_with_it(dtype: torch.dtype) -> None:
    x = random(20, 64, dtype=dtype)
    gate_up, down = random(3, 64, 64, dtype=dtype, scale=0.1), random(3, 64, 32, dtype=dtype, scale=0.1)
    weights = torch.rand(20, 2, device=DEVICE)
    ids = uneven(20, 3, 2).int().contiguous().to(DEVICE)
    clean = triton_moe.experts(x, ids, weights, gate_up, down, x)
    dirty = x.clone()
    dirty[7] = float("nan")
    out = triton_moe.experts(dirty, ids, weights, gate_up, down, dirty)
    others = torch.arange(20) != 7
    assert out[7].isnan().all()
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_the_fused_stage_is_the_layer(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, router, experts and residual, against the plain layer that the CPU runs."""
    dtype, hidden, intermediate, num_experts = torch.float16, 128, 64, 8
    linears: list[list[Any]] = [
        [DenseLinear(random(*shape, dtype=dtype, scale=0.1)) for _ in range(num_experts)]
        for shape in ((2 * intermediate, hidden), (hidden, intermediate))
    ]
    experts = Experts.stack(*linears)
    router = DenseLinear(random(num_experts, hidden, dtype=dtype, scale=0.1))
    norm = RMSNorm(random(hidden, dtype=dtype), 1e-6)
    # Tokens whose third expert is clearly before their fourth: rounding, which differs, would decide the others.
    x = random(8 * tokens + 64, hidden, dtype=dtype)
    scores = (norm(x).double() @ router.weight.double().T).sort(descending=True).values
    x = x[scores[:, 2] - scores[:, 3] > 0.05][:tokens]
    assert experts.stacked_gate_up is not None
    assert experts.stacked_down is not None
    out = FusedMoE(norm, router, experts.stacked_gate_up, experts.stacked_down, 3, True)(x)
    monkeypatch.undo()
    expected = x + SparseMoE(router, experts, 3, True)(norm(x))
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    assert error < 2 * TOLERANCE[dtype]

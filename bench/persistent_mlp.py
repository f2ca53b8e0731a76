"""A study: would fewer, larger kernels make decode faster? The MLP of a layer as one persistent kernel, against two
kernels chained by programmatic dependent launch, for one row.

    python -m bench.persistent_mlp

The persistent kernel holds every program on the card at once, so they can wait for one another at a barrier in the
middle (a counter in memory). The weights of the second product are asked for before the barrier. Prints microseconds a
layer, medians of CUDA-graph replays over all layers of a model, and the largest difference from torch in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_core.kernels import triton_gemv
from engine_core.layers.norm import RMSNorm

SHAPES = {"qwen3-0.6b": (1024, 3072, 28), "qwen3-8b": (4096, 12288, 8)}  # hidden, intermediate, layers


@triton.jit
def _sum_rows(x, base, k, K: tl.constexpr, w, PRELOAD: tl.constexpr):
    """The products of a tile [OWN, WARPS, 256 * chunks] of weights with one row of x."""
    acc = w[0].to(tl.float32) * tl.load(x + k, cache_modifier=".cg").to(tl.float32)
    for c in tl.static_range(1, K // 256):
        if c < PRELOAD:
            wc = w[c]
        else:
            wc = tl.load(base + c * 256)
        acc += wc.to(tl.float32) * tl.load(x + k + c * 256, cache_modifier=".cg").to(tl.float32)
    return tl.sum(acc, 2)


@triton.jit
def _mlp(
    x,
    norm,
    gate_up,
    down,
    hidden,
    out,
    counter,
    eps,
    H: tl.constexpr,
    N: tl.constexpr,
    OWN: tl.constexpr,
    WARPS: tl.constexpr,
    PRELOAD: tl.constexpr,
):
    gdc_launch_dependents()
    program = tl.program_id(0)
    warp = tl.arange(0, WARPS)[None, :]
    k = tl.arange(0, 256)[None, None, :]
    same = warp[:, :, None] * 0 + k
    row = tl.minimum((program * WARPS + warp) * OWN + tl.arange(0, OWN)[:, None], N - 1)
    gate = gate_up + row.to(tl.int64)[:, :, None] * H + k
    g = ()
    u = ()
    for c in tl.static_range(2):
        g = g + (tl.load(gate + c * 256),)
        u = u + (tl.load(gate + N * H + c * 256),)
    gdc_wait()
    acc = tl.zeros((OWN, WARPS, 256), tl.float32)
    up = tl.zeros((OWN, WARPS, 256), tl.float32)
    squares = tl.zeros((1, WARPS, 256), tl.float32)
    for c in tl.static_range(H // 256):
        if c < 2:
            gc = g[c]
            uc = u[c]
        else:
            gc = tl.load(gate + c * 256)
            uc = tl.load(gate + N * H + c * 256)
        xc = tl.load(x + same + c * 256).to(tl.float32)
        squares += xc * xc
        xc = xc * tl.load(norm + same + c * 256).to(tl.float32)
        acc += gc.to(tl.float32) * xc
        up += uc.to(tl.float32) * xc
    scale = tl.rsqrt(tl.sum(squares, 2) / H + eps)
    y = tl.sum(acc, 2) * scale
    y = y / (1 + tl.exp(-y)) * tl.sum(up, 2) * scale
    tl.store(hidden + row, y.to(hidden.dtype.element_ty))
    mine = tl.minimum(program * WARPS + warp, H - 1)
    base = down + mine.to(tl.int64)[:, :, None] * N + k
    w = ()
    for c in tl.static_range(PRELOAD):
        w = w + (tl.load(base + c * 256),)
    rest = tl.load(x + mine).to(tl.float32)
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel")
    spins = 0
    while (tl.atomic_add(counter, 0, sem="acquire") < tl.num_programs(0)) & (
        spins < 1 << 20
    ):  # rather wrong than stuck
        spins += 1
    tl.debug_barrier()
    if program * WARPS < H:
        z = _sum_rows(hidden, base, same, N, w, PRELOAD) + rest
        tl.store(out + mine, z.to(out.dtype.element_ty), mask=program * WARPS + warp < H)


def fits(programs: int, warps: int, registers: int) -> bool:
    """Whether all programs are on the card at once."""
    card = torch.cuda.get_device_properties(0)
    each = min(64 // warps, 65536 // (triton.cdiv(registers, 8) * 8 * 32 * warps))
    return programs <= each * card.multi_processor_count


def time_layers(step: Callable[[], object], layers: int) -> float:
    """Microseconds a layer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times) / layers


def study(name: str) -> None:
    hidden, inner, layers = SHAPES[name]
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    gate_up = [torch.randn(2 * inner, hidden, **kind) * hidden**-0.5 for _ in range(layers)]  # type: ignore[call-overload]
    down = [torch.randn(hidden, inner, **kind) * inner**-0.5 for _ in range(layers)]  # type: ignore[call-overload]
    norm = RMSNorm(torch.rand(hidden, **kind) + 0.5, 1e-6)  # type: ignore[call-overload]
    first = torch.randn(1, hidden, **kind)  # type: ignore[call-overload]
    counters = torch.zeros(layers, dtype=torch.int32, device="cuda")

    def two_kernels() -> torch.Tensor:
        x = first
        for layer in range(layers):
            h = triton_gemv.gemv(x, gate_up[layer], norm=norm, gated=True)
            x = triton_gemv.gemv(h, down[layer], residual=x)
        return x

    def persistent(own: int, warps: int, preload: int) -> torch.Tensor:
        x = first
        counters.zero_()
        for layer in range(layers):
            h, out = torch.empty(1, inner, **kind), torch.empty_like(x)  # type: ignore[call-overload]
            programs = max(triton.cdiv(inner, own * warps), triton.cdiv(hidden, warps))
            _mlp[(programs,)](
                *(x, norm.weight, gate_up[layer], down[layer], h, out, counters[layer:], norm.eps),
                *(hidden, inner, own, warps, preload),
                num_warps=warps,
                launch_pdl=True,
            )
            x = out
        return x

    exact = first.float()
    for layer in range(layers):
        normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
        g, u = (normed @ gate_up[layer].float().T).chunk(2, -1)
        exact = exact + (torch.nn.functional.silu(g) * u) @ down[layer].float().T
    floor = 3 * hidden * inner * 2 / 4.3e6
    print(f"{name}: floor {floor:.2f} us a layer")
    print(f"  two kernels: {time_layers(two_kernels, layers):.2f} us, error {(two_kernels() - exact).abs().max():.3f}")
    for own, warps, preload in ((1, 16, 4), (1, 16, 12), (2, 8, 4), (2, 8, 12), (2, 16, 4), (4, 8, 4), (4, 8, 12)):
        programs = max(triton.cdiv(inner, own * warps), triton.cdiv(hidden, warps))
        args = (first, norm.weight, gate_up[0], down[0], first, first, counters, norm.eps)
        kernel = _mlp.warmup(
            *args, hidden, inner, own, warps, preload, grid=(1,), num_warps=warps, launch_pdl=True
        )  # fmt: skip
        kernel._init_handles()
        if not fits(programs, warps, kernel.n_regs):
            print(f"  one kernel, {programs} programs of {warps} warps do not fit at {kernel.n_regs} registers")
            continue
        time = time_layers(lambda: persistent(own, warps, preload), layers)  # noqa: B023
        error = (persistent(own, warps, preload) - exact).abs().max()
        print(f"  one kernel, {programs} programs of {warps} warps, {own} rows a warp, {preload} chunks early: "
              f"{time:.2f} us, error {error:.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this needs a CUDA device")
    for shape in SHAPES:
        study(shape)


if __name__ == "__main__":
    main()

"""`gapless explain`: what a model takes, what fits on a card, and how fast the card could possibly be. No torch.

`explain` is looked up by the command line by its module string: the frontend does not import the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from engine_core.cards import Card, find_card
from engine_core.costs import ModelCosts, turning_point
from engine_core.loader.describe import Description, describe
from engine_core.models.config import ModelConfig
from ipc.config import EngineOptions

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (0, *(1024 * 2**power for power in range(8)))  # 0: the weights alone; 1k to 128k
PROMPTS = (128, 512, 2048, 8192, 32768, 131072)
MOST = 1 << 30  # sequences, in the search for the batch that turns
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NOTES = """\
Least times: each weight and each position of KV moved once, nothing but products and attention computed, moving and
computing side by side. Real steps take longer; nothing makes them shorter. m: memory is the limit, c: computing is;
!: that much KV does not fit. Contexts beyond the model's own are what they would be. Memory that activations, CUDA
graphs and kernels take is not counted, some 1 to 4 GB on a large card."""


def explain(path: str, name: str, gpu: str, options: EngineOptions) -> str:
    """The report. Of `options` count dtype, max_model_len, block_size, the share of memory and the given limits.

    Raises `UserError` for a model or a card that is unknown.
    """
    card = find_card(gpu)
    found = describe(Path(path))
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    costs = ModelCosts(found.config, BYTES[dtype], BYTES[dtype])
    bandwidth = options.peak_bandwidth * 1e9 if options.peak_bandwidth else card.bandwidth
    flops = options.peak_tflops * 1e12 if options.peak_tflops else card.flops(dtype)
    max_len = min(options.max_model_len or found.config.max_position, found.config.max_position)
    given = bool(options.peak_bandwidth or options.peak_tflops)
    source = "as given" if given else "as measured" if card.measured else "by its data sheet"
    sections = (
        _model(found.config, name, max_len),
        [f"{card.name}: {card.memory / 1e9:.1f} GB, {bandwidth / 1e12:.2f} TB/s, {flops / 1e12:.0f} TFLOP/s {source}"],
        _weights(costs, found, dtype),
        _memory(costs, card, options, max_len),
        _decode(costs, _kv_blocks(costs, card, options) * options.block_size, bandwidth, flops),
        _intensity(costs, bandwidth, flops),
        _prefill(costs, max_len, bandwidth, flops),
        NOTES.splitlines(),
    )
    return "\n\n".join("\n".join(lines) for lines in sections)


def _model(config: ModelConfig, name: str, max_len: int) -> list[str]:
    lines = [
        f"{name}: {config.architecture}, {config.num_layers} layers, hidden size {config.hidden_size}, "
        f"{config.num_heads} heads, {config.num_kv_heads} KV heads of {config.head_dim}, context {max_len:,}"
    ]
    if config.moe:
        moe = config.moe
        lines.append(f"{moe.experts_per_token} of {moe.num_experts} experts per token in {len(moe.layers)} layers")
    sliding = [window for window in config.windows if window is not None]
    if sliding:
        lines.append(f"{len(sliding)} of {config.num_layers} layers see a window of {max(sliding):,} tokens")
    return lines


def _weights(costs: ModelCosts, found: Description, dtype: str) -> list[str]:
    p = costs.parameters
    parts = {
        "embedding" + (", also the head" if found.config.tie_embeddings else ""): p.embedding,
        "head": p.head,
        "attention": p.attention,
        "MLP": p.mlp,
        "experts": p.experts,
        "routers": p.routers,
        "norms": p.norms,
    }
    rows = [[part, _count(count), _bytes(count * costs.weight_bytes)] for part, count in parts.items() if count]
    rows.append(["all", _count(p.total), _bytes(costs.total_bytes)])
    rows.append(["active in a token", _count(costs.active_parameters), _bytes(costs.weights_read(1, 1))])
    lines = _table([f"Weights in {dtype}", "number", "size"], rows, indent="")
    if found.stored:
        kinds = ", ".join(f"{each.type} {_count(each.parameters)} in {_bytes(each.bytes)}" for each in found.stored)
        lines.append(f"On disk: {kinds}; a GPU holds them in {dtype}")
    return lines


def _kv_blocks(costs: ModelCosts, card: Card, options: EngineOptions) -> int:
    left = card.memory * options.gpu_memory_utilization - costs.total_bytes
    return max(0, int(left // (costs.kv_bytes_per_token * options.block_size)))


def _memory(costs: ModelCosts, card: Card, options: EngineOptions, max_len: int) -> list[str]:
    budget = card.memory * options.gpu_memory_utilization
    per_token, longest = costs.kv_bytes_per_token, _bytes(costs.kv_bytes_per_token * max_len)
    lines = [f"KV cache: {per_token:,} B per token, {longest} per request of {max_len:,}"]
    blocks = _kv_blocks(costs, card, options)
    if not blocks:
        return [*lines, f"It does not fit: {_bytes(costs.total_bytes)} of weights into {_bytes(budget)}"]
    full = blocks // -(-max_len // options.block_size)
    lines.append(
        f"What fits into {options.gpu_memory_utilization:.0%} of the memory: {_bytes(budget - costs.total_bytes)} of "
        f"KV, {blocks * options.block_size:,} tokens, {full:,} requests of {max_len:,} at once"
    )
    return lines


def _decode(costs: ModelCosts, kv_tokens: int, bandwidth: float, flops: float) -> list[str]:
    def cell(batch: int, context: int) -> str:
        work = costs.decode(batch, context)
        time, bound = _milliseconds(work.seconds(bandwidth, flops)), work.compute_bound(bandwidth, flops)
        return f"{time}{'c' if bound else 'm'}{'!' if batch * context > kv_tokens else ' '}"

    def turn(context: int) -> str:
        found = turning_point(lambda batch: costs.decode(batch, context), bandwidth, flops, MOST)
        return f"{found:,}  " if found else "never  "

    rows = [[str(batch), *(cell(batch, context) for context in CONTEXTS)] for batch in BATCHES]
    rows.append(["c from", *map(turn, CONTEXTS)])
    return [
        "A decode step at best, in ms, by the number of sequences and the context of each",
        *_table(["", *(f"{_thousands(context)}  " for context in CONTEXTS)], rows),
    ]


def _intensity(costs: ModelCosts, bandwidth: float, flops: float) -> list[str]:
    rows = [[str(n), *(f"{costs.decode(n, context).intensity:.1f}" for context in CONTEXTS)] for n in (1, 16, 256)]
    return [
        f"Operations per byte of a decode step; from {flops / bandwidth:.0f} on, computing is the limit",
        *_table(["", *map(_thousands, CONTEXTS)], rows),
    ]


def _prefill(costs: ModelCosts, max_len: int, bandwidth: float, flops: float) -> Iterator[str]:
    prompts = [tokens for tokens in PROMPTS if tokens <= max_len] or [max_len]
    works = [costs.prefill(tokens) for tokens in prompts]
    times = [_milliseconds(work.seconds(bandwidth, flops)) for work in works]
    turn = turning_point(costs.prefill, bandwidth, flops, max_len)
    yield "A prompt at best"
    yield from _table(
        ["tokens", *map(_thousands, prompts)],
        [["ms", *times], ["operations per byte", *(f"{work.intensity:,.0f}" for work in works)]],
    )
    yield f"  Computing is the limit from {turn:,} tokens in a step on" if turn else "  Memory is always the limit"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines of a table whose first column is flushed left and whose others are flushed right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for first, *others in (head, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append((indent + "  ".join([first.ljust(widths[0]), *cells])).rstrip())
    return lines


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,.0f}"


def _bytes(number: float) -> str:
    return (
        f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB" if number >= 1e5 else f"{number:,.0f} B"
    )

"""What sampling costs on a GPU: medians of CUDA-graph replays, in microseconds, by kind of request and rows.

    python -m bench.sampling_gpu [--vocabulary 151936] [--rows 1,16,64,256] [--out FILE.jsonl]

Logits are of two shapes: "peaked" as a language model's (probability falls as a power of the rank: a top_p set of
0.95 has a few hundred tokens), "flat" (normal, scale 3: 14,000). Each figure is that of the whole draw: edits, search,
draw, log-probabilities, as in a step. The first line is one reading of the logits at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from engine_core.cuda.sampling import DeviceSampler
from engine_core.request import Request
from ipc.sampling import SamplingParams

KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k 20, top_p 0.95": {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    "top_k 1000": {"temperature": 1.0, "top_k": 1000},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "bias of 300, min_tokens": {
        "temperature": 1.0,
        "logit_bias": {token * 500: 1.0 for token in range(300)},
        "min_tokens": 9,
    },
    "logprobs 5": {"temperature": 1.0, "logprobs": 5},
    "logprobs 20": {"temperature": 1.0, "logprobs": 20},
    "penalties, top_k, top_p, logprobs 5": {
        "temperature": 1.0,
        "repetition_penalty": 1.1,
        "top_k": 20,
        "top_p": 0.95,
        "logprobs": 5,
    },
}
REPLAYS, ROUNDS = 20, 15


def make_logits(shape: str, rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    if shape == "flat":
        return torch.randn(rows, vocabulary, device=device) * 3.0
    ranks = torch.arange(1, vocabulary + 1, device=device).float().log()
    noise = torch.randn(rows, vocabulary, device=device) * 0.3
    order = torch.stack([torch.randperm(vocabulary, device=device) for _ in range(rows)])
    return (noise - 1.4 * ranks).gather(1, order)


def measure(kinds: list[dict[str, object]], logits: torch.Tensor, device: torch.device) -> float:
    """Microseconds of one draw for `logits` [rows, vocabulary]; rows take the kinds in turn."""
    rows, vocabulary = logits.shape
    sampler = DeviceSampler(vocabulary, rows, rows, device)
    requests = [
        Request(
            slot,
            torch.randint(vocabulary, (500,)).tolist(),
            SamplingParams(**kinds[slot % len(kinds)]),  # type: ignore[arg-type]
            frozenset({0}),
            slot=slot,
            seed=slot,
        )
        for slot in range(rows)
    ]
    sampler.enter(requests)
    needs = sampler.needs(range(rows))
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    lengths = torch.full((rows,), 505, dtype=torch.int32, device=device)
    turn = torch.zeros(1, dtype=torch.int32, device=device)

    def draw() -> None:
        sampler.draw(logits, slots, lengths, turn, needs)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        draw()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, sizes = torch.device("cuda"), [int(size) for size in options.rows.split(",")]
    torch.manual_seed(1)
    lines = []
    print(f"{torch.cuda.get_device_name()}, vocabulary {options.vocabulary}; us a draw")
    print(f"{'':44}" + "".join(f"{size:>9}" for size in sizes) + "  rows")
    floors = [size * options.vocabulary * 4 / 4.3e6 for size in sizes]
    print(f"{'one reading of the logits':44}" + "".join(f"{floor:9.1f}" for floor in floors))
    for shape in ("peaked", "flat"):
        rows = {size: make_logits(shape, size, options.vocabulary, device) for size in sizes}
        for name, kinds in [
            *((name, [kind]) for name, kind in KINDS.items()),
            ("all of these in turn", [*KINDS.values()]),
        ]:
            times = [measure(kinds, rows[size], device) for size in sizes]
            print(f"{shape + ': ' + name:44}" + "".join(f"{time:9.1f}" for time in times), flush=True)
            lines += [
                {"shape": shape, "kind": name, "rows": size, "vocabulary": options.vocabulary, "us": round(time, 2)}
                for size, time in zip(sizes, times, strict=True)
            ]
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()

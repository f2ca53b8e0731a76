"""Milliseconds the sampler takes for one step of a batch, by settings: wall clock, and CPU time of the process.

    OMP_NUM_THREADS=1 python -m bench.sampler --rows 16 --vocab 49152 --steps 100

The logits are normal with a few peaks, as a language model's are; `flat` has none, the worst case for top_p.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from engine_core.plan import ScheduledRow
from engine_core.request import Request
from engine_core.sampler import Sampler
from ipc.sampling import SamplingParams

CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, repetition 1.1": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "temperature 1": SamplingParams(),
    "top_k 50": SamplingParams(top_k=50),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "T 0.7, top_k 40, top_p 0.9": SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    "the same and penalties": SamplingParams(
        temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "temperature 1, logprobs 5": SamplingParams(logprobs=5),
    "flat, top_p 0.95": SamplingParams(temperature=100.0, top_p=0.95),
}


def measure(sampling: SamplingParams, rows: int, vocab: int, steps: int) -> tuple[list[float], list[float]]:
    """Wall and CPU milliseconds of each step. Every request has a prompt of 500 tokens and commits what it gets."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 2.0
    logits.scatter_add_(1, torch.randint(vocab, (rows, 20), generator=generator), torch.full((rows, 20), 14.0))
    sampler = Sampler(vocab, rows, torch.device("cpu"))
    requests = [Request(i, [(i + j * 7) % vocab for j in range(500)], sampling, slot=i, seed=i) for i in range(rows)]
    wall, cpu = [], []
    for _ in range(steps):
        scheduled = [ScheduledRow(request, request.num_tokens - 1, 1, True) for request in requests]
        begin, begin_cpu = time.perf_counter(), time.process_time()
        step = sampler.sample(logits, scheduled)
        wall.append((time.perf_counter() - begin) * 1e3)
        cpu.append((time.process_time() - begin_cpu) * 1e3)
        for request, token in zip(requests, step.token_ids, strict=True):
            request.output_ids.append(token)
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    print(f"{arguments.rows} rows x {arguments.vocab} tokens, {arguments.steps} steps")
    print(f"{'settings':30} {'wall median':>12} {'wall min':>10} {'CPU median':>11} {'CPU min':>9}")
    for name, sampling in CASES.items():
        wall, cpu = measure(sampling, arguments.rows, arguments.vocab, arguments.steps)
        medians = statistics.median(wall), statistics.median(cpu)
        print(f"{name:30} {medians[0]:12.3f} {min(wall):10.3f} {medians[1]:11.3f} {min(cpu):9.3f}")


if __name__ == "__main__":
    main()

"""Gapless, transformers and llama.cpp on one GGUF file, the same CPU threads and the same prompts, taking turns.

    pip install accelerate                                        # transformers needs it to read GGUF files
    pip install --no-binary llama-cpp-python llama-cpp-python     # builds llama.cpp for this machine
    python -m bench.cpu_peers MODEL.gguf [--threads 2] [--rounds 5] [--peers gapless,transformers,llama.cpp]

Each engine loads once, in its own process, and sleeps while another is measured. A round measures every engine at
every number of sequences; the order turns from round to round. A figure is generated tokens over the time of the whole
answer (prompt included), greedy, with a fixed number of tokens. Prints medians with their spread, ratios to Gapless of
the same round, and appends all values to bench/results/cpu_peers.jsonl. An engine that is not installed is left out.

How it is run: transformers `generate` in float32 on a batch; llama.cpp by its low-level batch interface, one sequence
id per prompt, with its default f16 KV; Gapless by `engine_core.LLM` with its defaults, prefix caching off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]
RESULTS = Path(__file__).parent / "results" / "cpu_peers.jsonl"


def gapless(model: str, threads: int, most: int) -> Generate:
    from engine_core import LLM, SamplingParams

    llm = LLM(model, progress=False, threads=threads, enable_prefix_caching=False, kv_tokens=most)

    def generate(prompts: Prompts, new_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        assert all(len(output.token_ids) == new_tokens for output in outputs)

    return generate


def transformers(model: str, threads: int, most: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    folder, name = os.path.split(model)
    network = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)

    def generate(prompts: Prompts, new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        out = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + new_tokens

    return generate


def llama_cpp(model: str, threads: int, most: int) -> Generate:
    import llama_cpp as llama
    import numpy as np

    llama.llama_log_set(SILENT := llama.llama_log_callback(lambda *_: None), None)
    llama.llama_backend_init()
    network = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = most, 2048, 512, 16
    settings.n_threads = settings.n_threads_batch = threads
    context = llama.llama_init_from_model(network, settings)
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(network))
    batch = llama.llama_batch_init(2048, 0, 1)

    def decode(tokens: list[tuple[int, int, int]], wanted: set[int]) -> list[int]:
        """One call for (token, position, sequence) triples; the best next token at each index in `wanted`."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, i in wanted
        assert llama.llama_decode(context, batch) == 0
        rows = (llama.llama_get_logits_ith(context, i) for i in sorted(wanted))
        return [int(np.ctypeslib.as_array(row, (vocab_size,)).argmax()) for row in rows]

    def generate(prompts: Prompts, new_tokens: int) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        flat = [(token, p, s) for s, prompt in enumerate(prompts) for p, token in enumerate(prompt)]
        size = len(prompts[0])
        latest = decode(flat, {(s + 1) * size - 1 for s in range(len(prompts))})
        for step in range(new_tokens - 1):
            latest = decode([(t, size + step, s) for s, t in enumerate(latest)], set(range(len(prompts))))

    generate.keep = SILENT  # type: ignore[attr-defined]
    return generate


PEERS: dict[str, Callable[[str, int, int], Generate]] = {
    "gapless": gapless,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
}


def work(peer: str, options: argparse.Namespace) -> None:
    """The process of one engine: load, then answer `{"prompts": ..., "tokens": ...}` lines with seconds."""
    start = time.perf_counter()
    most = max(options.sequences) * (options.prompt + options.tokens + 16)
    generate = PEERS[peer](options.model, options.threads, most)
    print(json.dumps({"load": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        start = time.perf_counter()
        generate(task["prompts"], task["tokens"])
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


class Worker:
    """The parent's end of an engine's process."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        start = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.cpu_peers", *sys.argv[1:], "--worker", peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.load_seconds = self._answer("load")
        self.start_seconds = time.perf_counter() - start

    def run(self, prompts: Prompts, tokens: int) -> float:
        """Tokens per second."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return len(prompts) * tokens / self._answer("seconds")

    def _answer(self, name: str) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate()
            raise RuntimeError(errors.strip().splitlines()[-1] if errors else "it ended without a word")
        return float(json.loads(line)[name])


def measure(workers: list[Worker], options: argparse.Namespace) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    generator = random.Random(options.seed)

    def prompts(count: int) -> Prompts:
        return [[generator.randrange(1000, 40_000) for _ in range(options.prompt)] for _ in range(count)]

    for worker in workers:
        worker.run(prompts(1), 4)
    for turn in range(options.rounds):
        for count in options.sequences:
            task = prompts(count)
            for worker in workers[turn % len(workers) :] + workers[: turn % len(workers)]:
                speed = worker.run(task, options.tokens)
                records.append({"round": turn, "sequences": count, "peer": worker.peer, "tokens_per_s": speed})
    return records


def report(workers: list[Worker], records: list[dict[str, Any]], options: argparse.Namespace) -> None:
    speeds = {(r["peer"], r["sequences"], r["round"]): r["tokens_per_s"] for r in records}
    print(f"{'':14}{'sequences':>10}{'tokens/s':>10}{'lowest':>9}{'highest':>9}{'gapless is':>13}")
    for worker in workers:
        for count in options.sequences:
            values = [speeds[worker.peer, count, turn] for turn in range(options.rounds)]
            line = f"{worker.peer:14}{count:10}{statistics.median(values):10.1f}{min(values):9.1f}{max(values):9.1f}"
            if worker.peer != "gapless" and ("gapless", count, 0) in speeds:
                turns = range(options.rounds)
                ratio = statistics.median(speeds["gapless", count, t] / speeds[worker.peer, count, t] for t in turns)
                line += f"{ratio:11.2f} x"
            print(line)
    for worker in workers:
        print(f"{worker.peer:14} load {worker.load_seconds:.2f} s, from process start {worker.start_seconds:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--sequences", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16])
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", choices=list(PEERS))
    options = parser.parse_args()
    options.model = os.path.abspath(options.model)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.worker:
        work(options.worker, options)
        return
    workers: list[Worker] = []
    for peer in options.peers:
        try:
            workers.append(Worker(peer))
        except RuntimeError as error:
            print(f"{peer} is left out: {error}")
    records = measure(workers, options)
    report(workers, records, options)
    loads = [{"peer": w.peer, "load_s": w.load_seconds, "start_s": w.start_seconds} for w in workers]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        for record in [*loads, *records]:
            file.write(json.dumps({"time": int(time.time()), "threads": options.threads, **record}) + "\n")


if __name__ == "__main__":
    main()

"""The engine alone, with no server: decode steps, prefill, a workload, the first token.

    gapless bench offline [MODEL] [--device cuda] [--dummy] [--quick] [--out results.jsonl]
    python -m engine_core.measure PATH ...     the same for a file or folder

Definitions, the same as for the peers: a decode step is (time of 257 outputs - time of 1 output) / 256 for
prompts of 128 tokens, median of 3; prefill is the time of a prompt with one output, median of 5; the workload is 256
prompts of 100-1024 random tokens with 100-1024 outputs each at T = 0.6. The idle share is 1 - (GPU time / wall) of
steady decode, from the profiler's timestamps in runs of its own: the profiler delays the host, now and then by more
than a short step takes, so of five runs that with the shortest steps counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from engine_core.build import build_engine
from engine_core.engine import Engine
from ipc.codec import pack_ids
from ipc.config import EngineConfig
from ipc.messages import Generate
from ipc.sampling import SamplingParams

SIZES = (1, 4, 16, 64, 256)


LENGTHS = (512, 8192)


def config(path: str, device: str, dummy: bool) -> EngineConfig:
    """The engine as it is measured. `dummy`: random weights, which need no file of weights."""
    import torch

    cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    kv_tokens = 40_000 if cpu else 600_000
    return EngineConfig(
        model=path,
        device=device,  # type: ignore[arg-type]
        load_format="dummy" if dummy else "auto",
        max_model_len=16384 if dummy else None,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        kv_tokens=kv_tokens if dummy or cpu else None,
    )


class Driver:
    """Gives requests to an engine and steps it until all are done."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Round numbers below the published vocabularies: those that the peers' random prompts were drawn from. What
        # random numbers are drawn decides the lengths that follow, so only these make it the same workload.
        vocabulary = engine.facts.vocab_size
        self._vocabulary = next((size for size in (150_000, 49_000) if size <= vocabulary), vocabulary)
        self._next = 0

    def prompt(self, length: int) -> list[int]:
        return [random.randint(10, self._vocabulary - 10) for _ in range(length)]

    def close(self) -> None:
        """Give the device's memory back."""
        import torch

        del self.engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(self, prompts: Sequence[list[int]], outputs: Sequence[int], temperature: float = 0.0) -> float:
        """Seconds until all are done."""
        start = time.perf_counter()
        for prompt, count in zip(prompts, outputs, strict=True):
            self._next += 1
            sampling = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count)
            self.engine.add(
                Generate(request_id=self._next, frontend=0, prompt_ids=pack_ids(prompt), sampling=sampling, arrival=0)
            )
        while self.engine.has_work:
            output = self.engine.step()
            for ended in output.finished:
                if ended.error is not None:
                    raise RuntimeError(ended.error.message)
        return time.perf_counter() - start


def decode_step(driver: Driver, size: int) -> float:
    """Milliseconds per step at `size` sequences."""
    prompts = [driver.prompt(128) for _ in range(size)]
    driver.run(prompts, [257] * size)
    times = []
    for _ in range(3):
        prompts = [driver.prompt(128) for _ in range(size)]
        one = driver.run(prompts, [1] * size)
        times.append((driver.run(prompts, [257] * size) - one) / 256)
    return 1e3 * statistics.median(times)


def prefill(driver: Driver, length: int) -> float:
    """Milliseconds."""
    driver.run([driver.prompt(length)], [1])
    return 1e3 * statistics.median(driver.run([driver.prompt(length)], [1]) for _ in range(5))


def workload(driver: Driver) -> float:
    """Output tokens per second; the second of two runs."""
    for _ in range(2):
        random.seed(0)  # 147,037 and 148,318 tokens for a vocabulary of 150,000
        prompts = [driver.prompt(random.randint(100, 1024)) for _ in range(256)]
        outputs = [random.randint(100, 1024) for _ in range(256)]
        seconds = driver.run(prompts, outputs, temperature=0.6)
    return sum(outputs) / seconds


def idle_share(driver: Driver, size: int) -> tuple[float, float]:
    """Microseconds a step, and 1 - GPU time / wall, over steady decode steps, from the profiler's timestamps of every
    kernel and copy."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    prompts = [driver.prompt(128) for _ in range(size)]
    driver.run(prompts, [80] * size)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        driver.run(prompts, [80] * size)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if str(event.device_type) == "DeviceType.CUDA"
    )
    starts = [index for index, span in enumerate(spans) if "_begin" in span[2]]
    steady = spans[starts[15] : starts[-10]]
    busy, end = 0.0, steady[0][0]
    for first, last, _ in steady:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    wall = end - steady[0][0]
    return float(wall / (len(starts) - 25)), float(1 - busy / wall)


def first_token(path: str, device: str, dummy: bool, kernels: str | None = None) -> float:
    """Seconds from the start of a new process to its first token. `kernels`: a folder in place of Triton's cache."""
    command = [sys.executable, "-m", "engine_core.measure", path, "--device", device, "--first-token"]
    environment = os.environ | ({"TRITON_CACHE_DIR": kernels} if kernels else {})
    start = time.perf_counter()
    subprocess.run([*command, *(["--dummy"] if dummy else [])], check=True, env=environment)
    return time.perf_counter() - start


def card() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def parser() -> argparse.ArgumentParser:
    """The options, without the model."""
    found = argparse.ArgumentParser(add_help=False)
    found.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    found.add_argument("--out", type=Path, help="append JSON lines to this file")
    found.add_argument("--quick", action="store_true", help="one and four sequences and a short prompt only")
    found.add_argument("--commit", default="", help="what to write as the commit measured")
    return found


def measure(name: str, path: str, given: argparse.Namespace, dummy: bool) -> None:
    """Print a JSON line per measurement of the model at `path`, called `name` there."""
    random.seed(0)
    lines: list[dict[str, Any]] = []

    def emit(what: str, value: float, unit: str, **at: int) -> None:
        line = {"model": name, "what": what, **at, "value": round(value, 4), "unit": unit}
        lines.append({**line, "date": date.today().isoformat(), "card": card(), "commit": given.commit})
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    driver = Driver(build_engine(config(path, given.device, dummy)))
    facts = driver.engine.facts
    for phase, seconds in facts.seconds.items():
        emit(f"start: {phase}", seconds, "s")
    sizes, lengths = ((1, 4), (64,)) if given.quick else (SIZES, LENGTHS)
    for size in sizes:
        emit("decode step", decode_step(driver, size), "ms", bs=size)
    for length in lengths:
        if length < facts.max_model_len:
            emit("prefill", prefill(driver, length), "ms", n=length)
    if not given.quick:
        emit("workload of 256", workload(driver), "tokens/s")
    if facts.device.startswith("cuda"):
        for size in sizes:
            if size != 4:
                _, share = min(idle_share(driver, size) for _ in range(5))
                emit("GPU idle share", share, "", bs=size)
    driver.close()
    emit("start to first token", first_token(path, given.device, dummy), "s")
    if facts.device.startswith("cuda"):
        with tempfile.TemporaryDirectory() as empty:
            emit("start to first token, no kernel compiled", first_token(path, given.device, dummy, empty), "s")
    if given.out:
        with given.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def main() -> None:
    arguments = argparse.ArgumentParser(
        prog="gapless bench offline",
        parents=[parser()],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("model", help="a .gguf file or a folder with config.json")
    arguments.add_argument("--dummy", action="store_true", help="random weights of the model's shape")
    arguments.add_argument("--first-token", action="store_true", help="only load and make one token")
    given = arguments.parse_args()
    if given.first_token:
        driver = Driver(build_engine(config(given.model, given.device, given.dummy)))
        driver.run([driver.prompt(64)], [1])
        return
    measure(Path(given.model).name, given.model, given, given.dummy)


if __name__ == "__main__":
    main()

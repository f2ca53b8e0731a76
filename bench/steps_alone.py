"""The engine alone in a process of its own, with the server's settings, and the times of its decode steps as its
flight recorder tells them.

    python -m bench.steps_alone FOLDER [--device cuda] [--sizes 64,256] [--tokens 1000] [--rounds 3]

FOLDER holds a config.json; weights are random. `measure_alone` is the same for a program.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.recorded import ENGINE, Steps, in_common, read_records, rings, steady_steps
from ipc.config import EngineConfig
from ipc.processes import child_environment
from ipc.recorder.ring import RingRecorder
from ipc.recorder.store import SHARED_MEMORY

RECORDS = 1 << 18
LIMIT_S = 110.0


def measure_alone(
    config: EngineConfig, sizes: Sequence[int], prompt_tokens: int, tokens: int, rounds: int
) -> dict[int, list[Steps]]:
    """Steady steps by the number of sequences, a list of rounds each. Raises RuntimeError if the process fails."""
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None  # a ring on a disk stops its writer now and then
    with tempfile.TemporaryDirectory(dir=base) as folder:
        settings = Path(folder) / "engine.json"
        settings.write_bytes(msgspec.json.encode(config))
        command = [sys.executable, "-m", "bench.steps_alone", str(settings), "--child"]
        command += ["--sizes", ",".join(map(str, sizes)), "--prompt-tokens", str(prompt_tokens)]
        command += ["--tokens", str(tokens), "--rounds", str(rounds)]
        root = str(Path(__file__).parents[1])
        done = subprocess.run(
            command, cwd=root, env=child_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the engine alone ended with status {done.returncode}: {done.stderr[-3000:]}")
        begins = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        records = read_records(rings(Path(folder))[ENGINE])
    found: dict[int, list[Steps]] = {size: [] for size in sizes}
    for size, begin, end in begins:
        found[size].append(steady_steps(records[records["begin"] <= end], size, begin))
    return found


def child(given: argparse.Namespace) -> None:
    """Prints [size, begin, end] of each round but the first of a size, which may capture graphs; CLOCK_MONOTONIC ns."""
    from engine_core.build import build_engine
    from engine_core.measure import Driver

    settings = Path(given.model)
    config = msgspec.json.decode(settings.read_bytes(), type=EngineConfig)
    driver = Driver(build_engine(config, recorder=RingRecorder(settings.parent, ENGINE, RECORDS)))
    random.seed(time.time_ns())
    for size in given.sizes:
        for turn in range(given.rounds + 1):
            prompts = [driver.prompt(given.prompt_tokens) for _ in range(size)]
            begin = time.monotonic_ns()
            driver.run(prompts, [given.tokens] * size)
            if turn:
                print(json.dumps([size, begin, time.monotonic_ns()]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--sizes", default=(64, 256), type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given)
        return
    config = EngineConfig(model=given.model, device=given.device, load_format="dummy")
    for size, many in measure_alone(config, given.sizes, given.prompt_tokens, given.tokens, given.rounds).items():
        common = in_common(many)
        for steps in (steps.with_kv(*common) for steps in many):
            print(f"{size} sequences: {steps.p50_ms:.4f} ms in the median of {len(steps)} steps, idle {steps.idle:.2%}")


if __name__ == "__main__":
    main()

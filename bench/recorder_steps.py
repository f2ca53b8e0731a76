"""What the flight recorder costs a whole engine: decode steps of a model with it and without, in turns.

    python -m bench.recorder_steps MODEL [--device cuda] [--sizes 1,64,256] [--rounds 9]

MODEL is a shape of `bench.shapes`, with random weights, or a .gguf file or folder. The part of the loop around a step
that drains and publishes is that of `bench.recorder`, as in `engine_core.loop`. Per size: the medians, and the
difference between the two of each round, its median and its quartiles.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.recorder import Loop
from bench.shapes import SHAPES, write_config
from engine_core.build import build_engine
from engine_core.engine import Engine
from ipc.codec import pack_ids
from ipc.config import EngineConfig
from ipc.messages import Generate
from ipc.recorder.ring import Recorder, RingRecorder
from ipc.sampling import SamplingParams

PROMPT, OUTPUTS, STEADY = 64, 200, 150


def step_us(engine: Engine, size: int, first_id: int, rng: random.Random) -> float:
    """Microseconds a step of `size` sequences, over the last steps of their answers."""
    loop, vocabulary = Loop(engine), engine.facts.vocab_size
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUTS)
    for index in range(size):
        ids = pack_ids([rng.randrange(10, vocabulary - 10) for _ in range(PROMPT)])
        engine.add(Generate(request_id=first_id + index, frontend=0, prompt_ids=ids, sampling=sampling, arrival=0))
    ends = []
    while engine.has_work:
        loop.step()
        loop.read()
        ends.append(time.perf_counter_ns())
    steady = ends[-STEADY - 2 : -2]
    return (steady[-1] - steady[0]) / (len(steady) - 1) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--sizes", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        dummy = given.model in SHAPES
        path = str(write_config(given.model, Path(folder))) if dummy else given.model
        sizes = [int(size) for size in given.sizes.split(",")]
        config = EngineConfig(
            model=path,
            device=given.device,
            load_format="dummy" if dummy else "auto",
            max_num_seqs=max(sizes),
            kv_tokens=max(sizes) * (PROMPT + OUTPUTS + 16),
            max_model_len=PROMPT + OUTPUTS,
            enable_prefix_caching=False,
        )
        engines = {
            "without": build_engine(config, recorder=Recorder()),
            "with": build_engine(config, recorder=RingRecorder(Path(folder), "bench")),
        }
        rng, next_id = random.Random(1), 1
        for size in sizes:
            times: dict[str, list[float]] = {name: [] for name in engines}
            for index in range(-1, given.rounds):
                for name in engines if index % 2 else reversed(engines):
                    us = step_us(engines[name], size, next_id, rng)
                    next_id += size
                    if index >= 0:
                        times[name].append(us)
            without, recorded = (statistics.median(times[name]) for name in ("without", "with"))
            shares = [b / a - 1 for a, b in zip(times["without"], times["with"], strict=True)]
            low, middle, high = statistics.quantiles(shares, n=4)
            print(
                f"{size:>4} sequences: {without:.1f} us a step without, {recorded:.1f} with: {middle:+.2%} "
                f"({low:+.2%} to {high:+.2%})",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What a hop between processes costs: latency there and back, and messages per second one way.

    python -m bench.hops [--seconds 2]

An echo process and this one talk through `ipc.channel`, as the server's processes do. Rows: a `StepOutput` of 1 and of
256 requests, a `Generate` with an 8,000-token prompt. "async" is the frontend's side: `ipc.aio` on uvloop.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from ipc.aio import AsyncReceiver
from ipc.channel import Receiver, Sender, flush
from ipc.codec import encode, pack_ids, pack_request_ids
from ipc.messages import Generate, Message, Shutdown, StepOutput
from ipc.sampling import SamplingParams

BenchMessage = StepOutput | Generate | Shutdown
BURST = 2000
ROOT = Path(__file__).parents[1]


def messages() -> dict[str, Message]:
    def step(rows: int) -> StepOutput:
        return StepOutput(step=1, request_ids=pack_request_ids(range(rows)), token_ids=pack_ids(range(rows)))

    prompt = Generate(request_id=1, frontend=0, prompt_ids=pack_ids(range(8000)), sampling=SamplingParams(), arrival=1)
    return {"step of 1": step(1), "step of 256": step(256), "prompt of 8000": prompt}


def echo(inbox_address: str, outbox_address: str) -> None:
    """The other process: sends back what it gets."""
    with Receiver[Any](inbox_address, BenchMessage) as inbox, Sender(outbox_address) as outbox:
        while True:
            for message in inbox.drain():
                outbox.send(message)
                if isinstance(message, Shutdown):
                    flush()
                    return
            inbox.wait()


def round_trips(inbox: Receiver[Any], outbox: Sender, message: Message, seconds: float) -> list[float]:
    """Microseconds each, one message under way at a time."""
    times, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        outbox.send(message)
        while not inbox.drain():
            inbox.wait()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def throughput(inbox: Receiver[Any], outbox: Sender, message: Message, seconds: float) -> float:
    """Messages per second through the echo process and back, in bursts."""
    total, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(BURST):
            outbox.send(message)
        received = 0
        while received < BURST:
            inbox.wait()
            received += len(inbox.drain())
        total += BURST
    return total / (time.perf_counter() - begin)


async def async_throughput(inbox: Receiver[Any], outbox: Sender, message: Message, seconds: float) -> float:
    receiver = AsyncReceiver(inbox)
    total, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(BURST):
            outbox.send(message)
        received = 0
        while received < BURST:
            received += len(await receiver.receive())
        total += BURST
    return total / (time.perf_counter() - begin)


@contextmanager
def echo_process() -> Iterator[tuple[Receiver[Any], Sender]]:
    with tempfile.TemporaryDirectory(prefix="gb-", dir="/tmp") as folder:
        here, there = f"ipc://{folder}/here", f"ipc://{folder}/there"
        with Receiver[Any](here, BenchMessage) as inbox, Sender(there) as outbox:
            with subprocess.Popen([sys.executable, "-m", "bench.hops", "--echo", there, here], cwd=ROOT) as process:
                yield inbox, outbox
                outbox.send(Shutdown())
            assert process.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
    parser.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        echo(*options.echo)
        return
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'message':<16}{'bytes':>8}{'p50 us':>9}{'p99 us':>9}{'msg/s':>10}{'async msg/s':>13}")
    with echo_process() as (inbox, outbox):
        for name, message in messages().items():
            round_trips(inbox, outbox, message, 0.2)
            times = round_trips(inbox, outbox, message, options.seconds)
            rate = throughput(inbox, outbox, message, options.seconds)
            async_rate = uvloop.run(async_throughput(inbox, outbox, message, options.seconds))
            p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
            print(f"{name:<16}{len(encode(message)):>8}{p50:>9.0f}{p99:>9.0f}{rate:>10.0f}{async_rate:>13.0f}")


if __name__ == "__main__":
    main()

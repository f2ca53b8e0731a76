"""How long one large request holds up the others.

    python -m bench.long_bodies [--rounds 5] [--only 'nested tools']

The server's own processes with the fake engine of `bench.streaming`. While one large body is worked on, `/health` and a
short prompt are asked every few milliseconds, each over a connection of its own. Columns are the longest wait of each
while the large request was unanswered: median of the rounds, and the worst one. "alone" is a round with no large body.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from bench.streaming import INTERVAL_ENV, specs
from frontend.cli.models import resolve_model
from frontend.topology import LaunchConfig, Server
from ipc.config import ServerOptions

ALONE_S = 1.0
PAUSE_S = 0.003
SETTLE_S = 0.5
MESSAGE = {"role": "user", "content": "hi"}


class Body(NamedTuple):
    path: str
    make: Callable[[], object]


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIMITED = {"max_tokens": 1}
BODIES = {
    "600,000 characters": Body(TEXT, lambda: {"prompt": "hello world " * 50_000, **LIMITED}),
    "2 million ids": Body(TEXT, lambda: {"prompt": [504] * 2_000_000, **LIMITED}),
    "10,000 messages": Body(CHAT, lambda: {"messages": [MESSAGE] * 10_000, **LIMITED}),
    "300,000 messages": Body(CHAT, lambda: {"messages": [MESSAGE] * 300_000, **LIMITED}),
    "300,000 nested tools": Body(
        CHAT, lambda: {"messages": [MESSAGE], "tools": [{"a": {"b": [1, {"c": None}]}}] * 300_000, **LIMITED}
    ),
    "a text of 30 MB": Body(TEXT, lambda: {"prompt": "hello world " * 2_500_000, **LIMITED}),
}


class Probe(threading.Thread):
    """Asks one short thing again and again and keeps the longest wait, in seconds."""

    def __init__(self, port: int, method: str, path: str, body: bytes | None = None) -> None:
        super().__init__()
        self.longest, self.over = 0.0, threading.Event()
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._request = (method, path, body)

    def run(self) -> None:
        method, path, body = self._request
        while not self.over.is_set():
            began = time.perf_counter()
            self._connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
            self.longest = max(self.longest, time.perf_counter() - began)
            time.sleep(PAUSE_S)
        self._connection.close()


def measure(port: int, path: str, body: bytes | None) -> tuple[float, float, float, int]:
    """Longest wait of /health and of a short prompt, seconds until the large answer, and its status."""
    short = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    probes = [Probe(port, "GET", "/health"), Probe(port, "POST", TEXT, short)]
    for probe in probes:
        probe.start()
    began, status = time.perf_counter(), 200
    if body is None:
        time.sleep(ALONE_S)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        status = answer.status
        connection.close()
    seconds = time.perf_counter() - began
    for probe in probes:
        probe.over.set()
    for probe in probes:
        probe.join()
    return probes[0].longest, probes[1].longest, seconds, status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="bodies whose name holds this")
    given = parser.parse_args()
    os.environ[INTERVAL_ENV] = "1"
    options = ServerOptions(port=0, frontend_procs=1, tokenizer_procs=1, detokenizer_procs=1)
    launch = LaunchConfig(model=str(resolve_model("smollm2").path), server=options)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; milliseconds, the median of rounds (worst)")
    print(f"{'':>24}{'/health':>16}{'short prompt':>16}{'its answer':>16}  status")
    with Server(launch, build_specs=lambda run_dir: specs(launch, run_dir)) as server:
        port = int(server.url.rsplit(":", 1)[1])
        for name, (path, make) in {"alone": Body("", lambda: None), **BODIES}.items():
            if given.only in name:
                body = None if name == "alone" else json.dumps(make()).encode()
                rounds = []
                for _ in range(given.rounds):
                    rounds.append(measure(port, path, body))
                    time.sleep(SETTLE_S)
                columns = list(zip(*rounds, strict=True))
                cells = (f"{1e3 * median(column):.0f} ({1e3 * max(column):.0f})" for column in columns[:3])
                print(f"{name:>24}" + "".join(f"{cell:>16}" for cell in cells) + f"  {columns[3][-1]}", flush=True)


if __name__ == "__main__":
    main()

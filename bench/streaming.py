"""Tokens per second from a step's message to the client's socket, and what each stage costs per token.

    python -m bench.streaming [--streams 256] [--tokens 400] [--interval-ms 1] [--chat] [--frontends 1]

The server's own processes with a fake engine in the place of the real one: every interval it emits one token for each
stream, in one message, whether the others follow or not. The client only counts. Columns are CPU time of each process
per token; "events" is server-sent events per token, below 1 where several tokens of a stream had queued up and were
joined. With a longer interval (--interval-ms 20) the streams keep up, and the columns are the cost without joining.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from frontend.cli.models import resolve_model
from frontend.topology import LaunchConfig, Server, process_specs
from ipc.actor import shutdown_on_sigterm
from ipc.channel import Broadcast, Receiver, connect
from ipc.codec import pack_ids, pack_request_ids
from ipc.config import EngineProcessConfig, ServerOptions
from ipc.messages import Abort, EngineMessage, EngineStats, Finished, Generate, Opened, Shutdown, StepOutput
from ipc.processes import ProcessSpec
from ipc.run_dir import RunDirectory
from ipc.runtime import Child, child_main

INTERVAL_ENV = "_GAPLESS_BENCH_INTERVAL_MS"
HEARTBEAT_S = 0.2
# Ids of ordinary English words in SmolLM2's vocabulary.
TOKENS = (504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 378, 314, 253, 1194, 282, 335)


class FakeEngine:
    """Emits one token per request and step. The requests start together, once `streams` of them are there."""

    def __init__(self) -> None:
        self.live: dict[int, Generate] = {}
        self._made: dict[int, int] = {}
        self._step = 0

    def take(self, message: EngineMessage) -> bool:
        """False: Shutdown."""
        match message:
            case Generate():
                self.live[message.request_id] = message
                self._made[message.request_id] = 0
            case Abort():
                for request_id in message.request_ids:
                    self.live.pop(request_id, None)
                    self._made.pop(request_id, None)
        return not isinstance(message, Shutdown)

    def step(self) -> StepOutput:
        self._step += 1
        ids = list(self._made)
        opened = [_opened(self.live[i]) for i in ids if self._made[i] == 0]
        for request_id in ids:
            self._made[request_id] += 1
        ended = [i for i in ids if self._made[i] >= (self.live[i].sampling.max_tokens or 1)]
        output = StepOutput(
            step=self._step,
            request_ids=pack_request_ids(ids),
            token_ids=pack_ids(TOKENS[(self._step + row) % len(TOKENS)] for row in range(len(ids))),
            opened=opened,
            finished=[Finished(i, self.live[i].frontend, "length", 8, self._made[i]) for i in ended],
        )
        for request_id in ended:
            del self.live[request_id], self._made[request_id]
        return output

    def stats(self) -> EngineStats:
        return EngineStats(
            step=self._step, running=len(self.live), waiting=0, kv_blocks_total=1, kv_blocks_free=1,
            kv_blocks_cached=0, prompt_tokens=0, output_tokens=0, prefix_queries=0, prefix_hits=0, preemptions=0,
            aborts=0, step_seconds=0.0,
        )  # fmt: skip


def _opened(request: Generate) -> Opened:
    return Opened(request.request_id, request.frontend, 8, 0, 0, request.text)


def engine_process(config: EngineProcessConfig, child: Child) -> None:
    interval = float(os.environ[INTERVAL_ENV]) / 1000
    detokenizers = Broadcast(connect(config.endpoints, "detokenizers").values())
    frontends = Broadcast(connect(config.endpoints, "frontends").values())
    engine, running, next_beat = FakeEngine(), True, 0.0
    with Receiver[EngineMessage](config.endpoints.engine, EngineMessage) as inbox, shutdown_on_sigterm(inbox):
        child.ready({"max_model_len": 8192, "vocab_size": 49152})
        due = time.monotonic()
        while running:
            for message in inbox.drain():
                running &= engine.take(message)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + HEARTBEAT_S
                frontends.send(engine.stats())
            if not engine.live:
                inbox.wait(HEARTBEAT_S)
                due = time.monotonic()
            elif now >= due:
                detokenizers.send(engine.step())
                due = max(due + interval, now - 10 * interval)
            else:
                time.sleep(due - now)


def specs(launch: LaunchConfig, run_dir: RunDirectory) -> list[ProcessSpec]:
    return [
        dataclasses.replace(spec, module="bench.streaming") if spec.name == "engine_core" else spec
        for spec in process_specs(launch, run_dir)
    ]


class Client:
    """All streams in one thread, raw sockets: reads and counts, so that it is not what is measured."""

    def __init__(self, url: str, path: str, body: bytes) -> None:
        self._address = (url.split("//")[1].split(":")[0], int(url.rsplit(":", 1)[1]))
        self._request = (
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        )
        self.events = self.reads = 0
        self.first = self.last = 0.0
        self.failed = 0

    def run(self, streams: int) -> None:
        selector = selectors.DefaultSelector()
        for _ in range(streams):
            sock = socket.create_connection(self._address)
            sock.sendall(self._request)
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, bytearray())
        left = streams
        while left:
            for key, _ in selector.select():
                sock: Any = key.fileobj
                data = sock.recv(1 << 16)
                self.reads += 1
                if count := data.count(b"data: "):
                    self.events += count
                    self.last = time.perf_counter()
                    self.first = self.first or self.last
                if data:
                    key.data[:] = (key.data + data)[-64:]
                else:
                    self.failed += b"[DONE]" not in key.data
                    selector.unregister(sock)
                    sock.close()
                    left -= 1


def cpu_seconds(pids: dict[str, int]) -> dict[str, float]:
    times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
    return {name: value.user + value.system for name, value in times.items()}


def measure(server: Server, path: str, body: bytes, streams: int, tokens: int) -> dict[str, float]:
    """One run: tokens per second, and microseconds of CPU per token by process."""
    client = Client(server.url, path, body)
    before, mine = cpu_seconds(server.pids), time.process_time()
    client.run(streams)
    mine = time.process_time() - mine
    after = cpu_seconds(server.pids)
    if client.failed:
        raise RuntimeError(f"{client.failed} streams did not end with [DONE]")
    total = streams * tokens
    spent = {name: 1e6 * (after[name] - before[name]) / total for name in before}
    return {
        "tokens/s": total / (client.last - client.first),
        "events": (client.events - 2 * streams) / total,
        "reads": client.reads / total,
        **{name: spent[name] for name in sorted(spent)},
        "client": 1e6 * mine / total,
    }


def show(rows: Sequence[dict[str, float]]) -> None:
    names = list(rows[0])
    print("  ".join(f"{name:>16}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]:>16.0f}" if name == "tokens/s" else f"{row[name]:>16.2f}" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--interval-ms", type=float, default=1.0, help="between two tokens of a stream")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--detokenizers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    given = parser.parse_args()
    os.environ[INTERVAL_ENV] = str(given.interval_ms)
    options = ServerOptions(
        port=0, frontend_procs=given.frontends, tokenizer_procs=1, detokenizer_procs=given.detokenizers
    )
    launch = LaunchConfig(model=str(resolve_model("smollm2").path), server=options)
    common = b'"max_tokens":%d,"ignore_eos":true,"stream":true}' % given.tokens
    path, body = "/v1/completions", b'{"prompt":"Once upon a time",' + common
    if given.chat:
        path, body = "/v1/chat/completions", b'{"messages":[{"role":"user","content":"Hi"}],' + common
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; {given.streams} streams, {path}")
    with Server(launch, build_specs=lambda run_dir: specs(launch, run_dir)) as server:
        measure(server, path, body, given.streams, given.tokens)
        show([measure(server, path, body, given.streams, given.tokens) for _ in range(given.rounds)])


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        child_main("engine_core", EngineProcessConfig, engine_process)
    main()

"""Many streams at once that read on whatever happens: raw sockets, in several processes.

    python -m bench.streams http://127.0.0.1:8000 --streams 64 --tokens 1000

Prompts are fresh random token ids, so that no stream finds another's prefix in the cache. Each stream has a connection
before any is asked, then all are asked at once. `Streams` is the same for a program.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOW, HIGH = 1000, 40_000  # ids of ordinary text in vocabularies of 49,152 and more
TAIL = 4096
_COMPLETION = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass
class Stream:
    """What one client saw. Times are seconds from the moment of asking."""

    first: float = 0.0
    last: float = 0.0
    silence: float = 0.0  # longest time between two events
    events: int = 0
    tokens: int = 0  # as the server's usage says
    done: bool = False  # ended with [DONE]


def request(prompt: Sequence[int], tokens: int, host: str) -> bytes:
    body = json.dumps(
        {
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_all(address: tuple[str, int], requests: Sequence[bytes]) -> list[Stream]:
    """Connect, say "ready", wait for a line on standard input, ask, say "begun" once all stream, read to the end."""
    sockets = [socket.create_connection(address) for _ in requests]
    print("ready", flush=True)
    sys.stdin.readline()
    selector, streams = selectors.DefaultSelector(), [Stream() for _ in requests]
    began = time.perf_counter()
    for sock, stream, data in zip(sockets, streams, requests, strict=True):
        sock.sendall(data)
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, (stream, bytearray()))
    open_, silent = len(streams), len(streams)
    while open_:
        for key, _ in selector.select():
            sock = key.fileobj  # type: ignore[assignment]
            stream, tail = key.data
            try:
                data = sock.recv(1 << 18)
            except ConnectionError:
                data = b""
            if not data:
                stream.done = b"[DONE]" in tail
                if usage := _COMPLETION.findall(bytes(tail)):
                    stream.tokens = int(usage[-1])
                selector.unregister(sock)
                sock.close()
                open_ -= 1
                silent -= stream.events == 0
            tail += data[-TAIL:]
            del tail[:-TAIL]
            if count := data.count(b"data: "):
                now = time.perf_counter() - began
                if not stream.events:
                    silent -= 1
                    stream.first = now
                else:
                    stream.silence = max(stream.silence, now - stream.last)
                stream.last = now
                stream.events += count
            if silent == 0:
                print("begun", flush=True)
                silent = -1
    return streams


class Streams:
    """`count` streams of `tokens` tokens each in `procs` child processes."""

    def __init__(self, url: str, count: int, tokens: int, prompt_tokens: int = 128, procs: int = 4) -> None:
        self._children = []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        procs = min(procs, count)
        try:
            for index in range(procs):
                share = len(range(index, count, procs))
                command = [sys.executable, "-m", "bench.streams", url, "--child", "--streams", str(share)]
                command += ["--tokens", str(tokens), "--prompt-tokens", str(prompt_tokens)]
                pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                self._children.append(subprocess.Popen(command, env=environment, text=True, **pipes))
            self._expect("ready")
        except BaseException:
            self.close()
            raise

    def ask(self) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()

    def wait_until_begun(self) -> None:
        """Every stream has had its first token."""
        self._expect("begun")

    def results(self) -> list[Stream]:
        """Once all have ended."""
        found = [Stream(**fields) for child in self._children for fields in json.loads(self._line(child))]
        self.close()
        return found

    def close(self) -> None:
        for child in self._children:
            child.kill()
            with child:  # waits, and closes its pipes
                pass
        self._children = []

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expect(self, word: str) -> None:
        for child in self._children:
            if (line := self._line(child).strip()) != word:
                raise RuntimeError(f"a client said {line!r} instead of {word!r}")

    def _line(self, child: subprocess.Popen[str]) -> str:
        assert child.stdout is not None
        return child.stdout.readline()


def incomplete(streams: Sequence[Stream], tokens: int) -> int:
    """How many did not end as they should."""
    return sum(not stream.done or stream.tokens != tokens for stream in streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--procs", type=int, default=4)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        host = given.url.split("//")[1].rstrip("/")
        name, _, port = host.partition(":")
        rng = random.SystemRandom()
        prompts = [[rng.randrange(LOW, HIGH) for _ in range(given.prompt_tokens)] for _ in range(given.streams)]
        streams = read_all((name, int(port or 80)), [request(prompt, given.tokens, host) for prompt in prompts])
        print(json.dumps([asdict(stream) for stream in streams]), flush=True)
        return
    with Streams(given.url, given.streams, given.tokens, given.prompt_tokens, given.procs) as clients:
        clients.ask()
        clients.wait_until_begun()
        streams = clients.results()
    seconds = max(stream.last for stream in streams)
    total = sum(stream.tokens for stream in streams)
    print(f"{total / seconds:,.0f} tokens/s, {incomplete(streams, given.tokens)} of {len(streams)} incomplete")
    print(f"longest silence {1e3 * max(stream.silence for stream in streams):.1f} ms")


if __name__ == "__main__":
    main()

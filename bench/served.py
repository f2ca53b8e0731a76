"""A server started as a user would, `gapless serve FOLDER`, from some other folder; and what it serves: a published
model's shape with a real tokenizer, for random weights."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil

from bench.recorded import ENGINE, codes, durations, read_records, rings
from bench.shapes import write_config
from ipc.config import EngineConfig
from ipc.recorder.events import PREPARE, WAIT
from ipc.recorder.store import LINK
from ipc.run_dir import PREFIX

ROOT = Path(__file__).parents[1]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
CONTEXT, LONG_CONTEXT = 8192, 1 << 18  # that of the engine; that of the tokenizer
START_S = 180.0
STOP_S = 20.0
SHORT_NS = 1_000_000
QUIET_WAITS = 3


def make_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer that is in a GGUF file as tokenizer.json and tokenizer_config.json: a few MB."""
    from tokenizer_proc.gguf_metadata import read_metadata
    from tokenizer_proc.gguf_tokenizer import build_tokenizer, special_tokens

    metadata = read_metadata(gguf)
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"), pretty=False)
    settings = {**special_tokens(metadata), "chat_template": metadata.get("tokenizer.chat_template")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def make_model(shape: str, tokenizer: Path, root: Path) -> Path:
    """A model folder without weights, whose context is told to be long: a tokenizer refuses, unread, what has more
    characters than any context of that length."""
    folder = write_config(shape, root)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = LONG_CONTEXT
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if not (tokenizer / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{tokenizer} has no tokenizer.json; --make-tokenizer writes one")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Served:
    """The running server. Made by `serve`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, name: str, log: Path, runtime: Path) -> None:
        self.process, self.url, self.name, self.log, self._runtime = process, url, name, log, runtime
        self.recordings = runtime  # the rings, once ready

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pids(self) -> dict[str, int]:
        """By name, without the supervisor; one that has died is left out."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()  # "gapless: NAME", or python -P -m MODULE .../NAME.json
                title = words[0] if words else ""
                name = title.partition(": ")[2] if title.startswith("gapless: ") else Path(words[-1]).stem
                found[name.strip()] = child.pid
        return found

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def wait_until_ready(self, limit_s: float = START_S) -> float:
        """Seconds until /ready said so. Raises RuntimeError with the end of its log if it does not."""
        begin = time.monotonic()
        while time.monotonic() - begin < limit_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}:\n{self.log_tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):  # 503 is an OSError of urllib's
                urllib.request.urlopen(f"{self.url}/ready", timeout=2).close()
                break
            time.sleep(0.05)
        else:
            raise RuntimeError(f"the server was not ready after {limit_s:.0f} s:\n{self.log_tail()}")
        took = time.monotonic() - begin
        for run in self._runtime.glob(f"{PREFIX}*"):
            self.recordings = (run / LINK).resolve()
        return took

    def wait_until_settled(self, limit_s: float = 60.0) -> float:
        """Seconds until the engine has captured the graphs that it puts off until there is nothing to do: then it does
        nothing but wait, a second at a time."""
        began, ring = time.monotonic_ns(), rings(self.recordings).get(ENGINE)
        if ring is None:
            time.sleep(min(limit_s, 20.0))
            return limit_s
        while time.monotonic_ns() - began < limit_s * 1e9:
            time.sleep(0.5)
            found = read_records(ring)
            # Whenever it has nothing to do it looks whether there is something to prepare.
            worked = found["begin"][(codes(found) == PREPARE) & (durations(found) > SHORT_NS)]
            latest = max(int(worked.max()) if len(worked) else 0, began)
            if np.count_nonzero(found["begin"][codes(found) == WAIT] > latest) >= QUIET_WAITS:
                break
        return (time.monotonic_ns() - began) / 1e9

    def cpu_seconds(self) -> dict[str, float]:
        """Of each process since its start, with the children that it has of its own."""
        found = {}
        for name, pid in {"supervisor": self.process.pid, **self.pids}.items():
            with contextlib.suppress(psutil.Error, OSError, ValueError):  # not every system tells
                process = psutil.Process(pid)
                family = [process] if name == "supervisor" else [process, *process.children(recursive=True)]
                times = [member.cpu_times() for member in family]
                found[name] = sum(time.user + time.system for time in times)
        return found

    def metric(self, name: str) -> float:
        """The sum of a metric's values over its labels; 0 if it is not there."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        return sum(map(float, values))

    def ask(self, body: bytes, timeout_s: float = 60.0) -> tuple[int, str]:
        """POST /v1/completions: status and the beginning of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()[:300].decode(errors="replace")
        finally:
            connection.close()

    @contextlib.contextmanager
    def stopped(self, kind: str) -> Iterator[list[str]]:
        """All processes of a kind do not run meanwhile. Gives their names."""
        chosen = {name: pid for name, pid in self.pids.items() if name.partition(".")[0] == kind}
        try:
            for pid in chosen.values():
                os.kill(pid, signal.SIGSTOP)
            yield sorted(chosen)
        finally:
            for pid in chosen.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        if self.process.poll() is None:
            self.process.kill()  # the others notice
            self.process.wait()


def serve_arguments(model: Path, device: str, more: Sequence[str] = ()) -> list[str]:
    """Those of `gapless serve`."""
    return [str(model), "--load-format", "dummy", "--device", device, "--max-model-len", str(CONTEXT), *more]


def engine_config(arguments: Sequence[str]) -> EngineConfig:
    """What `gapless serve` would give its engine."""
    from frontend.cli.serve import COMMAND
    from frontend.cli.settings import load

    settings = load(COMMAND.make_context("serve", list(arguments)).params)
    return EngineConfig(model=arguments[0], **msgspec.structs.asdict(settings.engine))


@contextlib.contextmanager
def serve(arguments: Sequence[str]) -> Iterator[Served]:
    """Start it; it is not ready yet. Stopped on leaving."""
    port = free_port()
    home = Path(tempfile.mkdtemp(prefix="online-"))  # short: socket addresses hold 107 bytes
    runtime, log = home / "run", home / "server.log"
    runtime.mkdir(0o700)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "XDG_RUNTIME_DIR": str(runtime),
        "XDG_STATE_HOME": str(home / "state"),
    }
    name = Path(arguments[0]).name
    command = [sys.executable, "-m", "frontend.cli", "serve", *arguments, "--port", str(port)]
    command += ["--served-model-name", name]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    served = Served(process, f"http://127.0.0.1:{port}", name, log, runtime)
    try:
        yield served
    finally:
        served.stop()
        shutil.rmtree(home, ignore_errors=True)

"""A child process that does what its settings say, in place of a real one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

from ipc.actor import Envelope, run
from ipc.channel import Receiver
from ipc.config import Config, Endpoints
from ipc.errors import UserError
from ipc.messages import Message, ModelReady, ProcessLost, Shutdown
from ipc.processes import Facts, ProcessSpec
from ipc.run_dir import RunDirectory
from ipc.runtime import Child, child_main

Behaviour = Literal["normal", "user_error", "bug", "exit_3", "never_ready", "deaf", "noisy", "other_clock"]
NAMES = ("frontend", "tokenizer_proc", "engine_core", "detokenizer_proc")


class FakeConfig(Config, frozen=True):
    name: str
    endpoints: Endpoints
    inbox: str
    journal: str  # gets one line per thing that happens
    behaviour: Behaviour = "normal"
    facts: dict[str, Any] = {}
    seen: dict[str, Any] = {}  # facts of the processes this one waited for


class Journalist:
    def __init__(self, name: str, path: str, child: Child) -> None:
        self._name, self._child = name, child
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - lives as long as the process

    def write(self, line: str) -> None:
        self._file.write(f"{self._name} {line}\n")

    def handle(self, batch: list[Message]) -> list[Envelope]:
        for message in batch:
            match message:
                case ModelReady():
                    self.write(f"ModelReady {message.max_model_len} {message.vocab_size}")
                    self._child.serving()
                case ProcessLost():
                    self.write(f"ProcessLost {message.name} {message.detail}")
        return []


def body(config: FakeConfig, child: Child) -> None:
    journal = Journalist(config.name, config.journal, child)
    journal.write(f"started {config.seen}")
    match config.behaviour:
        case "user_error":
            raise UserError("the flux capacitor is missing; install one")
        case "bug":
            raise RuntimeError("a bug in the flux capacitor")
        case "exit_3":
            os.write(2, b"last words\n")
            os._exit(3)
        case "other_clock":
            now = time.monotonic_ns
            time.monotonic_ns = lambda: now() - 3_600_000_000_000
        case "noisy":
            sys.stderr.write("x" * 3_000_000 + "\nend of the noise\n")
    with Receiver[Any](config.inbox, ModelReady | ProcessLost | Shutdown) as inbox:
        with child.phase("warming up"):
            child.progress("warming up", 1.0)
        while config.behaviour == "never_ready":
            time.sleep(3600)
        journal.write("Ready")
        child.ready(config.facts)
        if config.behaviour == "deaf":
            child.serving()  # and never listens
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(3600)
        run(journal, inbox, {})
    journal.write("stopped")


def fake_specs(
    run_dir: RunDirectory, journal: str, behaviours: Mapping[str, Behaviour], grace_s: float
) -> list[ProcessSpec]:
    """Four fakes in the places of the real four."""
    ends = Endpoints.make(run_dir.address)
    inboxes = dict(zip(NAMES, (ends.frontends[0], ends.tokenizers[0], ends.engine, ends.detokenizers[0]), strict=True))
    facts: dict[str, dict[str, Any]] = {
        "tokenizer_proc": {"tokenizer_json": "here.json"},
        "engine_core": {"max_model_len": 77, "vocab_size": 99},
    }

    def spec(name: str) -> ProcessSpec:
        def config(ready: Facts) -> FakeConfig:
            return FakeConfig(
                name=name,
                endpoints=ends,
                inbox=inboxes[name],
                journal=journal,
                behaviour=behaviours.get(name, "normal"),
                facts=facts.get(name, {}),
                seen={other: message.facts for other, message in ready.items()},
            )

        return ProcessSpec(
            name=name,
            module="fake_child",
            address=inboxes[name],
            config=config,
            after=("tokenizer_proc",) if name == "detokenizer_proc" else (),
            serves_clients=name == "frontend",
            stop_grace_s=grace_s,
        )

    return [spec(name) for name in NAMES]


if __name__ == "__main__":
    import msgspec

    settings = msgspec.json.decode(open(sys.argv[1], "rb").read())  # noqa: SIM115
    child_main(settings["name"], FakeConfig, body)

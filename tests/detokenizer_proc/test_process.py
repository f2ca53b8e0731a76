"""The actor behind in-memory channels, and the process itself."""

from __future__ import annotations

import subprocess
import sys
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
from msgspec import json
from msgspec.msgpack import encode
from tokenizers import Tokenizer

from detokenizer_proc.actor import DetokenizerActor
from ipc.actor import run
from ipc.channel import Receiver, Sender, frontend_key
from ipc.config import DetokenizerProcessConfig, Endpoints
from ipc.memory import MemoryChannel
from ipc.messages import (
    Abort,
    Deltas,
    DetokenizerMessage,
    EngineMessage,
    FrontendMessage,
    Opened,
    Ready,
    Shutdown,
    StepOutput,
    SupervisorMessage,
    TextSpec,
)

ROOT = Path(__file__).parents[2]


def one_step(tokenizer: Tokenizer) -> StepOutput:
    """Two requests of two frontends, one of which stops at once."""
    (token,) = tokenizer.encode("hello").ids
    stop = encode(TextSpec(stop=("ll",)))
    return StepOutput(
        step=0,
        request_ids=array("q", [1, 2]).tobytes(),
        token_ids=array("i", [token, token]).tobytes(),
        opened=[Opened(1, 0, 1, 0, 0, b""), Opened(2, 1, 1, 0, 0, stop)],
    )


def test_actor_on_memory_channels(byte_level: Tokenizer) -> None:
    inbox: MemoryChannel[Any] = MemoryChannel(DetokenizerMessage)
    engine: MemoryChannel[Any] = MemoryChannel(EngineMessage)
    frontends: list[MemoryChannel[Any]] = [MemoryChannel(FrontendMessage) for _ in range(2)]
    inbox.send(one_step(byte_level))
    inbox.send(Shutdown())
    outboxes = {frontend_key(i): frontend for i, frontend in enumerate(frontends)}
    run(DetokenizerActor(byte_level), inbox, {"engine": engine, **outboxes})
    assert engine.drain() == [Abort(request_ids=[2], stop_string=True)]
    (first,), (second,) = (frontend.drain() for frontend in frontends)
    assert isinstance(first, Deltas)
    assert isinstance(second, Deltas)
    assert (first.texts, second.texts) == (["hello"], ["he"])


def test_process(byte_level: Tokenizer, tmp_path: Path) -> None:
    ends = Endpoints.make(lambda name: f"ipc://{tmp_path}/{name}")
    path = tmp_path / "tokenizer.json"
    byte_level.save(str(path))
    settings = tmp_path / "settings.json"
    settings.write_bytes(json.encode(DetokenizerProcessConfig(tokenizer_json=str(path), endpoints=ends)))
    with (
        Receiver[Any](ends.supervisor, SupervisorMessage) as supervisor,
        Receiver[Any](ends.frontends[0], FrontendMessage) as frontend,
        closing(Sender(ends.detokenizers[0])) as sender,
        subprocess.Popen([sys.executable, "-m", "detokenizer_proc", str(settings)], cwd=ROOT) as process,
    ):
        try:
            seen: list[Any] = []
            while not any(isinstance(message, Ready) for message in seen):
                assert supervisor.wait(60)
                seen += supervisor.drain()
            sender.send(one_step(byte_level))
            assert frontend.wait(60)
            (deltas,) = frontend.drain()
            assert deltas.texts == ["hello"]
            assert psutil.Process(process.pid).cmdline()[0].startswith("gapless: detokenizer_proc")
            sender.send(Shutdown())
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert not (tmp_path / "detok.0").exists()

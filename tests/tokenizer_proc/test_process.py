"""The process itself: Ready facts, one request through real sockets, and a refusal that reads well."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import json
from tokenizers import Tokenizer

from ipc.channel import Receiver, Sender
from ipc.codec import pack_prompt
from ipc.config import Endpoints, TokenizerProcessConfig
from ipc.messages import (
    ChatPrompt,
    EngineMessage,
    Generate,
    Ready,
    Shutdown,
    StartFailed,
    Submit,
    SupervisorMessage,
    TextPrompt,
)
from ipc.sampling import SamplingParams
from tokenizer_proc.encode import from_bytes
from tokenizer_proc.lanes import LARGE_CHAT_BYTES, size_of

ROOT = Path(__file__).parents[2]
Process = tuple["subprocess.Popen[bytes]", Endpoints, Any]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    @contextmanager
    def started(model: Path) -> Iterator[Process]:
        """The process, its endpoints, and its last message before it serves."""
        run_dir = tmp_path_factory.mktemp("run")
        ends = Endpoints.make(lambda name: f"ipc://{run_dir}/{name}")
        settings = run_dir / "settings.json"
        settings.write_bytes(
            json.encode(TokenizerProcessConfig(model=str(model), endpoints=ends, run_dir=str(run_dir)))
        )
        with (
            Receiver[Any](ends.supervisor, SupervisorMessage) as supervisor,
            subprocess.Popen([sys.executable, "-m", "tokenizer_proc", str(settings)], cwd=ROOT) as process,
        ):
            try:
                seen: list[Any] = [None]
                while not isinstance(seen[-1], Ready | StartFailed):
                    assert supervisor.wait(60)
                    seen += supervisor.drain()
                yield process, ends, seen[-1]
            finally:
                process.kill()

    return started


def test_serves_a_request(start: Callable[[Path], Any], hf_directory: Callable[..., Path]) -> None:
    path = hf_directory(tokenizer_config={"eos_token": "</s>"}, config={"vocab_size": 600})
    with start(path) as (process, ends, ready):
        assert isinstance(ready, Ready)
        assert ready.facts["eos_token_ids"] == [1]
        assert ready.facts["tokenizer_vocab_size"] == 600
        assert ready.facts["chat_template"] is False
        left = Tokenizer.from_file(ready.facts["tokenizer_json"])
        assert psutil.Process(process.pid).cmdline()[0].startswith("gapless: tokenizer_proc")
        with Receiver[Any](ends.engine, EngineMessage) as engine, closing(Sender(ends.tokenizers[0])) as sender:
            prompt = pack_prompt(TextPrompt("hello 你好"))
            sender.send(Submit(request_ids=[1], frontend=0, prompt=prompt, sampling=SamplingParams(), arrival=0))
            assert engine.wait(60)
            (generate,) = engine.drain()
            assert isinstance(generate, Generate)
            assert left.decode(from_bytes(generate.prompt_ids)) == "hello 你好"
            sender.send(Shutdown())
            assert process.wait(60) == 0


def test_chats_of_all_sizes_get_the_template_that_was_loaded(
    start: Callable[[Path], Any], hf_directory: Callable[..., Path]
) -> None:
    """Whatever becomes of the model's files while the server runs: large ones are rendered by another process."""
    path = hf_directory(tokenizer_config={"chat_template": "first{{ messages[0].content }}"})
    small, large = ([{"role": "user", "content": "x"}] * count for count in (1, LARGE_CHAT_BYTES // 10))
    with start(path) as (_, ends, _), Receiver[Any](ends.engine, EngineMessage) as engine:
        (path / "chat_template.jinja").write_text("second")
        (path / "tokenizer.json").unlink()
        with closing(Sender(ends.tokenizers[0])) as sender:
            prompts = []
            for messages in (small, large):
                prompt = pack_prompt(ChatPrompt(messages))
                submit = Submit(request_ids=[1], frontend=0, prompt=prompt, sampling=SamplingParams(), arrival=0)
                assert size_of(submit) == ("short" if messages is small else "large")
                sender.send(submit)
                assert engine.wait(60)
                prompts += [message.prompt_ids for message in engine.drain()]
            sender.send(Shutdown())
    assert prompts[0] == prompts[1]


def test_unusable_model_is_a_plain_reason(start: Callable[[Path], Any], tmp_path: Path) -> None:
    with start(tmp_path) as (process, _, failed):
        assert isinstance(failed, StartFailed)
        assert "no tokenizer.json" in failed.message
        assert process.wait(60) == 1

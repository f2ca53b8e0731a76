from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.server import listen
from frontend.topology import LaunchConfig, process_specs
from ipc.config import (
    DetokenizerProcessConfig,
    EngineOptions,
    EngineProcessConfig,
    FrontendProcessConfig,
    ServerOptions,
    TextOptions,
    TokenizerProcessConfig,
)
from ipc.cores import default_detokenizers, default_frontends, default_tokenizers
from ipc.errors import UserError
from ipc.messages import Ready
from ipc.run_dir import RunDirectory

LAUNCH = LaunchConfig(
    model="/models/m.gguf",
    engine=EngineOptions(max_num_seqs=3),
    text=TextOptions(chat_template="t.jinja"),
    server=ServerOptions(port=1234, api_key="k"),
    model_aliases=("smol",),
    grace_seconds=2.0,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Any:
    with RunDirectory(tmp_path) as run:
        yield run


def test_every_module_string_resolves(run_dir: RunDirectory) -> None:
    for spec in process_specs(LAUNCH, run_dir):
        assert importlib.util.find_spec(f"{spec.module}.__main__") is not None, spec.module


def test_settings_reach_the_process_they_are_for(run_dir: RunDirectory) -> None:
    ready = {"tokenizer_proc": Ready(name="tokenizer_proc", pid=1, facts={"tokenizer_json": "/x/tokenizer.json"})}
    specs = {spec.name: spec for spec in process_specs(LAUNCH, run_dir)}
    types = {
        "frontend": FrontendProcessConfig,
        "tokenizer_proc": TokenizerProcessConfig,
        "engine_core": EngineProcessConfig,
        "detokenizer_proc": DetokenizerProcessConfig,
    }
    configs: dict[str, Any] = {}
    for name, config_type in types.items():
        awaited = {other: ready[other] for other in specs[name].after}
        configs[name] = specs[name].config(awaited)
        assert msgspec.json.decode(msgspec.json.encode(configs[name]), type=config_type) == configs[name]
    assert (configs["frontend"].port, configs["frontend"].api_key, configs["frontend"].model_aliases) == (
        1234,
        "k",
        ("smol",),
    )
    assert (configs["engine_core"].engine.model, configs["engine_core"].engine.max_num_seqs) == ("/models/m.gguf", 3)
    assert configs["tokenizer_proc"].chat_template == "t.jinja"
    assert configs["tokenizer_proc"].run_dir == str(run_dir.path)
    assert configs["detokenizer_proc"].tokenizer_json == "/x/tokenizer.json"


def test_numbers_of_processes_and_what_each_is_told(run_dir: RunDirectory) -> None:
    server = ServerOptions(port=0, frontend_procs=3, tokenizer_procs=2, detokenizer_procs=2)
    specs = process_specs(LaunchConfig(model="m", server=server), run_dir)
    assert [spec.name for spec in specs] == [
        "frontend", "frontend.1", "frontend.2", "tokenizer_proc", "tokenizer_proc.1", "engine_core",
        "detokenizer_proc", "detokenizer_proc.1",
    ]  # fmt: skip
    ready = {
        "frontend": Ready(name="frontend", pid=1, facts={"port": 4321}),
        "tokenizer_proc": Ready(name="tokenizer_proc", pid=2, facts={"tokenizer_json": "t.json"}),
    }
    configs: list[Any] = [spec.config(ready) for spec in specs]
    assert [config.port for config in configs[:3]] == [0, 4321, 4321]
    assert [config.index for config in configs if not isinstance(config, EngineProcessConfig)] == [0, 1, 2, 0, 1, 0, 1]
    assert all(config.endpoints == configs[0].endpoints for config in configs)
    assert len({spec.address for spec in specs}) == len(specs)
    assert [spec.serves_clients for spec in specs] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    ("cores", "processes"),
    [
        (1, (1, 1, 1)),
        (2, (1, 1, 1)),
        (7, (1, 1, 1)),
        (8, (2, 1, 1)),
        (16, (4, 3, 2)),
        (64, (8, 6, 4)),
        (256, (8, 6, 4)),
    ],
)
def test_defaults_follow_the_cores(cores: int, processes: tuple[int, int, int]) -> None:
    assert (default_frontends(cores), default_tokenizers(cores), default_detokenizers(cores)) == processes
    assert sum(processes) < cores or cores < 4  # the engine has a core to itself


def test_one_port_is_shared_within_a_server_and_not_between_two() -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(contextlib.closing(listen("127.0.0.1", 0, shared=True)))]
        port = socks[0].getsockname()[1]
        socks.append(stack.enter_context(contextlib.closing(listen("127.0.0.1", port, shared=True, first=False))))
        for shared in (True, False):  # another server, of either kind
            with pytest.raises(UserError, match=str(port)):
                listen("127.0.0.1", port, shared=shared)


def test_each_process_is_stopped_at_the_inbox_it_binds(run_dir: RunDirectory) -> None:
    specs = process_specs(LAUNCH, run_dir)
    ends = specs[0].config({}).endpoints  # type: ignore[attr-defined]
    assert [(spec.name, spec.address) for spec in specs] == [
        ("frontend", ends.frontends[0]),
        ("tokenizer_proc", ends.tokenizers[0]),
        ("engine_core", ends.engine),
        ("detokenizer_proc", ends.detokenizers[0]),
    ]
    assert len({ends.supervisor, *(spec.address for spec in specs)}) == 5
    assert specs[0].stop_grace_s > LAUNCH.grace_seconds

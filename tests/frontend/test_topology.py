from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest

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

"""`gapless explain MODEL [--gpu NAME]`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from frontend.cli.errors import CliError
from frontend.cli.models import HUB_ID, resolve_model
from frontend.cli.params import GroupedCommand, model_argument, option_params
from frontend.cli.progress import Reporter
from frontend.cli.settings import Settings, load
from ipc.errors import UserError

KEYS = [
    *("gpu", "dtype", "max_model_len", "peak_bandwidth", "peak_tflops"),
    *("gpu_memory_utilization", "block_size", "config", "cache_dir"),
]
# What a model costs is the engine's to know, which the frontend may not import: looked up by name, as the launcher does
# with processes. These modules load no torch.
EXPLAIN = "engine_core.explain:explain"


def _explain(**flags: Any) -> None:
    settings = load(flags)
    module, _, attribute = EXPLAIN.partition(":")
    path, name = find_model(settings)
    report: Callable[..., str] = getattr(importlib.import_module(module), attribute)
    try:
        click.echo(report(str(path), name, settings.explain.gpu, settings.engine))
    except UserError as error:
        raise CliError(str(error)) from None


def find_model(settings: Settings) -> tuple[Path, str]:
    """(path, name). Of a folder or a hub id config.json is enough; weights are not downloaded. Raises `ModelError`."""
    name = settings.program.model or ""
    path = Path(name).expanduser()
    if name and (path / "config.json").is_file():
        return path, path.resolve().name
    with Reporter() as reporter:
        if HUB_ID.fullmatch(name) and not path.exists() and not name.endswith(".gguf"):
            from frontend.cli.download import fetch_config

            return fetch_config(name, reporter.progress), name
        found = resolve_model(settings.program.model, reporter.progress, settings.program.cache_dir)
    return found.path, found.name


COMMAND = GroupedCommand(
    "explain",
    params=[model_argument(), *option_params(KEYS)],
    callback=_explain,
    help="Reckon what MODEL takes on a GPU: weights, KV cache, what fits, and the least time of steps. Needs no GPU.",
)

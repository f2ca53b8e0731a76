"""`gapless pull`, `gapless list` and `gapless version`."""

from __future__ import annotations

from typing import Any

import click

from frontend.cli.models import DEFAULT_MODEL, cached_models, resolve_model
from frontend.cli.params import GroupedCommand, option_params
from frontend.cli.progress import Reporter
from frontend.cli.settings import load
from frontend.version import package_version


def _pull(**flags: Any) -> None:
    settings = load(flags).program
    with Reporter() as reporter:
        found = resolve_model(settings.model, reporter.progress, settings.cache_dir)
    click.echo(f"{found.name} ({found.format}) is at {found.path}")


def _list(**flags: Any) -> None:
    models = cached_models(load(flags).program.cache_dir)
    if not models:
        click.echo(f"No model is cached yet. `gapless pull {DEFAULT_MODEL}` fetches the default one (98 MB).")
        return
    width = max(len("NAME"), *(len(model.name) for model in models))
    click.echo(f"{'NAME':<{width}}  {'SIZE':>9}  {'FORMAT':<11}  PATH")
    for model in models:
        click.echo(f"{model.name:<{width}}  {size_text(model.size):>9}  {model.format:<11}  {model.path}")


def size_text(count: int) -> str:
    """Bytes in decimal units, as download pages give them."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def version_text() -> str:
    return f"gapless {package_version()}"


PULL = GroupedCommand(
    "pull",
    params=[click.Argument(["model"]), *option_params(["config", "cache_dir"])],
    callback=_pull,
    help="Download MODEL, so that serving it later needs no network.",
)
LIST = GroupedCommand(
    "list",
    params=option_params(["config", "cache_dir"]),
    callback=_list,
    help="List the models that start with no network: name, size, format and path.",
)
VERSION = click.Command("version", callback=lambda: click.echo(version_text()), help="Print the version.")

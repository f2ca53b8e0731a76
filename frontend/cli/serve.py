"""`gapless serve [MODEL]`."""

from __future__ import annotations

from typing import Any

from frontend.cli.params import GroupedCommand, model_argument, option_params, settings_keys
from frontend.cli.settings import load


def _serve(**flags: Any) -> None:
    settings = load(flags)
    # After the settings are known to be good: a wrong flag is answered at once.
    from frontend.cli.launch import serve_foreground

    serve_foreground(settings)


COMMAND = GroupedCommand(
    "serve",
    params=[model_argument(), *option_params(settings_keys("program", "engine", "text", "server"))],
    callback=_serve,
    help="Serve MODEL over HTTP until Ctrl-C: OpenAI's API, a chat page at /.",
)

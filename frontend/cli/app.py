"""The command `gapless`: its sub-commands, each loaded only when it is called, and how errors reach the user.

`gapless --help` must answer at once, so nothing here imports more than click.
"""

from __future__ import annotations

import importlib
import sys

import click

# Name -> (group, module that holds `COMMAND`, line of help). The help is here so that listing loads no module.
COMMANDS = {
    "serve": ("Use", "frontend.cli.serve", "Start the server: OpenAI's API and a chat page."),
    "run": ("Use", "frontend.cli.run", "Answer one prompt in the terminal; piped input is read too."),
    "chat": ("Use", "frontend.cli.chat", "Talk with the model in the terminal."),
    "bench": ("Look inside", "frontend.cli.bench", "Load a server and see what clients feel; or time an engine."),
    "top": ("Look inside", "frontend.cli.top", "Watch a running server: load, latency, device, requests."),
    "explain": ("Look inside", "frontend.cli.explain", "Reckon what a model takes on a GPU, and what is possible."),
    "pull": ("Models", "frontend.cli.catalog:PULL", "Download a model now."),
    "list": ("Models", "frontend.cli.catalog:LIST", "List the models that start with no network."),
    "trace": ("Look inside", "frontend.cli.trace", "Show where time went, and who left the GPU waiting."),
    "version": ("Models", "frontend.cli.catalog:VERSION", "Print the version."),
}

EPILOG = """\b
MODEL is an alias (smollm2, the default), a Hugging Face folder, a .gguf file or a hub id.
Every setting is a flag (--max-num-seqs 8), an environment variable (GAPLESS_MAX_NUM_SEQS=8)
and a line of $XDG_CONFIG_HOME/gapless/config.toml (max_num_seqs = 8); the first one wins.
`gapless COMMAND --help` lists them by group."""


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][1].partition(":")
        command = getattr(importlib.import_module(module), attribute or "COMMAND")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in dict.fromkeys(entry[0] for entry in COMMANDS.values()):
            with formatter.section(group):
                formatter.write_dl([(name, entry[2]) for name, entry in COMMANDS.items() if entry[0] == group])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"no command {args[0]!r}" + (f"; did you mean {close[0]}?" if close else ""))
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from frontend.cli.catalog import version_text

        click.echo(version_text())
        ctx.exit()


GROUP = LazyGroup(
    name="gapless",
    params=[click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version)],
    help="Serve large language models, with nothing between the GPU's steps.",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    no_args_is_help=True,
)


def run() -> None:
    """Run the command line and exit: 0, 1 for a failure the user can act on, 2 for wrong usage, 130 for Ctrl-C.

    A reader of our output that leaves early (`gapless list | head`) is click's to deal with: no traceback, status 1.
    """
    from frontend.cli.errors import CliError

    try:
        sys.exit(GROUP.main(prog_name="gapless", standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except CliError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)

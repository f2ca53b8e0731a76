"""Click parameters and help pages made from the settings' definition."""

from __future__ import annotations

from collections.abc import Iterable

import click

from frontend.cli.settings import OPTIONS, Option

GROUP_ORDER = ("Answer", "Explain", "Server", "Model", "Memory & scheduling", "Program")
LEFT_COLUMN = 26


def settings_keys(*parts: str) -> list[str]:
    """Keys of the settings that these parts of `Settings` hold; MODEL is an argument, not an option."""
    return [key for key, opt in OPTIONS.items() if opt.part in parts and key != "model"]


def model_argument() -> click.Argument:
    return click.Argument(["model"], required=False)


def option_params(keys: Iterable[str]) -> list[click.Parameter]:
    """One click option per setting. Values stay text: `settings.load` converts and checks all sources alike."""
    return [_param(OPTIONS[key]) for key in keys]


def _param(opt: Option) -> click.Option:
    if opt.is_switch:
        return click.Option([opt.key, "/".join(opt.flags)], default=None, help=opt.help)
    return click.Option([opt.key, opt.flags[0]], metavar=opt.metavar, default=None, help=opt.help)


def shown_default(opt: Option) -> str:
    """Default for help and docs; settings whose default is computed say so in their own help."""
    if opt.default is None or opt.default == "":
        return ""
    return ("on" if opt.default else "off") if opt.is_switch else str(opt.default)


def help_row(opt: Option) -> tuple[str, str]:
    """Left and right column of a setting in help pages."""
    on, *off = opt.flags
    name = on
    if off:
        name = on.replace("--enable-", "--enable/disable-") if "enable" in on else f"--[no-]{on.removeprefix('--')}"
    choices = opt.expected.removeprefix("one of ") if opt.expected.startswith("one of ") else ""
    default = shown_default(opt)
    text = opt.help + (f": {choices}" if choices else "") + (f" [{default}]" if default else "")
    return f"{name} {opt.metavar}".rstrip(), text


# Flags of vLLM that have no counterpart of that name.
_ELSEWHERE = {
    "--model": "MODEL is an argument: gapless {command} MODEL",
    "--enforce-eager": "--no-cuda-graphs",
    "--no-enable-prefix-caching": "--disable-prefix-caching",
    "--tensor-parallel-size": "one GPU only",
    "--pipeline-parallel-size": "one GPU only",
    "--data-parallel-size": "one GPU only",
}


class GroupedCommand(click.Command):
    """A command whose help lists its settings in groups, all in the same columns."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _ELSEWHERE:
                raise
            hint = _ELSEWHERE[error.option_name].format(command=self.name)
            raise click.UsageError(f"No such option {error.option_name}: {hint}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [OPTIONS[param.name] for param in self.get_params(ctx) if param.name in OPTIONS]
        rows = {opt.key: help_row(opt) for opt in options if opt.key != "model"}
        width = min(LEFT_COLUMN, max(len(left) for left, _ in rows.values()))
        for group in GROUP_ORDER:
            chosen = [rows[opt.key] for opt in options if opt.group == group and opt.key in rows]
            if chosen:
                with formatter.section(group):
                    formatter.write_dl([(left.ljust(width), right) for left, right in chosen], LEFT_COLUMN, 2)

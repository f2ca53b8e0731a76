"""Click parameters and help pages made from the settings' definition."""

from __future__ import annotations

from collections.abc import Iterable

import click

from frontend.cli.settings import OPTIONS, Option

GROUP_ORDER = ("Answer", "Server", "Model", "Memory & scheduling", "Program")


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


class GroupedCommand(click.Command):
    """A command whose help lists its settings in groups, one line each."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            opt = OPTIONS.get(param.name or "")
            if not isinstance(param, click.Option) or opt is None:
                continue
            default = shown_default(opt)
            names = " / ".join(opt.flags) + (f" {opt.metavar}" if opt.metavar else "")
            groups.setdefault(opt.group, []).append((names, opt.help + (f" [{default}]" if default else "")))
        for group in GROUP_ORDER:
            if group in groups:
                with formatter.section(group):
                    formatter.write_dl(groups[group], col_max=34, col_spacing=2)

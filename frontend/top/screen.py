"""Figures on a terminal, one column or two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from frontend.top.figures import Figures, Watch

WIDE = 80  # columns, from which on panels stand side by side
BARS = "▁▂▃▄▅▆▇█"
UNKNOWN = "–"
UNITS = ("", "k", "M", "G", "T", "P")


def screen(figures: Figures, watch: Watch, url: str, console: Console, height: int, trouble: str = "") -> Group:
    """At most `height` lines if they are enough for the panels and three requests, as wide as the console.

    `trouble`: why these are not the figures of now.
    """
    wide = console.width >= WIDE
    inner = (console.width // 2 if wide else console.width) - 4
    load, device = _load(figures, watch, inner), _device(figures, watch, inner)
    latency, processes = _latency(figures), _processes(figures)
    upper: RenderableType = Group(load, device, latency, processes)
    if wide:
        upper = Table.grid(expand=True)
        upper.add_column(ratio=1)
        upper.add_column(ratio=1)
        upper.add_row(Group(load, latency), Group(device, processes))
    left = height - 1 - len(console.render_lines(upper))
    return Group(_head(figures, url, trouble), upper, _requests(figures, left))


def _head(figures: Figures, url: str, trouble: str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(" gapless top ", style="bold reverse")
    line.append(f" {figures.model or UNKNOWN}", style="bold")
    line.append(f"  {url}")
    line.append(f"  {trouble}" if trouble else "  q quits", style="bold red" if trouble else "dim")
    return line


def _load(figures: Figures, watch: Watch, width: int) -> Panel:
    f = figures
    rows: list[tuple[str, RenderableType]] = [
        ("tokens/s", Text(f"{_number(f.tokens_per_s)} generated, {_number(f.prompt_tokens_per_s)} prompt")),
        ("", sparkline(watch.tokens, width - 12, "green")),
        (
            "requests",
            Text(f"{_number(f.running)} running, {_number(f.waiting)} waiting, {_number(f.in_flight)} in flight"),
        ),
        ("KV cache", _bar(f.kv_usage, width - 12)),
        ("prefix hits", _bar(f.prefix_hits, width - 12)),
    ]
    return _panel("Load", rows)


def _latency(figures: Figures) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row("", Text("p50", style="dim"), Text("p99", style="dim"))
    for name, pair in (
        ("first token", figures.ttft),
        ("next tokens", figures.itl),
        ("whole answer", figures.e2e),
        ("step", figures.step),
    ):
        table.add_row(name, *map(_time, pair or (None, None)))
    return Panel(table, title=f"Latency, last {figures.window:.0f} s", title_align="left", border_style="dim")


def _device(figures: Figures, watch: Watch, width: int) -> Panel:
    f = figures
    idle = sorted(((share, cause) for cause, share in f.idle.items()), reverse=True)
    rows: list[tuple[str, RenderableType]] = [
        ("busy", _bar(f.busy, width - 12, "green")),
        ("idle", Text(", ".join(f"{cause} {_share(share)}" for share, cause in idle) or UNKNOWN)),
        ("avoidable", sparkline(watch.idle, width - 12, "red", 1.0, _share(f.avoidable_idle))),
        ("step", sparkline(watch.steps, width - 12, "cyan", None, _time(f.mean_step).plain)),
        ("tokens/step", Text(_number(f.tokens_per_step))),
        ("of limit", _bar(f.bytes_share, width - 12, "magenta", f" {_unit(f.bytes_per_s)}B/s")),
        ("", _bar(f.flops_share, width - 12, "magenta", f" {_unit(f.flops_per_s)}FLOP/s")),
    ]
    return _panel("Device", rows)


def _processes(figures: Figures) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(justify="right")
    for process in figures.processes:
        table.add_row(process.name, f"{process.cpu:.0%} CPU", f"{_unit(process.resident)}B")
    return Panel(
        table if figures.processes else Text(UNKNOWN), title="Processes", title_align="left", border_style="dim"
    )


def _requests(figures: Figures, height: int) -> Panel:
    rows = figures.requests
    table = Table.grid(padding=(0, 2))
    for name in ("request", "state", "age", "prompt", "computed", "output"):
        table.add_column(name, justify="left" if name in ("request", "state") else "right", no_wrap=True)
    title = "Requests" if rows is None else f"Requests: {rows.total:,} in the engine"
    if rows is None:
        return Panel(Text("not told", style="dim"), title=title, title_align="left", border_style="dim")
    table.add_row(*(Text(str(column.header), style="dim") for column in table.columns))
    shown = rows.requests[: max(3, height - (4 if rows.total > height - 3 else 3))]
    for row in shown:
        style = {"waiting": "yellow", "prefill": "cyan"}.get(row.state, "green")
        counts = (f"{count:,}" for count in (row.prompt_tokens, row.computed_tokens, row.output_tokens))
        table.add_row(row.id, Text(row.state, style=style), f"{row.age_seconds:.1f} s", *counts)
    more = rows.total - len(shown)
    body: RenderableType = Group(table, Text(f"and {more:,} more", style="dim")) if more > 0 else table
    return Panel(body, title=title, title_align="left", border_style="dim")


def _panel(title: str, rows: Iterable[tuple[str, RenderableType]]) -> Panel:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", min_width=11, no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in rows:
        table.add_row(name, value)
    return Panel(table, title=title, title_align="left", border_style="dim")


def sparkline(values: Sequence[float], width: int, style: str, top: float | None = None, label: str = "") -> Text:
    """The latest values as bars, the highest being `top` or the largest of them, and a label after them."""
    room = max(1, width - len(label) - 1)
    shown = list(values)[-room:]
    highest = top if top is not None else max(shown, default=0.0)
    bars = "".join(BARS[min(7, int(value / highest * 7.999))] if highest > 0 else BARS[0] for value in shown)
    return Text.assemble((bars, style), f" {label}" if label else "")


def _bar(share: float | None, width: int, style: str = "green", label: str = "") -> Text:
    if share is None:
        return Text(UNKNOWN)
    text = f" {_share(share)}{label}"
    room = max(1, width - len(text))
    full = round(min(1.0, max(0.0, share)) * room)
    return Text.assemble(("█" * full, style), ("░" * (room - full), "dim"), text)


def _share(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.1%}" if value < 0.0995 else f"{value:.0%}"


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _time(seconds: float | None) -> Text:
    if seconds is None:
        return Text(UNKNOWN)
    if seconds < 1e-3:
        return Text(f"{seconds * 1e6:.0f} µs")
    return Text(f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s")


def _unit(value: float | None) -> str:
    """1234567 as "1.23 M"."""
    if value is None:
        return f"{UNKNOWN} "
    for unit in UNITS:
        if value < 999.5 or unit == UNITS[-1]:
            break
        value /= 1000
    return f"{value:.3g} {unit}"

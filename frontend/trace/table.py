"""A summary as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from frontend.trace.summary import EngineSummary, Stat, Summary
from frontend.trace.timeline import STAGES, RequestLife

MOST_REQUESTS = 20
BAR = 40
NO_STEPS = "no steps in this time"
WIDE = 130  # columns that the waterfall's bars need
# One letter for each stage of the waterfall's bars.
LETTERS = dict(zip(STAGES, "ptqPDdw", strict=True))


def print_summary(summary: Summary, console: Console, only: set[int] | None = None) -> None:
    for part in parts(summary, only, console.width):
        console.print(part)


def parts(summary: Summary, only: set[int] | None = None, width: int = WIDE) -> list[RenderableType]:
    """What there is to print, in order; `width` in columns."""
    found: list[RenderableType] = []
    for engine in summary.engines:
        found.append(device_line(engine))
        if engine.steps:
            found += [*([idle_table(engine)] if engine.idle else []), stats_table(engine)]
    if not summary.engines:
        found.append(Text(NO_STEPS, style="bold"))
    if summary.others:
        found.append(others_table(summary.others))
    if summary.stages:
        found.append(_stat_rows("requests, by stage", summary.stages))
    chosen = [request for request in summary.requests if only is None or request.id in only]
    if chosen:
        found.append(waterfall(chosen, with_bars=width >= WIDE))
    if summary.unfinished:
        found.append(Text(f"{summary.unfinished} requests are not in the recording from end to end"))
    return found


def device_line(engine: EngineSummary) -> Text:
    """Busy and idle of one device."""
    name = f"{engine.device} of {engine.process.name}"
    if not engine.steps:
        return Text(f"{name}: {NO_STEPS}")
    rest = f", {seconds(engine.no_requests)} without requests left out" if engine.no_requests else ""
    return Text(
        f"{name}: {engine.steps:,} steps in {seconds(engine.span)}, busy {engine.share(engine.busy):.1%}, "
        f"idle {engine.share(engine.idle_total):.1%} ({seconds(engine.idle_total)}){rest}",
        style="bold",
    )


def idle_table(engine: EngineSummary) -> Table:
    table = _table(f"{engine.device} idle: what it waited for", "cause", "time", "share", "per step", "")
    largest = max(engine.idle.values())
    for cause, time in engine.idle.items():
        per_step = micro(time / 1000 / engine.steps)
        table.add_row(
            cause, seconds(time), f"{engine.share(time):.2%}", per_step, "█" * max(1, round(20 * time / largest))
        )
    return table


def stats_table(engine: EngineSummary) -> Table:
    return _stat_rows(f"{engine.process.name}, by step", engine.stats)


def others_table(others: Sequence[tuple[str, list[Stat]]]) -> RenderableType:
    return Group(*(_stat_rows(name, stats) for name, stats in others))


def waterfall(requests: Sequence[RequestLife], with_bars: bool = True) -> Table:
    """One line per request, the slowest first; times in milliseconds."""
    key = ", ".join(f"{letter} {name}" for name, letter in LETTERS.items())
    slowest = sorted(requests, key=lambda request: -request.total)[:MOST_REQUESTS]
    rest = f"; the slowest {len(slowest)} of {len(requests)}" if len(requests) > len(slowest) else ""
    title = f"requests, each from end to end, in ms{rest}" + (f" ({key})" if with_bars else "")
    short = [name.replace("tokenize", "tok.") for name in STAGES]
    table = _table(title, "request", *short, "total", "tokens", *([""] if with_bars else []))
    for request in slowest:
        stages = request.stages()
        tokens = f"{request.prompt_tokens}+{request.output_tokens}"
        times = [f"{time / 1e6:.2f}" for time in (*stages.values(), request.total)]
        table.add_row(name_of(request), *times, tokens, *([bar(request)] if with_bars else []))
    return table


def bar(request: RequestLife) -> str:
    """The stages in proportion, as letters."""
    drawn = ""
    at = 0
    for name, time in request.stages().items():
        at += time
        drawn += LETTERS[name] * (round(BAR * at / max(1, request.total)) - len(drawn))
    return drawn


def name_of(request: RequestLife) -> str:
    """The first digits of the id that the client was given, else the number that the processes use."""
    if request.name is None:
        return str(request.id)
    return f"{request.name[0] + (1 << 31):08x}"


def _stat_rows(title: str, stats: Sequence[Stat]) -> Table:
    table = _table(title, "", "count", "p50", "p99", "total")
    for stat in stats:
        table.add_row(stat.name, f"{stat.count:,}", micro(stat.p50), micro(stat.p99), seconds(round(stat.total * 1000)))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column == "" else "right", no_wrap=True)
    return table


def micro(value: float) -> str:
    """Microseconds in the unit that suits them."""
    if value >= 1e6:
        return f"{value / 1e6:.2f} s"
    return f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.1f} µs"


def milli(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.2f} ms" if nanoseconds < 1e9 else f"{nanoseconds / 1e9:.2f} s"


def seconds(nanoseconds: int) -> str:
    return micro(nanoseconds / 1000)

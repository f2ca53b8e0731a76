"""`gapless trace [RUN]`: what the processes of a running or ended server did, and who left the GPU waiting."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click

from frontend.cli.errors import CliError
from frontend.cli.output import check_output, write_output

if TYPE_CHECKING:
    from frontend.trace.timeline import Timeline
    from ipc.recorder.reader import Recording
    from ipc.recorder.runs import Run

FILE_WIDTH = 140
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}


class Duration(click.ParamType[float]):
    """10s, 500ms, 2m; a bare number is seconds."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|)", str(value).strip())
        if found is None or float(found[1]) == 0:
            self.fail(f"{value!r} is no time; write 10s, 500ms or 2m", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


def _trace(run: str | None, last: float | None, request: str | None, out: str | None, html: str | None) -> None:
    from rich.console import Console

    from frontend.trace.summary import summarize
    from frontend.trace.table import print_summary
    from frontend.trace.timeline import build

    check_output(out)
    check_output(html)
    chosen = choose(run)
    recordings = load(chosen)
    timeline = build(recordings, *window(chosen, recordings, last))
    only = None if request is None else find_request(timeline, request)
    if only is not None:
        timeline = build(recordings, *lifetime(timeline, only))
    summary = summarize(timeline)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(
        f"run {chosen.name}, {'running' if chosen.alive else 'ended'}, model {chosen.about.model or 'unknown'}"
    )
    for line in warnings(chosen, timeline):
        console.print(line, style="yellow")
    print_summary(summary, console, only)
    if out is not None:
        import msgspec

        from frontend.trace.chrome import chrome_trace

        write_output(out, msgspec.json.encode(chrome_trace(timeline, only)))
        console.print(f"{out}: open it in ui.perfetto.dev or chrome://tracing")
    if html is not None:
        from frontend.trace.page import page

        write_output(html, page(timeline, summary, f"Gapless run {chosen.name}"))
        console.print(f"{html}: a page for the browser")


def choose(name: str | None) -> Run:
    """The run that is meant: the newest by default, one that runs before those that have ended. Raises `CliError`."""
    from ipc.recorder.runs import find_runs

    runs = find_runs()
    if not runs:
        raise CliError("no run has left a recording here; `gapless serve` makes one")
    if name is None:
        return runs[0]
    found = [run for run in runs if run.name.startswith(name) or run.name.endswith(name)]
    if len(found) != 1:
        many = "several runs match" if found else "no run is called"
        raise CliError(f"{many} {name!r}; there are: {', '.join(run.name for run in runs)}")
    return found[0]


def load(run: Run) -> list[Recording]:
    """Raises `CliError` if nothing was recorded."""
    from ipc.recorder.reader import read_rings

    recordings = [recording for recording in read_rings(run.folder) if recording.records]
    if not recordings:
        raise CliError(f"the recording of {run.name} at {run.folder} is empty")
    return recordings


def window(run: Run, recordings: list[Recording], last: float | None) -> tuple[int | None, int | None]:
    """Begin and end of the last `last` seconds: of now, or of a run that has ended."""
    from ipc.recorder.reader import span_of

    if last is None:
        return None, None
    first, newest = span_of(recordings)
    end = time.monotonic_ns() if run.alive else newest
    return max(first, end - round(last * 1e9)), end


def find_request(timeline: Timeline, wanted: str) -> set[int]:
    """The choices of a request, by the id that its client was given or by our own number. Raises `CliError`."""
    from ipc.recorder.events import name_words

    if re.fullmatch(r"\d{1,15}", wanted) and any(request.id == int(wanted) for request in timeline.requests):
        return {int(wanted)}
    digits = wanted.rpartition("-")[2].lower()
    if re.fullmatch(r"[0-9a-f]{8,32}", digits):
        low, high = name_words(digits[:16].ljust(16, "0")), name_words(digits[:16].ljust(16, "f"))
        found = {request.id for request in timeline.requests if request.name and low <= request.name <= high}
        if found:
            return found
    count = len(timeline.requests)
    raise CliError(f"request {wanted!r} is not in the recording, which holds {count} request{'s' * (count != 1)}")


def lifetime(timeline: Timeline, only: set[int]) -> tuple[int, int]:
    """The time in which these requests were in the server."""
    lives = [request for request in timeline.requests if request.id in only]
    return min(life.begin for life in lives), max(life.written or life.left or timeline.end for life in lives)


def warnings(run: Run, timeline: Timeline) -> list[str]:
    """What keeps the trace from telling everything."""
    found = [
        f"the clock of {name} is not the supervisor's: its track is displaced against the others"
        for name, clock in run.about.clocks.items()
        if not clock.agrees
    ]
    lost = [f"{process.name} ({process.lost:,})" for process in timeline.processes if process.lost]
    if lost:
        seconds = (timeline.end - timeline.begin) / 1e9
        found.append(f"older records were replaced by newer ones: {', '.join(lost)}; shown are {seconds:.1f} s")
    return found


def _list() -> None:
    from ipc.recorder.runs import find_runs

    for run in find_runs():
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.about.started))
        click.echo(f"{run.name}  {'running' if run.alive else 'ended':<8} started {started}  {run.about.model}")


def _command(list_runs: bool, **options: object) -> None:
    if list_runs:
        _list()
    else:
        _trace(**options)  # type: ignore[arg-type]


COMMAND = click.Command(
    "trace",
    params=[
        click.Argument(["run"], required=False),
        click.Option(["--last"], type=Duration(), help="Only the last TIME of it: 10s, 500ms, 2m."),
        click.Option(["--request"], metavar="ID", help="Only the time of this request: its x-request-id."),
        click.Option(["-o", "--out"], metavar="FILE", help="Write a trace for ui.perfetto.dev."),
        click.Option(["--html"], metavar="FILE", help="Write the same as pictures, one page that needs nothing else."),
        click.Option(["--list", "list_runs"], is_flag=True, help="List the runs that can be looked at."),
    ],
    callback=_command,
    help="Show what the processes of RUN did and who left the GPU waiting. RUN is one of --list; by default the "
    "newest, a running server first. Works on a server that was killed.",
)

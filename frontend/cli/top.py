"""`gapless top [URL]`: a live picture of a running server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from frontend.cli.errors import CliError
from frontend.cli.settings import load

if TYPE_CHECKING:
    from rich.console import Console

    from frontend.cli.client import Client

DEFAULT_URL = "http://127.0.0.1:8000"
ONCE_LINES = 40


def _top(url: str | None, api_key: str | None, interval: float, once: bool) -> None:
    settings = load({"url": url, "api_key": api_key})
    from rich.console import Console

    from frontend.cli.client import Client

    client = Client(settings.answer.url or DEFAULT_URL, settings.server.api_key)
    console = Console(highlight=False)
    if once or not console.is_terminal:
        show_once(client, console, interval)
    else:
        show_live(client, console, interval)


def show_once(client: Client, console: Console, interval: float) -> None:
    """Print one picture, of the next `interval` seconds. Raises `CliError`."""
    from frontend.top.figures import Watch
    from frontend.top.screen import screen
    from frontend.top.source import take

    watch = Watch()
    watch.add(take(client))
    time.sleep(interval)
    figures = watch.add(take(client))
    console.print(screen(figures, watch, client.url, console, ONCE_LINES))


def show_live(client: Client, console: Console, interval: float) -> None:
    """Until q or Ctrl-C. Raises `CliError` if the server is not there at first; later it is waited for."""
    from rich.live import Live

    from frontend.top.figures import Watch
    from frontend.top.screen import screen
    from frontend.top.source import take

    watch, trouble = Watch(), ""
    figures = watch.add(take(client))
    with single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        pause = min(interval, 0.3)  # the first rates soon
        while True:
            picture = screen(figures, watch, client.url, console, console.height, trouble)
            live.update(picture, refresh=True)
            if wait_for_quit(pause):
                return
            pause = interval
            try:
                figures, trouble = watch.add(take(client)), ""
            except CliError as error:
                trouble = str(error)


@contextlib.contextmanager
def single_keys() -> Iterator[None]:
    """Keys arrive without Enter and are not shown, if standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def wait_for_quit(seconds: float) -> bool:
    """True as soon as q is pressed or the input ends, False after `seconds`."""
    import os
    import select

    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or b"q" in keys.lower():
                return True
    return False


COMMAND = click.Command(
    "top",
    params=[
        click.Argument(["url"], required=False),
        click.Option(["--api-key"], metavar="TEXT", help="The server's key [GAPLESS_API_KEY]."),
        click.Option(
            ["--interval"], type=click.FloatRange(0.1, 60), default=1.0, metavar="SECONDS",
            help="Time between two looks [1].",
        ),
        click.Option(["--once"], is_flag=True, help="Print one picture and end."),
    ],
    callback=_top,
    help=f"Watch the server at URL ({DEFAULT_URL}): load, latency, where the device's time goes, requests, processes. "
    "q quits.",
)  # fmt: skip

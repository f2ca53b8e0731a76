"""`gapless top`: the figures out of what a server tells, the screen, and the command against a real frontend."""

from __future__ import annotations

import io
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from frontend.cli.app import GROUP
from frontend.cli.client import Client
from frontend.cli.errors import CliError
from frontend.top.figures import Watch, _quantile
from frontend.top.screen import screen, sparkline
from frontend.top.source import RequestRow, RequestRows, Snapshot, parse, take
from tests.frontend.fake import MODEL, FakeServer
from tests.frontend.test_life import MakeServer

ROOT = Path(__file__).parents[2]


def text_of(**values: float) -> str:
    """An exposition with counters and gauges as told, and all that the screen shows."""
    lines = [f'gapless:{name}{{model_name="m"}} {value}' for name, value in values.items()]
    return "\n" + "\n".join(lines) + "\n"


def snapshot(at: float, **values: float) -> Snapshot:
    return parse(text_of(**values), at)


def drawn(watch: Watch, now: Snapshot, width: int, height: int = 40, trouble: str = "") -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(screen(watch.add(now), watch, "http://here", console, height, trouble))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_rates_are_of_the_time_between_two_looks() -> None:
    watch = Watch()
    first = watch.add(snapshot(100.0, generation_tokens_total=50, kv_cache_usage_perc=0.5))
    assert (first.tokens_per_s, first.kv_usage, first.running) == (None, 0.5, None)
    figures = watch.add(snapshot(102.0, generation_tokens_total=250, kv_cache_usage_perc=0.25))
    assert (figures.tokens_per_s, figures.kv_usage, figures.window) == (100.0, 0.25, 2.0)
    assert list(watch.tokens) == [0.0, 100.0]


def test_the_device_and_its_limits() -> None:
    def at(seconds: float, busy: float, idle: dict[str, float], moved: float) -> Snapshot:
        lines = [
            f'gapless:device_idle_seconds_total{{cause="{cause}",model_name="m"}} {value}'
            for cause, value in idle.items()
        ]
        known = text_of(device_busy_seconds_total=busy, device_bytes_total=moved, device_limit_bytes_per_second=4e9)
        return parse(known + "\n".join(lines) + "\n", seconds)

    watch = Watch()
    watch.add(at(0.0, 10.0, {"launch": 1.0, "nothing": 5.0}, 1e9))
    figures = watch.add(at(1.0, 10.5, {"launch": 1.1, "nothing": 5.4}, 2e9))
    assert figures.busy == pytest.approx(0.5)
    assert figures.idle == pytest.approx({"launch": 0.1, "nothing": 0.4})
    assert figures.avoidable_idle == pytest.approx(0.1)
    assert figures.bytes_per_s == pytest.approx(2e9)
    assert figures.bytes_share == pytest.approx(0.5)
    assert figures.flops_share is None


def test_percentiles_are_of_the_last_seconds() -> None:
    def at(seconds: float, low: int, high: int) -> Snapshot:
        name = "gapless:time_to_first_token_seconds_bucket"
        counts = {"0.1": low, "1.0": low + high, "+Inf": low + high}
        lines = (f'{name}{{le="{bound}",model_name="m"}} {count}' for bound, count in counts.items())
        return parse("\n" + "\n".join(lines) + "\n", seconds)

    watch = Watch()
    assert watch.add(at(0.0, 100, 0)).ttft == pytest.approx((0.05, 0.099))
    assert watch.add(at(6.0, 100, 100)).ttft == pytest.approx((0.55, 0.991))  # only those between 0.1 and 1
    assert watch.add(at(20.0, 150, 100)).ttft == pytest.approx((0.05, 0.099))  # since the look at 6 s
    assert watch.add(at(40.0, 150, 100)).ttft is None  # nothing has happened


def test_quantiles_of_fine_buckets_are_those_of_the_values() -> None:
    """A quantile lies in the bucket of the value of that rank, however far apart the values there are."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    width = 0.002
    for _ in range(20):
        values = sorted(rng.expovariate(5) for _ in range(200))
        bounds = [i * width for i in range(1, 3000)]
        counts = [(bound, float(bisect_right(values, bound))) for bound in bounds]
        for rank in (100, 180, 198):
            found = _quantile([*counts, (float("inf"), 200.0)], rank / 200)
            assert found == pytest.approx(min(values[rank - 1], bounds[-1]), abs=width)
    assert _quantile([(1.0, 0.0), (float("inf"), 5.0)], 0.5) == 1.0


def test_a_server_that_was_started_anew_is_a_new_story() -> None:
    watch = Watch()
    watch.add(snapshot(0.0, engine_steps_total=500, generation_tokens_total=1000))
    figures = watch.add(snapshot(1.0, engine_steps_total=3, generation_tokens_total=4))
    assert figures.tokens_per_s is None


def test_what_is_no_exposition_of_ours_has_no_samples() -> None:
    for text in ("", "<html>", "\ngapless:broken{ 1\n", 'other:x{a="b"} 1\n'):
        assert parse(text, 0.0).samples == {}
    found = parse('\nvllm:num_requests_running{engine="0",model_name="q"} 3.0\n', 0.0)  # a server of vLLM
    assert (found.total("num_requests_running"), found.model) == (3.0, "q")
    both = parse('\nvllm:num_requests_running{engine="0"} 3.0\ngapless:num_requests_running{a="b"} 3.0\n', 0.0)
    assert both.total("num_requests_running") == 3.0


@pytest.mark.parametrize(("width", "height"), [(30, 99), (46, 45), (79, 45), (80, 24), (100, 30), (160, 45)])
def test_the_screen_fits_its_terminal(width: int, height: int) -> None:
    rows = [RequestRow(str(2**50 + i), "decode", 1.0, 100_000, 5, 7) for i in range(100)]
    now = Snapshot(1.0, snapshot(1.0, generation_tokens_total=5).samples, RequestRows(300, rows), "a-model" * 10)
    lines = drawn(Watch(), now, width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert any("Requests: 300" in line for line in lines)
    assert any("more" in line for line in lines)


def test_trouble_is_told_beside_the_last_figures() -> None:
    lines = drawn(Watch(), snapshot(1.0, kv_cache_usage_perc=0.5), 100, trouble="no answer")
    assert "no answer" in lines[0]
    assert any("50%" in line for line in lines)


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 4], 10, "").plain == "▁▂▄█"
    assert sparkline([5, 0, 1], 2, "", 1.0).plain == "█"
    assert sparkline([], 5, "").plain == ""
    assert sparkline([0, 0], 20, "", None, "0 ms").plain == "▁▁ 0 ms"


def test_one_picture_of_a_running_server(make_server: MakeServer) -> None:
    server = make_server()
    done = CliRunner().invoke(GROUP, ["top", server.url, "--once", "--interval", "0.1"], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    for words in (MODEL, "25%", "frontend", "Requests: 0 in the engine", "0 running, 0 waiting"):
        assert words in done.output, words


def test_a_key_is_sent_and_its_lack_is_told(make_server: MakeServer) -> None:
    server = make_server(api_key="sesame")
    assert take(Client(server.url, "sesame")).model == MODEL
    with pytest.raises(CliError, match="API key is required"):
        take(Client(server.url))


def test_errors_are_plain(make_server: MakeServer) -> None:
    done = CliRunner().invoke(GROUP, ["top", "http://127.0.0.1:9", "--once"])
    assert isinstance(done.exception, CliError)
    assert "no answer from http://127.0.0.1:9" in str(done.exception)
    server = make_server()
    server.fake.listing = False  # the engine hangs: the rest is shown all the same
    assert take(Client(server.url)).requests is None


class Terminal:
    """`gapless top` on a pseudo-terminal of 90 by 30."""

    def __init__(self, url: str) -> None:
        self.seen = b""
        pid, self._fd = pty.fork()
        if pid == 0:
            os.chdir(ROOT)
            os.environ |= {"COLUMNS": "90", "LINES": "30", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
            os.execv(sys.executable, [sys.executable, "-m", "frontend.cli", "top", url, "--interval", "0.2"])
        self._pid = pid

    def until(self, condition: Callable[[bytes], bool]) -> None:
        end = time.monotonic() + 60
        while not condition(self.seen):
            assert time.monotonic() < end, self.seen[-2000:]
            if select.select([self._fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self._fd, 65536)
                except OSError:  # it has ended
                    assert condition(self.seen), self.seen[-2000:]

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def status(self) -> int:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self._fd, 65536)
                except OSError:
                    continue
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        pytest.fail("did not end")


def test_live_until_q_and_through_a_server_that_goes_away(make_server: MakeServer) -> None:
    server: FakeServer = make_server()
    terminal = Terminal(server.url)
    terminal.until(lambda seen: MODEL.encode() in seen and b"Processes" in seen)
    server.close()
    terminal.until(lambda seen: b"no answer from" in seen)
    terminal.press(b"xq")
    assert terminal.status() == 0
    assert b"\x1b[?1049l" in terminal.seen  # the terminal is as it was
    assert b"Traceback" not in terminal.seen


def test_the_picture_in_the_docs_is_of_this_screen() -> None:
    picture = (ROOT / "docs" / "top.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    now = snapshot(1.0, generation_tokens_total=5)
    words = {"Load", "Device", "Processes", "tokens/s", "avoidable", "first token", "of limit"}
    shown = "\n".join(drawn(Watch(), now, 100))
    assert all(word in picture and word in shown for word in words)
    assert "url(http" not in picture  # it loads nothing


def test_top_loads_no_torch() -> None:
    program = (
        "import sys\nfrom frontend.cli import top\nimport frontend.top.screen, frontend.top.source\n"
        "assert not {'torch', 'numba', 'zmq'} & set(sys.modules), set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)

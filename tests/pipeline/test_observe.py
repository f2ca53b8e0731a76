"""What the real four processes tell of themselves while a real model answers."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from frontend.cli.app import GROUP
from frontend.cli.client import Client
from frontend.top.figures import Watch
from frontend.top.source import Snapshot, take
from frontend.topology import Server

from .conftest import eventually

pytestmark = pytest.mark.model

BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "gapless.json"
TOKENS = 160  # an answer long enough to be looked at in its middle on a busy machine


@pytest.fixture(scope="module")
def looks(running_server: Server) -> tuple[Snapshot, Snapshot, Snapshot]:
    """Before, in the middle of, and after an answer."""
    client = Client(running_server.url)
    eventually(lambda: take(client).total("engine_steps_total") is not None, "a heartbeat")
    before = take(client)
    time.sleep(0.3)  # so that the next list of requests is a new one
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{running_server.url}/v1/completions", json=body, trust_env=False, timeout=600
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        middle = take(client)
        for _ in lines:
            pass
    time.sleep(1.2)  # a heartbeat of an idle engine
    return before, middle, take(client)


def grown(looks: tuple[Snapshot, Snapshot, Snapshot], name: str, **labels: str) -> float:
    old, new = looks[0].total(name, **labels), looks[2].total(name, **labels)
    assert old is not None, name
    assert new is not None, name
    return new - old


def test_all_time_is_charged_to_someone(looks: tuple[Snapshot, Snapshot, Snapshot]) -> None:
    busy = grown(looks, "device_busy_seconds_total")
    idle = grown(looks, "device_idle_seconds_total")
    assert busy > 0
    # as exact as heartbeats are frequent
    assert busy + idle == pytest.approx(looks[2].at - looks[0].at, abs=2.2)
    assert grown(looks, "device_idle_seconds_total", cause="nothing") > 0
    assert grown(looks, "engine_step_time_seconds_sum") >= busy * 0.9


def test_steps_and_what_they_cost(looks: tuple[Snapshot, Snapshot, Snapshot]) -> None:
    steps = grown(looks, "engine_step_time_seconds_count")
    assert steps == grown(looks, "engine_step_tokens_count") >= TOKENS
    assert steps == pytest.approx(grown(looks, "engine_steps_total"), abs=1)
    # 135 million weights: two operations each and token; held in blocks of 4 to 8 bits, read once a step
    assert 134e6 * 2 * TOKENS < grown(looks, "device_flops_total") < 134e6 * 2 * (TOKENS + 10) * 1.1
    assert 134e6 * 0.5 * steps < grown(looks, "device_bytes_total") < 134e6 * 1.3 * (steps + 1)
    for what in ("bytes", "flops"):
        limit = looks[2].total(f"device_limit_{what}_per_second")
        assert limit is not None
        assert limit > 1e8


def test_every_process_is_there_with_its_memory(running_server: Server, looks: tuple[Snapshot, ...]) -> None:
    resident = looks[2].by("process_resident_memory_bytes", "process")
    assert set(resident) == {"supervisor", *running_server.pids}
    assert all(size > 2**20 for size in resident.values())
    assert resident["engine_core"] > 90e6  # the weights


def test_a_request_in_flight_is_listed(looks: tuple[Snapshot, Snapshot, Snapshot]) -> None:
    middle, after = looks[1].requests, looks[2].requests
    assert middle is not None
    assert after is not None
    (request,) = middle.requests
    assert request.state == "decode"
    assert 1 <= request.output_tokens <= TOKENS
    assert request.prompt_tokens > 1
    assert request.computed_tokens >= request.prompt_tokens
    assert (after.total, after.requests) == (0, [])


def test_the_figures_of_top(looks: tuple[Snapshot, Snapshot, Snapshot]) -> None:
    watch = Watch()
    watch.add(looks[0])
    figures = watch.add(looks[2])
    assert figures.tokens_per_s == pytest.approx(TOKENS / (looks[2].at - looks[0].at))
    assert figures.ttft is not None
    assert figures.itl is not None
    assert figures.step is not None
    assert figures.bytes_share is not None
    assert figures.bytes_share > 0


def test_the_board_and_the_command(running_server: Server, looks: tuple[Snapshot, ...]) -> None:
    names = set(re.findall(r"gapless:(\w+)", json.dumps(json.loads(BOARD.read_text())["panels"])))
    assert names - looks[2].samples.keys() == set()
    done = CliRunner().invoke(GROUP, ["top", running_server.url, "--once", "--interval", "0.3"])
    assert done.exit_code == 0, done.output
    assert "engine_core" in done.output

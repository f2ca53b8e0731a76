"""Several frontends, tokenizers and detokenizers behind one port: one server to whoever looks at it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from frontend.topology import Server
from ipc.config import EngineOptions, ServerOptions

from .conftest import DEADLINE_S, eventually, launch_config
from .test_real_lifecycle import Stream

SMALL = EngineOptions(
    weights="none", attention="torch", max_model_len=4096, kv_tokens=8192, max_num_batched_tokens=64, threads=1
)
OPTIONS = ServerOptions(port=0, served_model_name="smollm2", frontend_procs=2, tokenizer_procs=2, detokenizer_procs=2)
NAMES = {
    "frontend", "frontend.1", "tokenizer_proc", "tokenizer_proc.1", "engine_core", "detokenizer_proc",
    "detokenizer_proc.1",
}  # fmt: skip

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    with Server(launch_config(smollm2_path, engine=SMALL, server=OPTIONS)) as server:
        yield server


def connections(pid: int) -> int:
    return sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process(pid).net_connections("tcp"))


@pytest.fixture
def clients(server: Server) -> Iterator[list[httpx.Client]]:
    """Connections that stay open, at least two to each frontend."""
    found: list[httpx.Client] = []

    def spread() -> bool:
        found.append(httpx.Client(base_url=server.url, timeout=DEADLINE_S, trust_env=False))
        assert found[-1].get("/health").status_code == 200
        return all(connections(server.pids[name]) >= 2 for name in ("frontend", "frontend.1"))

    eventually(spread, "connections to both frontends")
    yield found
    for client in found:
        client.close()


def ask(client: httpx.Client, prompt: str, **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return "|".join(choice["text"] for choice in answer.json()["choices"])


def streamed(client: httpx.Client, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    events = client.post("/v1/completions", json=body).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-2]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def counted(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in rows if "_created" not in name}


def test_every_process_has_a_name_and_one_port_serves(server: Server) -> None:
    assert server.pids.keys() == NAMES
    titles = {psutil.Process(pid).cmdline()[0].rstrip() for pid in server.pids.values()}
    assert titles == {f"gapless: {name}" for name in NAMES}
    ports = {
        (c.laddr.ip, c.laddr.port)
        for name in ("frontend", "frontend.1")
        for c in psutil.Process(server.pids[name]).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    assert len(ports) == 1


def test_answers_are_the_same_whoever_serves_them(server: Server, clients: list[httpx.Client]) -> None:
    prompts = ["Once upon a time", "The sky is", "def f(x):", "你好"]
    expected = {prompt: ask(clients[0], prompt) for prompt in prompts}
    assert all(len(text) > 3 for text in expected.values())
    with ThreadPoolExecutor(len(clients)) as pool:
        jobs = [(client, prompt) for client in clients for prompt in prompts]
        for (_, prompt), text in zip(jobs, pool.map(lambda job: streamed(*job), jobs), strict=True):
            assert text == expected[prompt]
    # The choices of one request are spread over both detokenizers.
    assert ask(clients[-1], prompts[0], n=4) == "|".join([expected[prompts[0]]] * 4)
    for client in clients:
        assert client.get("/ready").status_code == 200


def test_any_frontend_tells_what_all_have_counted(server: Server, clients: list[httpx.Client]) -> None:
    before = counted(clients[0])
    for client in clients:
        ask(client, "Hi", n=2)
    totals = [counted(client) for client in clients]
    name = 'gapless:request_generation_tokens_sum{model_name="smollm2"}'
    assert totals[0][name] - before.get(name, 0.0) == 2 * 8 * len(clients)
    own = {key for key in totals[0] if "request_" in key or "latency" in key}  # the rest is the engine's heartbeat
    for other in totals[1:]:
        assert {key: other[key] for key in own} == {key: totals[0][key] for key in own}
    assert totals[0]['gapless:num_requests_in_flight{model_name="smollm2"}'] == 0


def test_a_stopped_frontend_does_not_hold_up_metrics(server: Server, clients: list[httpx.Client]) -> None:
    pid = server.pids["frontend.1"]
    mine = [client for client in clients if owner(server, client) == "frontend"]
    before = counted(mine[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        assert counted(mine[0]).keys() == before.keys()
        assert ask(mine[0], "Hi")
    finally:
        os.kill(pid, signal.SIGCONT)


def owner(server: Server, client: httpx.Client) -> str:
    """The frontend at the other end of the client's one connection."""
    with client.stream("GET", "/health") as response:
        port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
        response.read()
    for name in ("frontend", "frontend.1"):
        if any(c.raddr and c.raddr.port == port for c in psutil.Process(server.pids[name]).net_connections("tcp")):
            return name
    pytest.fail("nobody has the connection")


def test_idle_processes_sleep(server: Server, clients: list[httpx.Client]) -> None:
    ask(clients[0], "Hi")

    def used() -> float:
        times = [psutil.Process(pid).cpu_times() for pid in server.pids.values()]
        return sum(value.user + value.system for value in times)

    before = used()
    threading.Event().wait(3.0)
    assert used() - before < 0.6  # of 3 s times 7 processes: one that spins would take all of its 3 s


@pytest.mark.parametrize("victim", ["frontend.1", "tokenizer_proc.1", "detokenizer_proc", "detokenizer_proc.1"])
def test_the_death_of_one_ends_all_with_an_error(
    launch: Callable[[dict[str, Any]], Any], smollm2_path: Path, victim: str
) -> None:
    config = launch_config(smollm2_path, engine=SMALL, server=OPTIONS, grace_seconds=1.0)
    run = launch({"real": msgspec.to_builtins(config), "grace_s": DEADLINE_S / 4})
    url = run.wait_for("ready")["facts"]["frontend"]["url"]
    answers = [Stream(url) for _ in range(4)]
    os.kill(run.pids[victim], signal.SIGKILL)
    failure = run.wait_for("failed")
    assert (failure["name"], run.exit_code()) == (victim, 1)
    run.assert_nothing_left()
    for answer in answers:
        if victim.startswith("frontend"):
            answer.join(DEADLINE_S)
            assert answer.broken or "error" in answer.lines[-4]
        else:
            answer.assert_ended_in_an_error()


def test_a_signal_stops_all_frontends_at_once(launch: Callable[[dict[str, Any]], Any], smollm2_path: Path) -> None:
    config = launch_config(smollm2_path, engine=SMALL, server=OPTIONS, grace_seconds=1.0)
    run = launch({"real": msgspec.to_builtins(config), "grace_s": DEADLINE_S / 4})
    url = run.wait_for("ready")["facts"]["frontend"]["url"]
    answers = [Stream(url) for _ in range(4)]
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("stopped")
    assert run.exit_code() == 0
    for answer in answers:
        answer.assert_ended_in_an_error()
    run.assert_nothing_left()
    assert "Traceback" not in run.stderr
    assert "killed" not in run.stderr, run.stderr


def test_short_prompts_pass_a_long_one(server: Server) -> None:
    """Short answers are there before those to prompts that take long to encode, though these came first."""
    order: list[str] = []
    # Few tokens, as the context is small, but many characters to look at: it is refused once it is encoded.
    long = "hello world, " * 6_000 * 8

    def send(name: str, prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1}
        status = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S, trust_env=False).status_code
        order.append(name)
        return status

    with ThreadPoolExecutor(8) as pool:
        late = [pool.submit(send, "long", long) for _ in range(4)]
        statuses = [send("short", "Hi") for _ in range(10)]
        assert statuses == [200] * 10
        assert [future.result() for future in late] == [400] * 4
    assert order.index("long") >= 3
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200

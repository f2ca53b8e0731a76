"""Clients that leave, clients that do not read, processes that die, start and stop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import httpx
import psutil
import pytest

from frontend.backend import Phase
from frontend.heartbeat import Heartbeat
from frontend.parser.client import LARGE_BODY
from ipc.codec import pack_request_ids
from ipc.messages import Deltas, ProcessLost, Shutdown
from ipc.recorder.events import LEFT
from ipc.recorder.ring import Recorder
from tests.frontend.fake import COUNT, MAX_MODEL_LEN, TOKENS, VOCAB_SIZE, FakeServer, stats

MakeServer = Callable[..., FakeServer]


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], **fields}


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def ask(server: FakeServer, path: str, fields: dict[str, Any]) -> socket.socket:
    """A connection on which this has been asked, and nothing read yet."""
    data = json.dumps(fields).encode()
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data
    )
    return client


def metric(server: FakeServer, name: str, **labels: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=60).text.splitlines()
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"gapless:{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items())
    ]
    return sum(found)


class Marks(Recorder):
    def __init__(self) -> None:
        self.left: list[int] = []

    def mark(self, code: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        if code == LEFT:
            self.left.append(id)


def test_every_request_that_the_engine_does_not_end_is_recorded_as_left(make_server: MakeServer) -> None:
    marks = Marks()
    server = make_server(recorder=marks)
    url = f"{server.url}/v1/chat/completions"
    with httpx.Client(trust_env=False, timeout=60) as http:
        assert http.post(url, json=body("hi", n=2)).status_code == 200
        assert marks.left == []
        assert http.post(url, json=body("/reject", n=2)).status_code == 400
        refused = server.fake.last().request_ids
        assert marks.left == refused
        with ask(server, "/v1/chat/completions", body("/hold", n=2)):
            until(lambda: server.fake.last().request_ids != refused)
        # gone before its prompt is encoded
        until(lambda: marks.left == refused + server.fake.last().request_ids)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["/hold", "/endless"])
async def test_a_client_that_leaves_aborts_its_requests(server: FakeServer, stream: bool, prompt: str) -> None:
    before = len(server.fake.submits)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
        call = asyncio.ensure_future(http.post("/v1/chat/completions", json=body(prompt, stream=stream, n=3)))
        await asyncio.to_thread(until, lambda: len(server.fake.submits) > before)
        ids = set(server.fake.last().request_ids)
        await asyncio.sleep(0.05)
        assert not ids & set(server.fake.aborts)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert await asyncio.to_thread(server.fake.wait_for_aborts, ids)
    if prompt == "/hold":  # its tokenizer may still have it
        await asyncio.to_thread(until, lambda: ids <= set(server.fake.dropped))
    else:
        assert not ids & set(server.fake.dropped)
    await asyncio.to_thread(until, lambda: metric(server, "num_requests_in_flight") == 0)


def test_a_client_that_leaves_tokenize_frees_its_place(make_server: MakeServer) -> None:
    server = make_server(max_queued_requests=1)
    for _ in range(3):
        before = len(server.fake.held)
        with ask(server, "/tokenize", body("/hold")):
            until(lambda before=before: len(server.fake.held) > before)  # type: ignore[misc]
        until(lambda: server.fake.held[-1].call_id in server.fake.dropped)
    assert httpx.post(f"{server.url}/tokenize", json=body("AB"), trust_env=False).status_code == 200
    assert server.failure is None


def test_a_client_that_leaves_while_its_body_is_parsed_is_noticed(make_server: MakeServer) -> None:
    server = make_server()
    raw = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    data = json.dumps(body("/hold")).encode() + b" " * LARGE_BODY
    before = len(psutil.Process().children())
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(raw % len(data) + data)
        until(
            lambda: len(psutil.Process().children()) > before
        )  # all of the body is there, and nothing more is read for now
    until(lambda: server.fake.held)
    until(lambda: server.fake.held[0].call_id in server.fake.dropped)


@pytest.mark.parametrize("prompt", ["/endless", "/flood"])
def test_clients_leave_at_any_moment(make_server: MakeServer, prompt: str) -> None:
    """Between the loss of a connection and the end of its request, text for it may still come."""
    server = make_server()
    request = httpx.Request("POST", f"{server.url}/v1/chat/completions", json=body(prompt, stream=True))
    raw = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    raw += b"%d\r\n\r\n" % len(request.content) + request.content
    for index in range(40):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            # Every other one has asked for more: then the protocol's current request is not the one being answered.
            client.sendall(raw + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * (index % 2))
            assert client.recv(100)
    until(lambda: metric(server, "num_requests_in_flight") == 0)
    assert server.failure is None


def test_many_clients_vanish_in_mid_stream(server: FakeServer) -> None:
    socks = []
    request = b'{"messages": [{"role": "user", "content": "/endless"}], "stream": true}'
    for _ in range(20):
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(request)
            + request
        )
        socks.append(sock)
    for sock in socks:
        assert b"200 OK" in sock.recv(4096)
    assert server.backend.idle.is_set() is False
    for sock in socks:
        sock.close()
    until(server.backend.idle.is_set)


def test_at_most_one_abort_per_request_and_none_after_its_end(server: FakeServer) -> None:
    before = len(server.fake.submits)
    for prompt, stream, n in (("hi", True, 2), ("hi", False, 2), ("/too-long", True, 1), ("/reject", False, 2)):
        request = body(prompt, n=n, stream=stream)
        httpx.post(f"{server.url}/v1/chat/completions", json=request, trust_env=False)
    time.sleep(0.1)
    ids = [request_id for submit in list(server.fake.submits)[before:] for request_id in submit.request_ids]
    assert len(ids) == 7
    assert not set(ids) & set(server.fake.aborts)
    assert len(set(server.fake.aborts)) == len(server.fake.aborts)


def test_a_failed_choice_aborts_its_siblings(server: FakeServer) -> None:
    response = httpx.post(
        f"{server.url}/v1/chat/completions", json=body("/fail-late", n=3), trust_env=False, timeout=60
    )
    assert response.status_code == 500
    assert server.fake.wait_for_aborts(set(server.fake.last().request_ids[1:]))


def test_a_client_that_does_not_read_is_dropped(make_server: MakeServer) -> None:
    server = make_server(stream_buffer_bytes=64 * 1024)
    request = b'{"messages": [{"role": "user", "content": "/flood"}], "stream": true}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(request)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(head + request)
        until(lambda: server.fake.submits)
        ids = set(server.fake.last().request_ids)
        beside = httpx.post(f"{server.url}/v1/chat/completions", json=body("hi"), trust_env=False, timeout=60)
        assert beside.json()["choices"][0]["message"]["content"] == "".join(TOKENS)
        assert server.fake.wait_for_aborts(ids)
        until(server.backend.idle.is_set)
        sock.settimeout(60)
        received = 0
        try:
            while data := sock.recv(1 << 20):
                received += len(data)
        except ConnectionResetError:
            pass
        assert received > 0


def test_a_client_that_falls_behind_and_catches_up_misses_nothing(make_server: MakeServer) -> None:
    server = make_server(stream_buffer_bytes=64 * 2**20)
    request = b'{"messages": [{"role": "user", "content": "/count"}], "stream": true}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(head % len(request) + request)
        until(lambda: server.fake.submits)
        until(server.backend.idle.is_set)  # all has been told, hardly anything read
        body = Body()
        parser = httptools.HttpResponseParser(body)
        while data := sock.recv(1 << 16):
            parser.feed_data(data)
    *events, finish, done, rest = b"".join(body.pieces).decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert '"finish_reason":"stop"' in finish
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"] for event in events]
    assert "".join(texts) == "".join(f"{i:<200}" for i in range(COUNT))
    assert len(texts) < COUNT  # what had queued up was joined


class Body:
    """What a parser finds."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        self.pieces.append(data)


def test_slow_but_reading_clients_are_kept(server: FakeServer) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body("/slow", stream=True), trust_env=False
    ) as r:
        text = "".join(r.iter_text())
    assert text.endswith("data: [DONE]\n\n")


def test_loading_then_ready(make_server: MakeServer) -> None:
    server = make_server(ready=False)
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/version").status_code == 200
        assert http.get("/metrics").status_code == 200
        for method, path in (
            ("GET", "/ready"),
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
        ):
            response = http.request(method, path, content=b"{}" if method == "POST" else None)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert response.json()["error"]["message"] == "the model is loading"
        server.fake.ready()
        server.wait_until_ready()
        assert http.get("/ready").status_code == 200
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == MAX_MODEL_LEN
        assert http.post("/v1/chat/completions", json=body("hi")).status_code == 200


def test_too_many_requests_are_sent_away(make_server: MakeServer) -> None:
    server = make_server(max_queued_requests=2)
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        assert http.post("/v1/chat/completions", json=body("hi", n=3)).status_code == 400
        held = threading.Thread(
            target=lambda: httpx.post(
                f"{server.url}/v1/chat/completions", json=body("/hold", n=2), trust_env=False, timeout=60
            )
        )
        held.start()
        until(lambda: server.fake.submits)
        response = http.post("/v1/chat/completions", json=body("hi"))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert response.headers["retry-after"] == "1"
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 503
        server.fake.send(ProcessLost(name="engine_core", detail="killed by signal 9"))
        held.join(60)
        assert not held.is_alive()


def test_ready_needs_a_heartbeat_that_makes_progress() -> None:
    now = 0.0
    heartbeat = Heartbeat(10.0, lambda: now)
    now = 100.0
    heartbeat.start()
    now = 110.0
    assert heartbeat.stalled() is None
    now = 110.5
    assert heartbeat.stalled() == 10.5  # silence
    heartbeat.beat(stats(step=7, running=1))
    assert heartbeat.stalled() is None
    now = 121.0
    heartbeat.beat(stats(step=7, running=1))
    assert heartbeat.stalled() == 10.5  # beating, busy, and still at the same step
    heartbeat.beat(stats(step=7, waiting=1))
    assert heartbeat.stalled() == 10.5
    heartbeat.beat(stats(step=8, running=1))
    assert heartbeat.stalled() is None
    now = 200.0
    heartbeat.beat(stats(step=8))  # idle at the same step
    assert heartbeat.stalled() is None


def test_silence_of_the_engine_shows_in_ready_and_not_in_health(make_server: MakeServer) -> None:
    server = make_server(stall_seconds=1.0)
    server.fake.beating = False
    with httpx.Client(base_url=server.url, trust_env=False) as http:

        def not_ready() -> bool:
            answer = http.get("/ready")
            return answer.status_code == 503 and "no progress" in answer.json()["error"]["message"]

        until(not_ready)
        assert http.get("/health").status_code == 200


def test_a_lost_process_ends_every_request_with_an_error(make_server: MakeServer) -> None:
    server = make_server()
    answers: dict[str, httpx.Response] = {}
    url = f"{server.url}/v1/chat/completions"

    def call(name: str, prompt: str, stream: bool) -> None:
        request = {"json": body(prompt, stream=stream), "trust_env": False, "timeout": 60}
        with httpx.stream("POST", url, **request) as answers[name]:
            answers[name].read()

    threads = [
        threading.Thread(target=call, args=args)
        for args in (("held", "/hold", False), ("held stream", "/hold", True), ("stream", "/endless", True))
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(server.fake.submits) == 3 and "stream" in answers)
    server.fake.send(ProcessLost(name="engine_core", detail="killed by signal 9"))
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for name in ("held", "held stream"):
        assert answers[name].status_code == 503
        assert "engine_core died: killed by signal 9" in answers[name].json()["error"]["message"]
    *_, error, done, rest = answers["stream"].text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert '"error"' in error
    assert "killed by signal 9" in error
    after = httpx.get(f"{server.url}/ready", trust_env=False, timeout=60)
    assert after.status_code == 503
    assert (
        httpx.post(f"{server.url}/v1/chat/completions", json=body("hi"), trust_env=False, timeout=60).status_code == 503
    )


@pytest.mark.parametrize("ready", [True, False])
def test_a_failed_start_is_left_to_whoever_started_it_to_tell(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture, ready: bool
) -> None:
    """That knows the cause; a second line before it would hide it. It may have told us to stop before that."""
    lost = ProcessLost(name="engine_core", detail="exited with code 1")
    for news in ([lost], [Shutdown(), lost]):
        backend = make_server(ready=ready).backend
        backend.deliver(news)
        assert backend.phase is Phase.LOST
    assert ("engine_core died: exited with code 1" in caplog.text) is ready


def test_shutdown_lets_answers_finish_and_ends_the_rest(make_server: MakeServer) -> None:
    server = make_server(grace_seconds=4.0)  # ten times as long as a slow answer takes
    answers: dict[str, httpx.Response] = {}
    url = f"{server.url}/v1/chat/completions"

    def call(prompt: str) -> None:
        request = {"json": body(prompt, stream=True), "trust_env": False, "timeout": 60}
        with httpx.stream("POST", url, **request) as answers[prompt]:
            answers[prompt].read()

    threads = [threading.Thread(target=call, args=(prompt,)) for prompt in ("/slow", "/endless")]
    for thread in threads:
        thread.start()
    until(lambda: len(answers) == 2)  # both have begun
    server.close()
    for thread in threads:
        thread.join(60)
    assert '"finish_reason":"stop"' in answers["/slow"].text
    assert answers["/slow"].text.endswith("data: [DONE]\n\n")
    assert "shutting down" in answers["/endless"].text
    assert answers["/endless"].text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", trust_env=False, timeout=60)


def test_deltas_of_unknown_requests_are_ignored(server: FakeServer) -> None:
    server.fake.send(Deltas(request_ids=pack_request_ids([2**62, 0, 5]), num_tokens=[1, 1, 1], texts=["a", "b", "c"]))
    assert (
        httpx.post(f"{server.url}/v1/chat/completions", json=body("hi"), trust_env=False, timeout=60).status_code == 200
    )


def test_a_body_that_never_comes_is_a_408(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    monkeypatch.setattr("frontend.http.BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(60)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        answer = b""
        while data := sock.recv(4096):
            answer += data
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("earlier", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"], ids=["first", "second"])
def test_headers_that_never_end_cost_the_connection(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, earlier: bytes
) -> None:
    if not earlier:
        monkeypatch.setattr("frontend.http.HEADER_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(60)
        sock.sendall(earlier)
        if earlier:
            assert b"200 OK" in sock.recv(4096)
            monkeypatch.setattr("frontend.http.HEADER_SECONDS", 0.2)  # not for the first one
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: loc")
        while sock.recv(4096):
            pass


def test_a_message_that_cannot_be_handled_ends_the_process_and_its_requests(make_server: MakeServer) -> None:
    server = make_server(grace_seconds=0.1)
    answers: list[httpx.Response] = []
    url = f"{server.url}/v1/chat/completions"
    call = threading.Thread(
        target=lambda: answers.append(httpx.post(url, json=body("/hold"), trust_env=False, timeout=60))
    )
    call.start()
    until(lambda: server.fake.submits)
    server.fake.send(Deltas(request_ids=b"odd", num_tokens=[1], texts=["a"]))
    server.thread.join(60)
    assert not server.thread.is_alive()
    assert isinstance(server.failure, ValueError)
    call.join(60)
    assert answers[0].status_code == 503


@pytest.fixture
def metrics(server: FakeServer) -> Iterator[str]:
    for stream in (True, False):
        httpx.post(f"{server.url}/v1/chat/completions", json=body("hi", stream=stream), trust_env=False, timeout=60)
    return httpx.get(f"{server.url}/metrics", trust_env=False, timeout=60).text  # type: ignore[return-value]


def test_metrics_have_the_names_people_graph(metrics: str) -> None:
    for name in (
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_sum",
        "request_queue_time_seconds_count", "request_prompt_tokens_sum", "request_generation_tokens_sum",
        "request_success_total", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total",
        "generation_tokens_total", "http_responses_total",
    ):  # fmt: skip
        assert f"\ngapless:{name}{{" in metrics, name


def test_metrics_of_the_engine_and_of_one_answer(make_server: MakeServer) -> None:
    server = make_server()
    httpx.post(f"{server.url}/v1/chat/completions", json=body("hi"), trust_env=False, timeout=60)
    assert metric(server, "kv_cache_usage_perc") == 0.25
    assert metric(server, "kv_blocks", state="cached") == 15
    assert metric(server, "prefix_cache_hits_total") == 14
    assert metric(server, "time_to_first_token_seconds_count") == 1
    assert metric(server, "inter_token_latency_seconds_count") == len(TOKENS) - 1
    assert metric(server, "request_queue_time_seconds_sum") == 0.001
    assert metric(server, "request_generation_tokens_sum") == len(TOKENS)
    assert metric(server, "request_success_total", finished_reason="stop") == 1
    assert metric(server, "requests_total") == 1
    assert metric(server, "http_responses_total", path="/v1/chat/completions", status="200") == 1


def test_tokenize_and_detokenize(server: FakeServer) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        answer = http.post("/tokenize", json={"prompt": "AB", "return_token_strs": True}).json()
        assert answer == {"count": 2, "max_model_len": MAX_MODEL_LEN, "tokens": [65, 66], "token_strs": ["A", "B"]}
        answer = http.post("/tokenize", json=body("AB")).json()
        assert (answer["tokens"], answer["token_strs"]) == ([65, 66], None)
        assert http.post("/detokenize", json={"tokens": [65, 66]}).json() == {"prompt": "AB"}
        assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
        for request in ({}, {"prompt": "x", **body("y")}):
            assert http.post("/tokenize", json=request).status_code == 400
        rejected = http.post("/tokenize", json=body("/reject"))
        assert (rejected.status_code, rejected.json()["error"]["message"]) == (400, "template: no")
        assert http.post("/detokenize", json={"tokens": [VOCAB_SIZE]}).status_code == 400

"""`gapless bench serve`: its definitions, its workloads, and whole runs against the frontend."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from frontend.cli.app import GROUP
from frontend.cli.errors import CliError
from frontend.loadtest import workload
from frontend.loadtest.client import Outcome
from frontend.loadtest.report import kept, percentile, summarize, table, tpot
from frontend.loadtest.run import Measured
from tests.frontend.fake import MODEL, FakeServer


@pytest.fixture
def rng() -> random.Random:
    """Seeded anew in each run; the seed is shown when a test fails."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def run(server: FakeServer | str, *words: str) -> Result:
    url = server if isinstance(server, str) else server.url
    return CliRunner().invoke(GROUP, ["bench", "serve", "--url", url, *words])


def result_of(server: FakeServer, *words: str) -> dict[str, Any]:
    done = run(server, "--json", *words)
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("load", [["--max-concurrency", "3"], ["--request-rate", "200", "--burstiness", "0.5"], []])
def test_counts_and_fields(server: FakeServer, endpoint: str, load: list[str]) -> None:
    before = len(server.fake.submits)
    words = ["--num-prompts", "20", "--input-len", "5", "--output-len", "6", "--endpoint", endpoint, "--procs", "2"]
    result = result_of(server, *words, *load, "--goodput", "ttft:60000", "--goodput", "e2el:60000")
    assert len(server.fake.submits) - before == 21  # one of them to see that it works
    assert (result["completed"], result["failed"], result["errors"]) == (20, 0, [])
    assert result["total_output_tokens"] == 20 * 6
    assert result["total_input_tokens"] > 20
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["request_throughput"] == pytest.approx(20 / result["duration"])
    assert result["output_throughput"] == pytest.approx(120 / result["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        for head in ("mean", "median", "std", "p99"):
            assert result[f"{head}_{name}_ms"] >= 0
    assert result["mean_ttft_ms"] <= result["mean_e2el_ms"]
    assert result["endpoint"] == endpoint
    submit = server.fake.last()
    assert (submit.sampling.max_tokens, submit.sampling.ignore_eos, submit.sampling.temperature) == (6, True, 0.0)


def test_a_table_and_a_file(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ["--num-prompts", "5", "--dataset", "sharegpt", "--percentiles", "50,90", "--output", str(path)]
    done = run(server, *words)
    assert done.exit_code == 0, done.output
    assert re.search(r"^Successful requests +5$", done.output, re.MULTILINE)
    assert re.search(r"^ms +mean +median +p50 +p90$", done.output, re.MULTILINE)
    assert all(name in done.output for name in ("TTFT", "TPOT", "ITL", "E2EL"))
    assert json.loads(path.read_text())["completed"] == 5


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(server: FakeServer, tmp_path: Path) -> None:
    before = len(server.fake.submits)
    for path, why in ((tmp_path / "no" / "x.json", "No such file"), (tmp_path / "file" / "x.json", "No such file")):
        (tmp_path / "file").touch()
        done = run(server, "--num-prompts", "2", "--output", str(path))
        assert isinstance(done.exception, CliError)
        assert str(path) in str(done.exception)
        assert why in str(done.exception)
    assert len(server.fake.submits) == before


def test_a_file_that_can_no_longer_be_written_loses_no_figures(server: FakeServer) -> None:
    done = run(server, "--num-prompts", "2", "--output", "/dev/full")
    assert isinstance(done.exception, CliError)
    assert "cannot write /dev/full: No space left" in str(done.exception)
    assert "Successful requests" in done.output


def test_the_name_of_the_model_is_told(server: FakeServer) -> None:
    assert result_of(server, "--num-prompts", "1")["model"] == MODEL
    assert result_of(server, "--num-prompts", "1", "--model", "alias")["model"] == "alias"
    assert result_of(server, "--num-prompts", "1", "--endpoint", "chat")["model"] == MODEL


def test_a_goodput_that_nobody_reaches(server: FakeServer) -> None:
    assert result_of(server, "--num-prompts", "3", "--goodput", "e2el:0.0001")["request_goodput"] == 0


def test_refusals_are_counted_and_told(server: FakeServer) -> None:
    """One in two prompts is refused: a failure is no measurement."""
    done = run(server, "--num-prompts", "3", "--temperature", "200")
    assert isinstance(done.exception, CliError)
    assert "temperature" in str(done.exception)


def test_nobody_there_and_broken_answers() -> None:
    done = run("127.0.0.1:1", "--num-prompts", "1")
    assert isinstance(done.exception, CliError)
    assert "127.0.0.1:1" in str(done.exception)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    for answer, why in (
        (b"", "closed"),
        (head + b'\r\ndata: {"choices":[{"text":"a"}]}\n\n', "middle|DONE"),
        (head + b"content-length: 7\r\n\r\ndata: {", "DONE"),
        (head + b"content-length: 11\r\n\r\ndata: nil\n\n", "no chunk"),
        (head + b'content-length: 39\r\n\r\ndata: {"error":1}\n\ndata: [DONE]\n\n      ', "broke off"),
        (b"nonsense\r\n\r\n", "Http"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=answer_once, args=(listener, answer))
            thread.start()
            done = run(f"127.0.0.1:{listener.getsockname()[1]}", "--num-prompts", "1")
            thread.join()
        assert isinstance(done.exception, CliError), answer
        assert re.search(why, str(done.exception)), (answer, str(done.exception))


def answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(answer)


@pytest.mark.parametrize(
    "words",
    [["--goodput", "ttft"], ["--goodput", "speed:3"], ["--goodput", "ttft:-1"], ["--percentiles", "50,x"],
     *(["--dataset", "sharegpt", *length] for length in
       (["--input-len", "1024"], ["--output-len", "8"], ["--range-ratio", "0"])),
     ["--percentiles", "100"], ["--url", "ftp://x"], ["--request-rate", "0"], ["--num-prompts", "0"]],
)  # fmt: skip
def test_wrong_use_is_told(words: list[str]) -> None:
    done = run("127.0.0.1:1", *words)
    assert done.exit_code == 2
    assert "Error" in done.output


def test_definitions() -> None:
    outcome = Outcome(ttft=0.5, latency=2.5, itl=[0.5, 1.5], prompt_tokens=3, output_tokens=5)
    assert tpot(outcome) == pytest.approx(0.5)
    assert tpot(Outcome(ttft=0.5, latency=0.5, output_tokens=1)) is None
    assert kept(outcome, {"ttft": 500.0, "tpot": 500.0, "e2el": 2500.0})
    assert not kept(outcome, {"ttft": 499.0})
    failed = Outcome(error="refused")
    result = summarize(Measured([outcome, failed], 10.0, 0.5), [99.0], {"e2el": 3000.0})
    assert (result["completed"], result["failed"], result["errors"]) == (1, 1, ["refused"])
    assert (result["request_goodput"], result["output_throughput"], result["mean_itl_ms"]) == (0.1, 0.5, 1000.0)
    assert "error: refused" in table(result, [99.0])
    nothing = summarize(Measured([failed], 1.0, 0.0), [99.0], {})
    assert (nothing["mean_ttft_ms"], nothing["request_goodput"]) == (None, None)
    assert " - " in table(nothing, [99.0]) + " "


def test_percentiles_are_numpys(rng: random.Random) -> None:
    for size in (1, 2, 3, 100):
        values = sorted(rng.random() for _ in range(size))
        for p in (1, 50, 90, 99, 99.9):
            assert percentile(values, p) == pytest.approx(np.percentile(values, p))


def test_lengths(rng: random.Random) -> None:
    lengths = workload.random_lengths(rng, 2000, 100, 0.25)
    assert (min(lengths), max(lengths)) == (75, 125)
    assert workload.random_lengths(rng, 3, 7, 0.0) == [7, 7, 7]
    pairs = workload.sharegpt_like_pairs(rng, 4000)
    inputs, outputs = [len(text.split()) for text, _ in pairs], [wanted for _, wanted in pairs]
    for lengths, mean in ((inputs, 200), (outputs, 185)):
        assert all(4 <= length <= 1024 for length in lengths)
        assert 0.8 * mean < np.mean(lengths) < 1.25 * mean


def test_arrivals(rng: random.Random) -> None:
    for burstiness in (0.5, 1.0, 100.0):
        times = list(islice(workload.arrivals(rng, 10.0, burstiness), 8000))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert times[0] == 0
        assert np.mean(gaps) == pytest.approx(0.1, rel=0.1)
        assert np.var(gaps) == pytest.approx(0.01 / burstiness, rel=0.3)
    assert list(islice(workload.arrivals(rng, float("inf"), 1.0), 3)) == [0, 0, 0]


def test_the_same_seed_is_the_same_load() -> None:
    loads = [workload.random_pairs(random.Random(3), 5, 20, 30, 0.5) for _ in range(2)]
    assert loads[0] == loads[1]
    assert loads[0] != workload.random_pairs(random.Random(4), 5, 20, 30, 0.5)


def test_sharegpts_file(rng: random.Random, tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    talk = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "x" * 40}]
    path.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}, {"conversations": []}]))
    assert workload.sharegpt_pairs(rng, 3, path) == [("Hello", 10)] * 3
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"sharegpt\.json holds no conversation"):
        workload.sharegpt_pairs(rng, 1, path)
    wrong = (
        "{",
        '[{"a": 1}]',
        "7",
        '{"conversations": []}',
        '["x"]',
        '[{"conversations": [{"value": 5}]}]',
        '["\udcff"]',
    )
    for text in wrong:
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"sharegpt\.json must be .*\"conversations\": .*: \w") as caught:
            workload.sharegpt_pairs(rng, 1, path)
        assert "Error" not in str(caught.value)

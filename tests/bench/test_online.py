"""What `bench.online` makes of recordings and clients. The server itself is in `tests/pipeline`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from bench.loads import Load, Row, run_load
from bench.recorded import EngineWatch, all_steps, in_common, read_records, rings, steady_steps, who_idled
from bench.report import Report, TooLate
from bench.served import engine_config, make_model, serve_arguments
from bench.streams import Stream, incomplete
from ipc.recorder.events import FINISHED, GPU, LAUNCH, RECEIVED
from ipc.recorder.reader import NotARing, read_ring
from ipc.recorder.ring import RingRecorder

MS = 1_000_000


def record_steps(recorder: RingRecorder, begin: int, rows: list[int], tokens: list[int], first_id: int = 1) -> int:
    """Steps of 0.9 ms, one each ms. When the last one ends."""
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        at = begin + index * MS
        recorder.span(LAUNCH, at - MS // 2, at - MS // 4, first_id + index)
        recorder.span(GPU, at, at + 9 * MS // 10, first_id + index, token, row)
    return begin + (len(rows) - 1) * MS + 9 * MS // 10


@pytest.fixture
def recorder(tmp_path: Path) -> RingRecorder:
    return RingRecorder(tmp_path, "engine_core", 64)


def test_records_are_those_of_the_reader(recorder: RingRecorder) -> None:
    record_steps(recorder, 10 * MS, [4] * 50, [4] * 50)  # 100 records: the ring has gone round
    found, expected = read_records(recorder.path), read_ring(recorder.path).records
    assert len(found) == len(expected) == 64
    assert found["number"].tolist() == [record.number for record in expected]
    assert found["begin"].tolist() == [record.begin for record in expected]
    recorder.path.write_bytes(b"no ring")
    with pytest.raises(NotARing):
        read_records(recorder.path)


def test_a_watch_keeps_what_the_ring_has_forgotten(recorder: RingRecorder) -> None:
    record_steps(recorder, 10 * MS, [1] * 5, [1] * 5)
    with EngineWatch(rings(recorder.path.parent)["engine_core"]) as watch:
        for turn in range(10):
            record_steps(recorder, (100 + turn * 20) * MS, [2] * 16, [2] * 16)
            wanted = 32 * (turn + 1)
            end = time.monotonic() + 10
            while len(watch.records) < wanted:
                assert time.monotonic() < end
                time.sleep(0.001)
    assert watch.lost == 0
    assert watch.records["number"].tolist() == list(range(11, 11 + 320))


def test_what_came_too_fast_for_a_watch_is_counted(recorder: RingRecorder) -> None:
    watch = EngineWatch(recorder.path)
    watch._interval = 60.0
    with watch:
        record_steps(recorder, 10 * MS, [2] * 50, [2] * 50)
    assert (len(watch.records), watch.lost) == (64, 36)


def test_steady_steps_are_decodes_of_all_rows_that_follow_on_one_another(recorder: RingRecorder) -> None:
    rows, tokens = [2, 4, 4, 4, 3, 4, 4], [30, 20, 4, 4, 3, 4, 4]
    end = record_steps(recorder, 10 * MS, rows, tokens)
    steps = steady_steps(read_records(recorder.path), 4)
    assert steps.kv.tolist() == [58, 69]  # all tokens computed until then
    assert steps.end.tolist() == [end - 3 * MS, end]
    assert (steps.p50_ms, steps.mean_ms) == (1.0, 1.0)
    assert steps.idle == pytest.approx(0.1)
    assert len(steps.between(end - MS, end)) == 1
    everything, _, counts = all_steps(read_records(recorder.path), 11 * MS)
    assert (len(everything), counts.tolist()) == (5, rows[1:])


def test_runs_are_compared_over_the_tokens_that_both_went_through(tmp_path: Path) -> None:
    runs = []
    for name, prompt in (("a", 100), ("b", 108)):
        recorder = RingRecorder(tmp_path, name, 64)
        record_steps(recorder, 10 * MS, [4] * 20, [prompt] + [4] * 19)
        runs.append(steady_steps(read_records(recorder.path), 4))
    low, high = in_common(runs)
    assert (low, high) == (116, 176)
    assert [steps.with_kv(low, high).kv.tolist() for steps in runs] == [list(range(116, 177, 4))] * 2
    nothing = runs[0].where(np.zeros(len(runs[0]), bool))
    assert len(nothing.with_kv(*in_common([nothing]))) == 0


def test_idle_time_has_its_causes(recorder: RingRecorder) -> None:
    recorder.span(RECEIVED, 9 * MS, 9 * MS, 77, 10)
    end = record_steps(recorder, 10 * MS, [1] * 10, [1] * 10)
    recorder.span(FINISHED, end, end, 77, 0, 10)
    records = read_records(recorder.path)
    found = who_idled(recorder.path.parent, records, 0, end)
    assert found["idle"] == pytest.approx(0.9 / 9.9, abs=1e-4)
    assert sum(found["causes"].values()) == pytest.approx(found["idle"], abs=1e-4)
    assert found["causes"].keys() <= {"engine", "launch"}
    assert who_idled(recorder.path.parent, records, end + 1000 * MS, end + 2000 * MS) == {}


def test_a_part_that_fails_costs_itself_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path / "out.jsonl", 100.0, {"commit": "abc"})
    assert report.attempt("good", 10, lambda: 5) == 5
    report.emit("unknown", value=float("nan"))
    assert report.attempt("bad", 10, lambda: 1 / 0) is None
    assert Report(None, 1.0, {}).attempt("late", 10, lambda: 5) is None
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["took", "unknown", "failed", "took"]
    assert lines[1]["value"] is None
    assert (lines[2]["error"], lines[2]["commit"]) == ("ZeroDivisionError: division by zero", "abc")
    assert '"left out","part":"late"' in capsys.readouterr().out


def test_a_part_that_takes_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.report.LEAST_S", 0.0)
    begin = time.monotonic()
    assert Report(tmp_path / "out", 100.0, {}).attempt("slow", 0.05, lambda: time.sleep(30)) is None
    assert time.monotonic() - begin < 10
    assert "TooLate" in (tmp_path / "out").read_text()
    assert not issubclass(TooLate, OSError)


CLIENT = """
import json, sys
assert sys.argv[1:] == ["8000", "m", "64", "3", "256", "61", "4"], sys.argv
print("something")
print("RES " + json.dumps(dict(requests=192, tokens_s=70000.0, events_s=9.0, ttft_ms_p50=20.0, ttft_ms_p99=30.0,
                               gap_ms_p50=1.0, gap_ms_p99=2.0, failed=0)))
"""


def test_a_client_of_somebody_else(tmp_path: Path) -> None:
    program = tmp_path / "client.py"
    program.write_text(CLIENT)
    row = Row(64, 61, 256, tokens_s=60_000, ttft_p50_ms=25)
    result = run_load(Load(8000, "m", program, 4), row, 3)
    assert (result.tokens_s, result.ttft_p99_ms, result.requests) == (70_000.0, 30.0, 192)
    assert row.met(result) == {"failed": True, "tokens_s": True, "ttft_p50_ms": True}
    slower = row._replace(tokens_s=80_000)
    assert slower.verdict(result) == "[tokens_s 80,000 MISSED, ttft_p50_ms 25 met]"
    with pytest.raises(RuntimeError, match=r"the client ended with status 1(.|\n)*AssertionError"):
        run_load(Load(8000, "m", program, 4), row, 4)


def test_the_engine_alone_has_the_servers_settings(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(FileNotFoundError, match="--make-tokenizer"):
        make_model("smollm2-135m", tmp_path / "tokenizer", tmp_path)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    model = make_model("smollm2-135m", tmp_path / "tokenizer", tmp_path)
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "tokenizer.json"]
    config = engine_config(serve_arguments(model, "cpu", ["--max-num-seqs", "7", "--host", "0.0.0.0"]))
    assert (config.model, config.load_format, config.device) == (str(model), "dummy", "cpu")
    assert (config.max_num_seqs, config.max_model_len) == (7, 8192)


def test_a_stream_is_complete_with_all_its_tokens_and_its_end() -> None:
    streams = [Stream(tokens=9, done=True), Stream(tokens=8, done=True), Stream(tokens=9)]
    assert incomplete(streams, 9) == 2

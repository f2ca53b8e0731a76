from __future__ import annotations

import gc
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ipc.recorder.events import COMMIT, GC, KINDS, LAUNCH, SCHEDULE, WRITE, name_words
from ipc.recorder.reader import NotARing, parse_ring, read_ring, read_rings, used_bytes
from ipc.recorder.ring import FEW_RECORDS, HEADER_BYTES, RECORD, RECORDS, Recorder, RingRecorder, num_records

ROOT = Path(__file__).parents[3]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    recorder = RingRecorder(tmp_path, "engine_core", 64)
    before = time.monotonic_ns()
    began = recorder.begin(SCHEDULE)
    recorder.end(SCHEDULE, began, 7, 2048, 3, 2)
    recorder.span(WRITE, 1000, 61_000_001_000, (1 << 63) - 1, -(2**31), 2**31 - 1)
    recorder.mark(COMMIT, 9, 1, 2, 3)
    after = time.monotonic_ns()
    found = read_ring(recorder.path)
    assert (found.name, found.pid, found.lost, found.torn) == ("engine_core", os.getpid(), 0, 0)
    span, long, mark = found.records
    assert (span.code, span.begin, span.id, span.a, span.b, span.c) == (SCHEDULE, began, 7, 2048, 3, 2)
    assert before <= span.begin <= span.end <= mark.begin <= after
    assert (long.begin, long.duration, long.id) == (1000, 61_000_000_000, (1 << 63) - 1)
    assert (long.a, long.b, long.c) == (-(2**31), 2**31 - 1, 0)
    assert (mark.duration, mark.a, mark.b, mark.c) == (0, 1, 2, 3)
    assert abs(found.monotonic_ns - before) < 60e9
    assert abs(found.realtime_ns - time.time_ns()) < 60e9


def test_the_file_is_for_this_user_alone_and_made_once(tmp_path: Path) -> None:
    recorder = RingRecorder(tmp_path, "frontend", 64)
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        RingRecorder(tmp_path, "frontend", 64)
    with pytest.raises(ValueError, match="power of two"):
        RingRecorder(tmp_path, "other", 100)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 1000])
def test_the_newest_records_stay_when_it_wraps(tmp_path: Path, count: int) -> None:
    recorder = RingRecorder(tmp_path, "engine_core", 64)
    for index in range(count):
        recorder.mark(COMMIT, index)
    found = read_ring(recorder.path)
    kept = min(count, 64)
    assert [record.id for record in found.records] == list(range(count - kept, count))
    assert [record.number for record in found.records] == list(range(count - kept + 1, count + 1))
    assert found.lost == count - kept


def test_a_torn_record_is_left_out_wherever_it_is_cut(tmp_path: Path) -> None:
    """A writer that was killed inside a record, byte by byte: old and new bytes never mix in what is read."""
    recorder = RingRecorder(tmp_path, "engine_core", 8)
    for index in range(8):
        recorder.mark(COMMIT, index, 1, 1, 1)
    old = recorder.path.read_bytes()
    for index in range(8, 16):
        recorder.mark(LAUNCH, index, 2, 2, 2)
    new = recorder.path.read_bytes()
    begin = HEADER_BYTES + 3 * RECORD.size
    for cut in range(RECORD.size + 1):
        mixed = old[:begin] + new[begin : begin + cut] + old[begin + cut :]
        found = parse_ring(mixed, mixed, mixed)
        values = {(record.code, record.a, record.b, record.c) for record in found.records}
        assert values <= {(COMMIT, 1, 1, 1), (LAUNCH, 2, 2, 2)}
        assert len(found.records) + found.torn == 8
        assert found.torn == (0 if cut == 0 or cut > 44 else 1)  # of the last number, only the lowest byte differs


def test_a_record_replaced_during_the_read_is_left_out(tmp_path: Path) -> None:
    """The writer may overtake the reader between any two bytes: of old, new and half new, only whole ones count."""
    recorder = RingRecorder(tmp_path, "engine_core", 8)
    for index in range(8):
        recorder.mark(COMMIT, index, 1, 1, 1)
    old = recorder.path.read_bytes()
    recorder.mark(LAUNCH, 8, 2, 2, 2)
    new = recorder.path.read_bytes()
    begin = HEADER_BYTES + RECORD.size * (9 % 8)
    states = [old, *(old[:begin] + new[begin : begin + cut] + old[begin + cut :] for cut in range(1, 48)), new]
    for first in range(len(states)):
        for last in range(first, len(states)):
            middle = states[(first + last) // 2]
            # Front and back of one reading from different moments: what a slow copy makes of it.
            mixed = states[last][: begin + 24] + middle[begin + 24 :]
            found = parse_ring(states[first], mixed, states[last])
            here = [record for record in found.records if record.number in (1, 9)]
            assert {(record.code, record.id, record.a, record.b, record.c) for record in here} <= {
                (COMMIT, 0, 1, 1, 1),
                (LAUNCH, 8, 2, 2, 2),
            }
            assert len(found.records) + found.torn == 8


def test_nothing_in_a_file_can_hurt_its_reader(tmp_path: Path) -> None:
    recorder = RingRecorder(tmp_path, "engine_core", 16)
    for index in range(20):
        recorder.mark(COMMIT, index)
    good = recorder.path.read_bytes()
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for _ in range(300):
        data = bytearray(good[: draw.choice([len(good), draw.randrange(len(good))])])
        for _ in range(draw.randrange(40)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            found = parse_ring(*[bytes(data)] * 3)
        except NotARing:
            continue
        assert all(record.code in KINDS for record in found.records), seed
    (tmp_path / "junk.ring").write_bytes(b"x" * 50)
    assert [ring.name for ring in read_rings(tmp_path)] == ["engine_core"]


def test_a_file_without_its_empty_end_reads_the_same(tmp_path: Path) -> None:
    recorder = RingRecorder(tmp_path, "engine_core", 1024)
    for index in range(10):
        recorder.mark(COMMIT, index)
    data = recorder.path.read_bytes()
    short = data[: used_bytes(data)]
    assert len(short) == HEADER_BYTES + 11 * RECORD.size
    assert parse_ring(*[short] * 3).records == parse_ring(*[data] * 3).records


WRITER = """
import itertools, pathlib, sys
from ipc.recorder.ring import RingRecorder
recorder = RingRecorder(pathlib.Path(sys.argv[1]), "engine_core", 256)
print("writing", flush=True)
for n in itertools.count(1):
    recorder.mark(25, n, n & 0xFFFF, n & 0xFFFF, n & 0xFFFF)
"""


def _writer(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _consistent(records: list[Any]) -> None:
    assert all(record.id == record.number for record in records)
    assert all(record.a == record.b == record.c == record.id & 0xFFFF for record in records)
    assert [record.number for record in records] == sorted({record.number for record in records})


def test_a_reader_beside_a_writer_sees_whole_records_only(tmp_path: Path) -> None:
    process = _writer(tmp_path)
    try:
        end, seen = time.monotonic() + 2.0, 0
        while time.monotonic() < end:
            (found,) = read_rings(tmp_path)
            _consistent(found.records)
            seen += len(found.records)
        assert seen > 0
    finally:
        process.kill()
        process.communicate()


def test_records_outlive_a_writer_that_is_killed(tmp_path: Path) -> None:
    for _ in range(5):
        process = _writer(tmp_path)
        (path,) = tmp_path.glob(f"*-{process.pid}.ring")
        end = time.monotonic() + 60
        while not read_ring(path).lost:  # it has not gone round yet
            assert time.monotonic() < end
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = read_ring(path)
        assert len(found.records) >= 255
        assert found.torn <= 1
        _consistent(found.records)


def test_a_long_collection_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: list[Callable[..., None]] = []
    monkeypatch.setattr(gc, "callbacks", callbacks)
    recorder = RingRecorder(tmp_path, "frontend", 16)
    recorder.watch_gc()
    times = iter([0, 5_000, 10_000, 90_000])
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(times))
    for phase in ("start", "stop", "start", "stop"):
        callbacks[0](phase, {"generation": 2, "collected": 40, "uncollectable": 0})
    (record,) = read_ring(recorder.path).records
    assert (record.code, record.begin, record.duration, record.a, record.b) == (GC, 10_000, 80_000, 2, 40)


def test_a_recorder_that_keeps_nothing_takes_everything(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    recorder.end(SCHEDULE, recorder.begin(SCHEDULE), 1, 2, 3, 4)
    recorder.span(LAUNCH, 1, 2)
    recorder.mark(COMMIT)
    recorder.watch_gc()
    assert not recorder.keeps


def test_a_span_of_days_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with nothing to do for a long weekend."""
    recorder = RingRecorder(tmp_path, "idle", 8)
    now = time.monotonic_ns() + 2**51
    monkeypatch.setattr("ipc.recorder.ring.time.monotonic_ns", lambda: now)
    recorder.end(WRITE, now - 2**49)
    recorder.span(WRITE, now - 2**50, now)
    (records,) = [ring.records for ring in read_rings(tmp_path)]
    assert len(records) == 2


def test_rings_are_small_where_shared_memory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mib, expected in ((64, FEW_RECORDS), (24 * 1024, RECORDS)):
        monkeypatch.setattr("os.statvfs", lambda _, mib=mib: SimpleNamespace(f_bavail=mib * 256, f_frsize=4096))
        assert num_records(tmp_path) == expected


def test_names_of_clients_fit_into_two_numbers() -> None:
    assert name_words("chatcmpl-ffffffffffffffff0000000000000000") == (2**31 - 1, 2**31 - 1)
    assert name_words("cmpl-00000000000000000000000000000000") == (-(2**31), -(2**31))
    assert name_words("") == (-(2**31), -(2**31))
    assert len({kind.name for kind in KINDS.values()}) == len(KINDS)

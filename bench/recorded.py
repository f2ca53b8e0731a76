"""Step times out of the flight recorders of a server that runs, and of an engine that has run.

A ring of 131,072 records holds some six seconds of an engine that makes a step in 0.3 ms, so `EngineWatch` reads the
engine's while it works. Everything here is numpy: a load of 100,000 tokens/s leaves a million records.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frontend.trace.summary import Stat, summarize
from frontend.trace.timeline import STAGES, build
from ipc.recorder import events
from ipc.recorder.reader import NotARing, Record, Recording
from ipc.recorder.ring import CODE_BITS, HEADER, HEADER_BYTES, MAGIC, RECORD, SUFFIX, VERSION

RECORDS = np.dtype(
    [("number", "<u8"), ("word", "<u8"), ("begin", "<i8"), ("id", "<i8"), ("a", "<i4"), ("b", "<i4"), ("c", "<i4"),
     ("check", "<u4")]
)  # fmt: skip
Records = NDArray[Any]  # of `RECORDS`
Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
# One or a few of each per request: kept from before a window too, since they say when there was work at all.
OF_REQUESTS = (events.PARSE, events.NAMED, events.ENCODE, events.RECEIVED, events.FIRST_TOKEN, events.FINISHED)
ENGINE = "engine_core"
FOLLOWING_NS = 50_000_000
MOST_RECORDS_PER_S = 35_000  # seven a step, 5,000 steps a second


def read_records(path: Path) -> Records:
    """The whole records of a ring, in the order of their numbers; see `ipc.recorder.reader.parse_ring` for what is
    whole. Raises `NotARing` and OSError."""
    before, data, after = (path.read_bytes() for _ in range(3))
    if len(data) < HEADER_BYTES or HEADER.unpack_from(data)[:3] != (MAGIC, VERSION, RECORD.size):
        raise NotARing(str(path))
    old, now, new = (np.frombuffer(reading, RECORDS, offset=HEADER_BYTES) for reading in (before, data, after))
    whole = (now["number"] > 0) & (now["number"] & 0xFFFF_FFFF == old["check"]) & (now["number"] == new["number"])
    found: Records = now[whole]
    return found[np.argsort(found["number"], kind="stable")]


def codes(records: Records) -> Ints:
    return (records["word"] & ((1 << CODE_BITS) - 1)).astype(np.int64)


def durations(records: Records) -> Ints:
    """Nanoseconds."""
    return (records["word"] >> CODE_BITS).astype(np.int64)


def name_and_pid(path: Path) -> tuple[str, int]:
    name, _, pid = path.stem.rpartition("-")
    return name, int(pid)


def rings(folder: Path) -> dict[str, Path]:
    """By the name of the process."""
    return {name_and_pid(path)[0]: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


class EngineWatch:
    """Collects what an engine records while this is open: `with EngineWatch(ring) as watch: ...; watch.records`."""

    def __init__(self, ring: Path) -> None:
        self._ring = ring
        self._pieces: list[Records] = []
        self._last = 0
        self.lost = 0  # records that were gone before they were read
        size = ring.stat().st_size // RECORD.size
        self._interval = min(1.0, size / (2 * MOST_RECORDS_PER_S))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def records(self) -> Records:
        return np.concatenate(self._pieces) if self._pieces else np.empty(0, RECORDS)

    def __enter__(self) -> EngineWatch:
        present = read_records(self._ring)
        self._last = int(present["number"][-1]) if len(present) else 0
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._take()

    def _take(self) -> None:
        found = read_records(self._ring)
        found = found[found["number"] > self._last]
        if len(found):
            self.lost += int(found["number"][0]) - self._last - 1
            self._last = int(found["number"][-1])
            self._pieces.append(found.copy())


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps on the device, one after the other. `kv` are the tokens that all requests have in the KV cache when the
    step ends, if none has ended since the first of the steps: what a step's time depends on, for a given number of
    rows. Times are CLOCK_MONOTONIC ns; `period` is from the end of the step before to the end of this one."""

    kv: Ints
    end: Ints
    period: Ints
    duration: Ints

    def __len__(self) -> int:
        return len(self.end)

    def where(self, mask: Mask) -> Steps:
        return Steps(self.kv[mask], self.end[mask], self.period[mask], self.duration[mask])

    def between(self, first_ns: int, last_ns: int) -> Steps:
        """Those that lie within, from the end of the step before on."""
        return self.where((self.end - self.period >= first_ns) & (self.end <= last_ns))

    def with_kv(self, low: int, high: int) -> Steps:
        return self.where((self.kv >= low) & (self.kv <= high))

    @property
    def p50_ms(self) -> float:
        return float(np.median(self.period)) / 1e6 if len(self) else float("nan")

    @property
    def mean_ms(self) -> float:
        return float(np.mean(self.period)) / 1e6 if len(self) else float("nan")

    @property
    def idle(self) -> float:
        """1 - device time / wall."""
        return 1 - float(self.duration.sum() / self.period.sum()) if len(self) else float("nan")


def all_steps(records: Records, since_ns: int = 0) -> tuple[Steps, Ints, Ints]:
    """Every step that began at or after `since_ns` but the first of them, with its tokens and rows."""
    gpu = records[(codes(records) == events.GPU) & (records["id"] > 0) & (records["begin"] >= since_ns)]
    duration = durations(gpu)
    end = gpu["begin"] + duration
    tokens, rows = gpu["a"].astype(np.int64), gpu["b"].astype(np.int64)
    found = Steps(np.cumsum(tokens)[1:], end[1:], np.diff(end), duration[1:])
    return found, tokens, rows


def steady_steps(records: Records, rows: int, since_ns: int = 0) -> Steps:
    """Steps of exactly `rows` decodes that follow on another such step."""
    found, tokens, counts = all_steps(records, since_ns)
    steady = (tokens == rows) & (counts == rows)
    return found.where(steady[1:] & steady[:-1])


def in_common(many: Sequence[Steps]) -> tuple[int, int]:
    """The tokens in the KV cache, from and to, that all of these went through."""
    filled = [steps for steps in many if len(steps)]
    if not filled:
        return 0, -1
    return max(int(steps.kv.min()) for steps in filled), min(int(steps.kv.max()) for steps in filled)


def recording(name: str, pid: int, records: Records, first_ns: int, last_ns: int) -> Recording:
    """What a process did between these moments, and what it noted of requests before."""
    code, end = codes(records), records["begin"] + durations(records)
    inside = (end >= first_ns) & (records["begin"] <= last_ns)
    found = records[inside | (np.isin(code, OF_REQUESTS) & (end < first_ns))]
    fields = (
        found["number"],
        codes(found),
        found["begin"],
        durations(found),
        *(found[name] for name in ("id", *"abc")),
    )
    wanted = [Record(*values) for values in zip(*(field.tolist() for field in fields), strict=True)]
    return Recording(name, pid, wanted, 0, 0, 0, 0)


def who_idled(folder: Path, engine: Records, first_ns: int, last_ns: int) -> dict[str, Any]:
    """The device's idle time between these moments by cause, and where requests spent theirs, as `gapless trace` tells:
    shares of the time in which there were requests, and milliseconds. `engine`: what its ring may have forgotten."""
    found = {path: engine if name == ENGINE else read_records(path) for name, path in rings(folder).items()}
    # What follows on the last step belongs to it.
    until = last_ns + FOLLOWING_NS
    timeline = build([recording(*name_and_pid(path), records, first_ns, until) for path, records in found.items()])
    summary = summarize(timeline)
    if not summary.engines or not summary.engines[0].steps:
        return {}
    device = summary.engines[0]
    stages = [request.stages() for request in summary.requests if request.begin >= first_ns]
    times = {name: Stat.of(name, [stage[name] for stage in stages]) for name in STAGES} if stages else {}
    return {
        "idle": round(device.share(device.idle_total), 5),
        "causes": {cause: round(device.share(time), 5) for cause, time in device.idle.items()},
        "no_requests": round(device.no_requests / max(1, device.span), 5),
        "looked_at_s": round(device.span / 1e9, 3),
        "engine_us_p50": {stat.name: round(stat.p50, 1) for stat in device.stats},
        "engine_us_p99": {stat.name: round(stat.p99, 1) for stat in device.stats},
        "requests_seen": len(stages),
        "stages_ms_p50": {name: round(stat.p50 / 1e3, 3) for name, stat in times.items()},
        "stages_ms_p99": {name: round(stat.p99 / 1e3, 3) for name, stat in times.items()},
    }

"""Rates, shares and percentiles out of snapshots. Knows nothing of terminals."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from frontend.top.source import RequestRows, Snapshot

WINDOW_S = 10.0  # of percentiles
HISTORY = 240  # points of a sparkline


@dataclass(frozen=True, slots=True)
class Process:
    name: str
    cpu: float  # cores
    resident: float  # bytes


@dataclass(frozen=True, slots=True)
class Figures:
    """None: the server does not tell it, or nothing has happened to tell it by. Times in seconds, shares 0 to 1."""

    model: str
    window: float  # seconds that percentiles and prefix hits are of
    tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    running: float | None
    waiting: float | None
    in_flight: float | None
    kv_usage: float | None
    prefix_hits: float | None  # of the prompt tokens of the window
    ttft: tuple[float, float] | None  # p50, p99
    itl: tuple[float, float] | None
    e2e: tuple[float, float] | None
    step: tuple[float, float] | None
    mean_step: float | None  # of the last interval
    tokens_per_step: float | None
    busy: float | None
    idle: dict[str, float]  # by cause
    bytes_per_s: float | None  # while busy
    bytes_share: float | None
    flops_per_s: float | None
    flops_share: float | None
    processes: tuple[Process, ...]
    requests: RequestRows | None

    @property
    def avoidable_idle(self) -> float | None:
        """Share of time in which the device waited although there was a request."""
        return None if self.busy is None else sum(share for cause, share in self.idle.items() if cause != "nothing")


class Watch:
    """Takes snapshots in their order; `figures` are of the latest. The histories have a point for each."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque()
        self.tokens: deque[float] = deque(maxlen=HISTORY)
        self.steps: deque[float] = deque(maxlen=HISTORY)
        self.idle: deque[float] = deque(maxlen=HISTORY)

    def add(self, snapshot: Snapshot) -> Figures:
        if self._snapshots and _restarted(self._snapshots[-1], snapshot):
            self._snapshots.clear()
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and snapshot.at - self._snapshots[1].at >= WINDOW_S:
            self._snapshots.popleft()
        before = self._snapshots[-2] if len(self._snapshots) > 1 else snapshot
        figures = _figures(self._snapshots[0], before, snapshot)
        self.tokens.append(figures.tokens_per_s or 0.0)
        self.steps.append(figures.mean_step or 0.0)
        self.idle.append(figures.avoidable_idle or 0.0)
        return figures


def _figures(oldest: Snapshot, before: Snapshot, now: Snapshot) -> Figures:
    def grown(name: str, **labels: str) -> float | None:
        old, new = before.total(name, **labels), now.total(name, **labels)
        return None if old is None or new is None else new - old

    def rate(name: str) -> float | None:
        return _ratio(grown(name), now.at - before.at)

    def peak_share(what: str) -> tuple[float | None, float | None]:
        achieved = _ratio(grown(f"device_{what}_total"), grown("device_busy_seconds_total"))
        return achieved, _ratio(achieved, now.total(f"device_limit_{what}_per_second"))

    def quantiles(name: str) -> tuple[float, float] | None:
        counts = _grown_buckets(oldest, now, name)
        return (_quantile(counts, 0.5), _quantile(counts, 0.99)) if counts else None

    busy, idle = _device_shares(before, now)
    bytes_per_s, bytes_share = peak_share("bytes")
    flops_per_s, flops_share = peak_share("flops")
    hits, queries = (_difference(oldest, now, f"prefix_cache_{what}_total") for what in ("hits", "queries"))
    steps = grown("engine_step_time_seconds_count")
    return Figures(
        model=now.model,
        window=now.at - oldest.at,
        tokens_per_s=rate("generation_tokens_total"),
        prompt_tokens_per_s=rate("prompt_tokens_total"),
        running=now.total("num_requests_running"),
        waiting=now.total("num_requests_waiting"),
        in_flight=now.total("num_requests_in_flight"),
        kv_usage=now.total("kv_cache_usage_perc"),
        prefix_hits=_ratio(hits, queries),
        ttft=quantiles("time_to_first_token_seconds"),
        itl=quantiles("inter_token_latency_seconds"),
        e2e=quantiles("e2e_request_latency_seconds"),
        step=quantiles("engine_step_time_seconds"),
        mean_step=_ratio(grown("engine_step_time_seconds_sum"), steps),
        tokens_per_step=_ratio(grown("engine_step_tokens_sum"), steps),
        busy=busy,
        idle=idle,
        bytes_per_s=bytes_per_s,
        bytes_share=bytes_share,
        flops_per_s=flops_per_s,
        flops_share=flops_share,
        processes=_processes(before, now),
        requests=now.requests,
    )


def _device_shares(before: Snapshot, now: Snapshot) -> tuple[float | None, dict[str, float]]:
    busy = _difference(before, now, "device_busy_seconds_total")
    old = before.by("device_idle_seconds_total", "cause")
    idle = {
        cause: seconds - old.get(cause, seconds)
        for cause, seconds in now.by("device_idle_seconds_total", "cause").items()
    }
    whole = (busy or 0.0) + sum(idle.values())
    if busy is None or whole <= 0:
        return None, {}
    return busy / whole, {cause: seconds / whole for cause, seconds in idle.items()}


def _processes(before: Snapshot, now: Snapshot) -> tuple[Process, ...]:
    seconds, old = (each.by("process_cpu_seconds_total", "process") for each in (now, before))
    resident = now.by("process_resident_memory_bytes", "process")
    elapsed = now.at - before.at
    return tuple(
        Process(name, (seconds.get(name, 0.0) - old.get(name, 0.0)) / elapsed if elapsed > 0 else 0.0, size)
        for name, size in resident.items()
    )


def _restarted(before: Snapshot, now: Snapshot) -> bool:
    """A total has shrunk: it is another server, or the same one started anew."""
    names = ("engine_steps_total", "generation_tokens_total", "requests_total")
    pairs = ((before.total(name), now.total(name)) for name in names)
    return any(old is not None and new is not None and new < old for old, new in pairs)


def _difference(before: Snapshot, now: Snapshot, name: str) -> float | None:
    old, new = before.total(name), now.total(name)
    return None if old is None or new is None else new - old


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None or whole <= 0 else part / whole


def _grown_buckets(before: Snapshot, now: Snapshot, name: str) -> list[tuple[float, float]]:
    """(upper bound, number at or below it) since `before`; empty if nothing was observed."""
    old, new = (each.by(f"{name}_bucket", "le") for each in (before, now))
    counts = sorted((float(bound), count - old.get(bound, 0.0)) for bound, count in new.items())
    if before is now:  # the first look: all there has been
        counts = sorted((float(bound), count) for bound, count in new.items())
    return counts if counts and counts[-1][1] > 0 else []


def _quantile(counts: list[tuple[float, float]], share: float) -> float:
    """As Prometheus' histogram_quantile: linear within a bucket, the last finite bound above it."""
    rank, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - below) / max(count - below, 1e-12)
        low, below = bound, count
    return low

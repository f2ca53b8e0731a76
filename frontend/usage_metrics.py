"""What the engine tells of its device, and what the system tells of the server's processes, as Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ipc.buckets import STEP_SECONDS, STEP_TOKENS
from ipc.messages import DeviceUsage, EngineStats

WINDOW_S = 1.0  # of the rates that are told as gauges


class UsageCollector(Collector):
    """`stats` gives the engine's latest heartbeat. `observe` is to be called with each."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._clock = model, clock
        self._latest: DeviceUsage | None = None
        self._before: tuple[float, DeviceUsage] | None = None  # about WINDOW_S older, for rates
        self._window: tuple[float, DeviceUsage] | None = None
        self.peaks: Mapping[str, float] = {}  # "bytes" and "flops" per second that the device can do

    def observe(self, stats: EngineStats) -> None:
        if stats.usage is None:
            return
        now, self._latest = self._clock(), stats.usage
        if self._window is None or now - self._window[0] >= WINDOW_S:
            self._before, self._window = self._window or (now, stats.usage), (now, stats.usage)

    def collect(self) -> Iterator[Metric]:
        usage = self._latest
        if usage is None:
            return
        yield self._histogram(
            "engine_step_time_seconds", "Time of a step", STEP_SECONDS, usage.steps_by_seconds, usage.step_seconds
        )
        yield self._histogram(
            "engine_step_tokens", "Tokens of a step", STEP_TOKENS, usage.steps_by_tokens, usage.step_tokens
        )
        yield self._counter("device_busy_seconds", "Time in which the device computed steps", usage.busy_seconds)
        idle = CounterMetricFamily(
            "gapless:device_idle_seconds",
            "Time in which the device had nothing to compute, by what the engine did meanwhile",
            labels=["model_name", "cause"],
        )
        for cause, seconds in usage.idle_seconds.items():
            idle.add_metric([self._model, cause], seconds)
        yield idle
        yield self._counter("device_bytes", "Bytes that the steps had to move at least", usage.bytes)
        yield self._counter("device_flops", "Operations that the steps had to compute at least", usage.flops)
        yield from self._rates(usage)

    def _rates(self, usage: DeviceUsage) -> Iterator[Metric]:
        """Over the last second or two, of the time in which the device was busy."""
        before = usage if self._before is None else self._before[1]
        busy = usage.busy_seconds - before.busy_seconds
        idle = sum(usage.idle_seconds.values()) - sum(before.idle_seconds.values())
        rates = {
            "bytes": (usage.bytes - before.bytes) / busy if busy > 0 else 0.0,
            "flops": (usage.flops - before.flops) / busy if busy > 0 else 0.0,
        }
        yield self._gauge(
            "device_idle_share", "Share of time in which the device was idle, 0 to 1", idle / (busy + idle or 1.0)
        )
        for what, rate in rates.items():
            yield self._gauge(f"device_{what}_per_second", f"{what} per second while the device is busy", rate)
            if peak := self.peaks.get(what):
                yield self._gauge(f"device_limit_{what}_per_second", f"{what} per second that it can do", peak)
                yield self._gauge(f"device_{what}_share", f"{what} per second as a share of the limit", rate / peak)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"gapless:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"gapless:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        family = HistogramMetricFamily(f"gapless:{name}", text, labels=["model_name"])
        names = [*map(floatToGoString, bounds), "+Inf"]
        family.add_metric([self._model], list(zip(names, map(float, accumulate(counts)), strict=True)), total)
        return family


class ProcessCollector(Collector):
    """CPU time and memory of each process. One that is gone is left out."""

    def __init__(self) -> None:
        self._processes: dict[str, psutil.Process] = {}

    def watch(self, pids: Mapping[str, int]) -> None:
        """`pids` by the names of the processes."""
        for name, pid in pids.items():
            try:
                self._processes[name] = psutil.Process(pid)
            except psutil.Error:
                continue

    def collect(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily("gapless:process_cpu_seconds", "CPU time of a process", labels=["process"])
        memory = GaugeMetricFamily("gapless:process_resident_memory_bytes", "Memory it holds", labels=["process"])
        for name, process in self._processes.items():
            try:
                with process.oneshot():
                    times, resident = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                continue
            cpu.add_metric([name], times.user + times.system)
            memory.add_metric([name], resident)
        yield cpu
        yield memory

"""Prometheus metrics of the whole server, kept in the frontend. Names follow vLLM's, with the prefix `gapless:`.

What the engine counts arrives with its heartbeat; what clients feel is measured here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from ipc.messages import Ended, EngineStats

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """One per process. Times are nanoseconds of CLOCK_MONOTONIC in, seconds out."""

    def __init__(self, model: str) -> None:
        self.stats: EngineStats | None = None
        self.registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"gapless:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return family.labels(model)

        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token", _LONG)
        itl = LeanHistogram("gapless:inter_token_latency_seconds", "Time between tokens of one answer", model, _SHORT)
        self.registry.register(itl)
        self.inter_token = itl.observe
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end of the answer", _LONG)
        self._queue = histogram("request_queue_time_seconds", "Arrival to the first step", _LONG)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens per answer", _TOKENS)
        self._output = histogram("request_generation_tokens", "Tokens per answer", _TOKENS)
        self._finished = Counter(
            "gapless:request_success", "Answers by how they ended", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        requests = Counter("gapless:requests", "Answers asked for", ["model_name"], registry=self.registry)
        self._requests = requests.labels(model)
        self._http = Counter(
            "gapless:http_responses", "HTTP responses", ["path", "status"], registry=self.registry
        )  # fmt: skip
        streams = Gauge(
            "gapless:num_requests_in_flight", "Answers not yet ended", ["model_name"], registry=self.registry
        )
        self._in_flight = streams.labels(model)
        self._engine = _EngineCollector(self)

    @property
    def model(self) -> str:
        return self._model

    def accepted(self, choices: int) -> None:
        self._requests.inc(choices)
        self._in_flight.inc(choices)

    def opened(self, queued_ns: int) -> None:
        self._queue.observe(queued_ns / 1e9)

    def first_token(self, waited_ns: int) -> None:
        self._ttft.observe(waited_ns / 1e9)

    def ended(self, ended: Ended, duration_ns: int) -> None:
        self._in_flight.dec()
        self._finished.labels(self._model, ended.reason).inc()
        if ended.reason in ("stop", "length"):
            self._e2e.observe(duration_ns / 1e9)
            self._prompt.observe(ended.usage.prompt_tokens)
            self._output.observe(ended.usage.completion_tokens)

    def cancelled(self, choices: int) -> None:
        self._in_flight.dec(choices)
        self._finished.labels(self._model, "abort").inc(choices)

    def responded(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def own(self) -> bytes:
        """What this frontend counts, in the text exposition format: the engine's figures are not in it."""
        return generate_latest(self.registry)

    def render(self, others: Iterable[bytes] = ()) -> bytes:
        """The text exposition format, with the sums over this frontend and `others`, each as its `own`."""
        others = list(others)
        own = generate_latest(_Sum([self.own(), *others])) if others else self.own()
        return own + generate_latest(self._engine)


class _Sum(Collector):
    """Sums of several expositions, sample by sample. Right for counters and histograms, and for the gauges here, which
    count what is in flight."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text.decode()):
                families.setdefault(family.name, family)
                found = sums.setdefault(family.name, {})
                for sample in family.samples:
                    key = sample.name, tuple(sample.labels.items())
                    if family.name.endswith("_created"):  # a moment: the first one
                        found[key] = min(found.get(key, sample.value), sample.value)
                    else:
                        found[key] = found.get(key, 0.0) + sample.value
        for name, family in families.items():
            family.samples = [Sample(key, dict(labels), value) for (key, labels), value in sums[name].items()]
            yield family


class LeanHistogram(Collector):
    """A histogram that is cheap enough to be told of every token."""

    def __init__(self, name: str, text: str, model: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._model = name, text, model
        self._names = [*map(floatToGoString, buckets), "+Inf"]
        self._bounds = [round(bound * 1e9) for bound in buckets]
        self._counts = [0] * len(self._names)
        self._sum = 0

    def observe(self, elapsed_ns: int, count: int) -> None:
        """`count` things took `elapsed_ns` together, the same time each."""
        self._counts[bisect_left(self._bounds, elapsed_ns / count)] += count
        self._sum += elapsed_ns

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        buckets = list(zip(self._names, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([self._model], buckets, self._sum / 1e9)
        yield family


class _EngineCollector(Collector):
    """The engine's latest heartbeat."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        if stats is None:
            return
        used = stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached
        yield self._gauge("num_requests_running", "Requests in the running batch", stats.running)
        yield self._gauge("num_requests_waiting", "Requests waiting for a place in it", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 0 to 1", used / max(1, stats.kv_blocks_total))
        yield self._gauge("engine_step_seconds", "Duration of the latest step, 0 when idle", stats.step_seconds)
        blocks = GaugeMetricFamily("gapless:kv_blocks", "KV blocks by state", labels=["model_name", "state"])
        for state, value in (("used", used), ("cached", stats.kv_blocks_cached), ("free", stats.kv_blocks_free)):
            blocks.add_metric([self._metrics.model, state], value)
        yield blocks
        yield self._counter("prompt_tokens", "Prompt tokens, cached ones included", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", stats.output_tokens)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache", stats.prefix_hits)
        yield self._counter("num_preemptions", "Requests that lost their KV and were computed again", stats.preemptions)
        yield self._counter("num_aborts", "Requests aborted in the engine", stats.aborts)
        yield self._counter("engine_steps", "Steps of the engine", stats.step)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"gapless:{name}", text, labels=["model_name"])
        family.add_metric([self._metrics.model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"gapless:{name}", text, labels=["model_name"])
        family.add_metric([self._metrics.model], value)
        return family

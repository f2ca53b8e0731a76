"""Prometheus metrics of the whole server, kept in the frontend. Names follow vLLM's, with the prefix `gapless:`; those
that vLLM has too are there under its own prefix as well.

What the engine counts arrives with its heartbeat; what clients feel is measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend.buckets import ITL, LATENCY, TOKENS, TTFT
from frontend.lean_histogram import LeanHistogram
from frontend.totals import Totals
from frontend.usage_metrics import ProcessCollector, UsageCollector
from frontend.vllm_names import with_vllm_names
from ipc.messages import Ended, EngineStats, ModelReady


class Metrics:
    """One per process. Times are nanoseconds of CLOCK_MONOTONIC in, seconds out."""

    def __init__(self, model: str) -> None:
        self.stats: EngineStats | None = None
        self.registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"gapless:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return family.labels(model)

        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token", TTFT)
        itl = LeanHistogram("gapless:inter_token_latency_seconds", "Time between tokens of one answer", model, ITL)
        self.registry.register(itl)
        self.inter_token = itl.observe
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end of the answer", LATENCY)
        self._queue = histogram("request_queue_time_seconds", "Arrival to the first step", LATENCY)
        self._prefill = histogram("request_prefill_time_seconds", "First step to first token", LATENCY)
        self._decode = histogram("request_decode_time_seconds", "First token to last", LATENCY)
        self._inference = histogram("request_inference_time_seconds", "First step to last token", LATENCY)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean time of the tokens after the first", ITL)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens per answer", TOKENS)
        self._output = histogram("request_generation_tokens", "Tokens per answer", TOKENS)
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
        self._usage, self._processes = UsageCollector(model), ProcessCollector()
        self._whole = CollectorRegistry()  # what is of the whole server, whichever frontend tells it
        for collector in (_EngineCollector(self), self._usage, self._processes):
            self._whole.register(collector)

    @property
    def model(self) -> str:
        return self._model

    def heard(self, stats: EngineStats) -> None:
        """The engine's heartbeat."""
        self.stats = stats
        self._usage.observe(stats)

    def ready(self, message: ModelReady) -> None:
        """Everything has started: what it consists of."""
        self._usage.peaks = message.facts.get("peaks", {})
        self._processes.watch(message.facts.get("pids", {}))

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

    def phases(self, prefill_ns: int, decode_ns: int, num_tokens: int) -> None:
        """Of an answer that has ended: from its first step to its first token, and on to its last."""
        self._prefill.observe(prefill_ns / 1e9)
        self._decode.observe(decode_ns / 1e9)
        self._inference.observe((prefill_ns + decode_ns) / 1e9)
        if num_tokens > 1:
            self._tpot.observe(decode_ns / 1e9 / (num_tokens - 1))

    def cancelled(self, choices: int) -> None:
        self._in_flight.dec(choices)
        self._finished.labels(self._model, "abort").inc(choices)

    def responded(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def own(self) -> bytes:
        """What this frontend counts, in the text exposition format: what is of the whole server is not in it."""
        return generate_latest(self.registry)

    def render(self, others: Iterable[bytes] = ()) -> bytes:
        """The text exposition format, with the sums over this frontend and `others`, each as its `own`."""
        others = list(others)
        own = generate_latest(Totals([self.own(), *others])) if others else self.own()
        return with_vllm_names(own + generate_latest(self._whole))


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

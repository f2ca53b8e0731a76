"""A histogram for the way of every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


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

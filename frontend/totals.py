"""The metrics of several frontends as those of one server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class Totals(Collector):
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

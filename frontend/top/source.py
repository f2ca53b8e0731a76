"""What a server says of itself now: /metrics and /requests, read over HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from frontend.cli.client import Client, ServerError
from frontend.cli.errors import CliError

OURS, THEIRS = "gapless:", "vllm:"  # names of the same figures; vLLM's are there too, and nothing else on its servers
Labels = tuple[tuple[str, str], ...]


class RequestRow(msgspec.Struct, frozen=True):
    """A request in flight, as /requests tells it."""

    id: str
    state: str
    age_seconds: float
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int


class RequestRows(msgspec.Struct, frozen=True):
    total: int
    requests: list[RequestRow]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`samples` by name without prefix, then by labels. `at` is of CLOCK_MONOTONIC, in seconds."""

    at: float
    samples: dict[str, dict[Labels, float]]
    requests: RequestRows | None = None
    model: str = ""

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that have these labels; None if there are none."""
        wanted = labels.items()
        values = [value for found, value in self.samples.get(name, {}).items() if wanted <= dict(found).items()]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values by one of their labels."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, {}).items():
            key = dict(labels).get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found


def take(client: Client) -> Snapshot:
    """Raises `CliError` if the server cannot be reached, refuses, or is none that this is for."""
    text = client.get("/metrics").decode("utf-8", "replace")
    snapshot = parse(text, time.monotonic())
    if not snapshot.samples:
        raise CliError(f"{client.url} has no metrics of Gapless; is it another server?")
    try:
        rows = msgspec.json.decode(client.get("/requests"), type=RequestRows)
    except (ServerError, msgspec.DecodeError):  # an older server, one that loads, an engine that hangs
        rows = None
    return Snapshot(snapshot.at, snapshot.samples, rows, snapshot.model)


def parse(text: str, at: float) -> Snapshot:
    """Of the text of /metrics. Lines that are none of ours are left out."""
    prefix = OURS if f"\n{OURS}" in text else THEIRS
    lines = [line for line in text.splitlines() if line.startswith((prefix, f"# TYPE {prefix}"))]
    samples: dict[str, dict[Labels, float]] = {}
    model = ""
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
                model = sample.labels.get("model_name", model)
                found = samples.setdefault(sample.name.removeprefix(prefix), {})
                key = tuple(sorted(labels.items()))
                found[key] = found.get(key, 0.0) + sample.value
    except ValueError:
        samples = {}
    return Snapshot(at, samples, model=model)

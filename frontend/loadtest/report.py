"""What clients felt, as figures. Names and definitions are those of `vllm bench serve`:

TTFT   from sending a request to its first token
TPOT   (time of the last token - TTFT) / (output tokens - 1): the first token left out
ITL    between two events of a stream, over all of them
E2EL   from sending a request to its last token
goodput   requests per second that kept every limit given
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from frontend.loadtest.client import Outcome
from frontend.loadtest.run import Measured

METRICS = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Inter-token latency",
           "e2el": "End-to-end latency"}  # fmt: skip


def tpot(outcome: Outcome) -> float | None:
    """Seconds; None for an answer of one token."""
    if outcome.output_tokens < 2:
        return None
    return (outcome.latency - outcome.ttft) / (outcome.output_tokens - 1)


def percentile(values: Sequence[float], p: float) -> float:
    """With linear interpolation, as numpy's. `values` are sorted and not empty."""
    at = (len(values) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def kept(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether every limit (milliseconds) holds."""
    felt = {"ttft": outcome.ttft, "tpot": tpot(outcome) or 0.0, "e2el": outcome.latency}
    return all(1e3 * felt[name] <= limit for name, limit in limits.items())


def summarize(measured: Measured, percentiles: Sequence[float], goodput: Mapping[str, float]) -> dict[str, Any]:
    """A flat object of figures, times in milliseconds; None where nothing was measured."""
    good = [outcome for outcome in measured.outcomes if not outcome.error]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    duration = measured.duration
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(measured.outcomes) - len(good),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(kept(outcome, goodput) for outcome in good) / duration if goodput else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
    }
    series = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [value for outcome in good if (value := tpot(outcome)) is not None],
        "itl": [value for outcome in good for value in outcome.itl],
        "e2el": [outcome.latency for outcome in good],
    }
    for name, values in series.items():
        ordered = sorted(1e3 * value for value in values)
        result[f"mean_{name}_ms"] = statistics.fmean(ordered) if ordered else None
        result[f"median_{name}_ms"] = percentile(ordered, 50) if ordered else None
        result[f"std_{name}_ms"] = statistics.pstdev(ordered) if ordered else None
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = percentile(ordered, p) if ordered else None
    result["client_cpu"] = measured.client_cpu
    errors = [outcome.error for outcome in measured.outcomes if outcome.error]
    result["errors"] = sorted(set(errors))[:10]
    return result


def table(result: Mapping[str, Any], percentiles: Sequence[float]) -> str:
    """The same for people."""
    rows = [
        ("Successful requests", f"{result['completed']}"),
        ("Failed requests", f"{result['failed']}"),
        ("Duration, s", f"{result['duration']:.2f}"),
        ("Input tokens", f"{result['total_input_tokens']}"),
        ("Output tokens", f"{result['total_output_tokens']}"),
        ("Requests/s", f"{result['request_throughput']:.2f}"),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Requests/s within the limits", f"{result['request_goodput']:.2f}"))
    rows += [
        ("Output tokens/s", f"{result['output_throughput']:.1f}"),
        ("Input and output tokens/s", f"{result['total_token_throughput']:.1f}"),
    ]
    lines = [f"{label:<30}{value:>12}" for label, value in rows]
    heads = ["mean", "median", *(f"p{p:g}" for p in percentiles)]
    lines += ["", f"{'ms':<30}" + "".join(f"{head:>12}" for head in heads)]
    for name, label in METRICS.items():
        cells = (result[f"{head}_{name}_ms"] for head in heads)
        text = "".join("           -" if cell is None else f"{cell:>12.2f}" for cell in cells)
        lines.append(f"{label + f' ({name.upper()})':<30}{text}")
    if result["client_cpu"] > 0.8:
        cpu = f"{result['client_cpu']:.0%} of a core"
        lines += ["", f"A client process used {cpu}: with more --procs the server may be faster."]
    lines += [f"error: {error}" for error in result["errors"]]
    return "\n".join(lines)

"""What `gapless serve` prints once it is ready."""

from __future__ import annotations

from typing import Any

from frontend.cli.catalog import version_text
from frontend.topology import Facts, LaunchConfig


def summary(launch: LaunchConfig, facts: Facts, seconds: float) -> str:
    """Address, a curl line, what was chosen, and where the time of the start went."""
    url = facts["frontend"].facts["url"]
    known: dict[str, Any] = {}
    for ready in facts.values():
        known |= ready.facts
    key = " -H 'Authorization: Bearer '$GAPLESS_API_KEY" if launch.server.api_key else ""
    lines = [
        f"{version_text()} serves {launch.server.served_model_name} on {url} (ready in {seconds:.1f} s)",
        "",
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
        """    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'""",
        "",
        *(f"  {label:<16} {value}" for label, value in chosen(known)),
        *(f"  {label:<16} {value}" for label, value in start_up(facts)),
        "",
        "Ctrl-C stops it.",
    ]
    return "\n".join(lines)


def chosen(known: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows for the facts that the processes reported; what they left out is left out."""
    labels = {
        "device": "device",
        "threads": "CPU threads",
        "dtype": "dtype",
        "weights": "weights",
        "attention": "attention",
        "kv_tokens": "KV cache",
        "max_model_len": "context",
    }
    units = {"kv_tokens": " tokens", "max_model_len": " tokens"}
    rows = {
        label: f"{known[key]:,}{units.get(key, '')}" if isinstance(known[key], int) else str(known[key])
        for key, label in labels.items()
        if known.get(key) is not None
    }
    if "KV cache" in rows and known.get("max_model_len"):
        longest = known["max_model_len"]
        rows["KV cache"] += f", {known['kv_tokens'] // longest:,} requests of {longest:,}"
    if "KV cache" in rows and known.get("kv_dtype"):
        rows["KV cache"] += f", in {known['kv_dtype']}"
    return list(rows.items())


def start_up(facts: Facts) -> list[tuple[str, str]]:
    """One row per process that took its time: the phases and their seconds."""
    rows = []
    for name, ready in facts.items():
        phases = ready.facts.get("load_seconds") or ready.seconds  # the engine times its own phases more finely
        slow = [f"{phase} {took:.1f} s" for phase, took in phases.items() if took >= 0.05]
        if slow:
            rows.append((name, ", ".join(slow)))
    return rows

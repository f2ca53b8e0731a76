"""The same figures under the names that vLLM gives them, so that boards and alerts made for it work unchanged."""

from __future__ import annotations

import re

# Our names without their prefix; vLLM's are the same unless given.
SAME = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_time_per_output_token_seconds"),
    *("request_prompt_tokens", "request_generation_tokens"),
)
NAMES = {**{name: name for name in SAME}, "engine_step_tokens": "iteration_tokens_total"}
_LINE = re.compile(
    rb"^(# (?:HELP|TYPE) )?gapless:(%s)(_total|_bucket|_sum|_count|_created)?([ {].*)$"
    % "|".join(sorted(NAMES, key=len, reverse=True)).encode(),
    re.MULTILINE,
)


def with_vllm_names(text: bytes) -> bytes:
    """An exposition in Prometheus' text format, with those of its lines that vLLM has too said again in its words."""
    return text + b"".join(_again(match) for match in _LINE.finditer(text))


def _again(match: re.Match[bytes]) -> bytes:
    comment, name, suffix, rest = match.groups()
    line = b"vllm:" + NAMES[name.decode()].encode() + (suffix or b"")
    if comment:
        return comment + line + rest + b"\n"
    return line + rest.replace(b"{", b'{engine="0",', 1) + b"\n"

"""/metrics: vLLM's names beside ours, what the engine tells of its device, processes, and the board that shows them."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from frontend import buckets, request_watch
from frontend.usage_metrics import ProcessCollector, UsageCollector
from frontend.vllm_names import NAMES, with_vllm_names
from ipc.buckets import STEP_TOKENS
from tests.frontend.fake import TOKENS, USAGE, FakeServer, stats
from tests.frontend.test_life import MakeServer, body

BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "gapless.json"
# As vLLM's own have them (vllm/v1/metrics/buckets.py).
VLLM_LATENCY = {
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
}
VLLM_TTFT = {
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
}
VLLM_ITL = {
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
}

Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(server: FakeServer) -> Samples:
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=60).text
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.fixture
def samples(make_server: MakeServer) -> Samples:
    server = make_server()
    httpx.post(f"{server.url}/v1/chat/completions", json=body("hi"), trust_env=False, timeout=60)
    return scrape(server)


def one(samples: Samples, name: str, **labels: str) -> float:
    (value,) = (value for found, value in samples[name] if labels.items() <= found.items())
    return value


def test_vllm_names_tell_the_same(samples: Samples) -> None:
    for name, theirs in NAMES.items():
        for suffix in ("", "_total", "_bucket", "_sum", "_count"):
            ours = samples.get(f"gapless:{name}{suffix}")
            if ours is not None:
                again = samples[f"vllm:{theirs}{suffix}"]
                assert again == [({**labels, "engine": "0"}, value) for labels, value in ours]
    boards = {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
        "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "request_success_total", "iteration_tokens_total_bucket",
        *(f"{name}_{suffix}" for suffix in ("bucket", "sum", "count") for name in (
            "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
            "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
            "request_inference_time_seconds", "request_time_per_output_token_seconds", "request_prompt_tokens",
            "request_generation_tokens",
        )),
    }  # fmt: skip
    assert {f"vllm:{name}" for name in boards} <= samples.keys()


def test_only_lines_that_vllm_has_are_said_again() -> None:
    text = b'# HELP gapless:num_aborts_total x\ngapless:num_aborts_total{model_name="m"} 1.0\n'
    assert with_vllm_names(text) == text
    text = b'gapless:prompt_tokens_total{model_name="gapless:prompt_tokens {"} 1.0\n'
    again = b'vllm:prompt_tokens_total{engine="0",model_name="gapless:prompt_tokens {"} 1.0\n'
    assert with_vllm_names(text) == text + again


def test_buckets_hold_those_of_vllm() -> None:
    assert set(buckets.TTFT) >= VLLM_TTFT
    assert set(buckets.ITL) >= VLLM_ITL
    assert set(buckets.LATENCY) >= VLLM_LATENCY
    assert STEP_TOKENS == (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    for bounds in (buckets.TTFT, buckets.ITL, buckets.LATENCY, buckets.TOKENS):
        assert list(bounds) == sorted(set(bounds))


def test_phases_of_an_answer_add_up(samples: Samples) -> None:
    queue = one(samples, "gapless:request_queue_time_seconds_sum")
    prefill = one(samples, "gapless:request_prefill_time_seconds_sum")
    decode = one(samples, "gapless:request_decode_time_seconds_sum")
    first = one(samples, "gapless:time_to_first_token_seconds_sum")
    assert prefill == pytest.approx(max(0.0, first - queue))  # the fake says that it queued for a millisecond
    assert prefill + decode == pytest.approx(one(samples, "gapless:request_inference_time_seconds_sum"))
    assert first + decode == pytest.approx(one(samples, "gapless:e2e_request_latency_seconds_sum"))
    mean = one(samples, "gapless:request_time_per_output_token_seconds_sum")
    assert mean == pytest.approx(decode / (len(TOKENS) - 1))


def test_the_device(samples: Samples) -> None:
    assert one(samples, "gapless:device_busy_seconds_total") == 8.0
    idle = {labels["cause"]: value for labels, value in samples["gapless:device_idle_seconds_total"]}
    assert idle == {"schedule": 0.25, "launch": 0.5, "collect": 0.25, "input": 0.5, "nothing": 2.5}
    assert one(samples, "gapless:engine_step_time_seconds_count") == 100
    assert one(samples, "gapless:engine_step_time_seconds_sum") == 9.0
    assert one(samples, "gapless:engine_step_tokens_bucket", le="8.0") == 100
    assert one(samples, "gapless:engine_step_tokens_bucket", le="1.0") == 60
    assert one(samples, "gapless:device_limit_bytes_per_second") == 2e9


def test_rates_are_of_the_last_seconds_and_of_busy_time() -> None:
    now = 0.0
    collector = UsageCollector("m", lambda: now)
    collector.peaks = {"bytes": 8e9}

    def values() -> dict[str, float]:
        return {family.name: family.samples[0].value for family in collector.collect() if family.samples}

    assert values() == {}
    collector.observe(stats())
    assert values()["gapless:device_idle_share"] == 0.0  # nothing is known yet
    for _ in range(2):  # twice: the first interval must not weigh on the second
        now += 1.5
        later = {"busy_seconds": USAGE.busy_seconds + now / 2, "bytes": USAGE.bytes + now * 1e9}
        idle = {"nothing": 4.0 + now / 2}
        collector.observe(stats(usage=_changed(idle_seconds=idle, **later)))
        found = values()
        assert found["gapless:device_idle_share"] == pytest.approx(0.5)
        assert found["gapless:device_bytes_per_second"] == pytest.approx(2e9)
        assert found["gapless:device_bytes_share"] == pytest.approx(0.25)
        assert "gapless:device_flops_share" not in found  # its limit is not known


def _changed(**fields: Any) -> Any:
    return msgspec.structs.replace(USAGE, **fields)


def test_processes(samples: Samples) -> None:
    assert one(samples, "gapless:process_cpu_seconds_total", process="frontend") > 0
    assert one(samples, "gapless:process_resident_memory_bytes", process="frontend") > 2**20


def test_a_process_that_is_gone_is_left_out() -> None:
    collector = ProcessCollector()
    collector.watch({"gone": 2**22 - 1, "here": os.getpid()})
    assert [[sample.labels["process"] for sample in family.samples] for family in collector.collect()] == [["here"]] * 2


def test_every_expression_of_the_board_has_its_metrics(samples: Samples) -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) >= 15
    used = set()
    for expression in expressions:
        names = re.findall(r"gapless:\w+|vllm:\w+", expression)
        assert names, expression
        used.update(names)
    assert used - samples.keys() == set()
    # labels that an expression selects or groups by are labels of its metrics
    for expression in expressions:
        for name, labels in re.findall(r"((?:gapless|vllm):\w+)\{([^}]*)\}", expression):
            for label in re.findall(r"(\w+)\s*[=!]", labels):
                assert label in samples[name][0][0], expression
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            known = {label for name in re.findall(r"(?:gapless|vllm):\w+", expression) for label in samples[name][0][0]}
            assert set(re.findall(r"\w+", labels)) <= known, expression
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_requests_in_flight_without_what_they_say(make_server: MakeServer) -> None:
    server = make_server()
    assert httpx.get(f"{server.url}/requests", trust_env=False).json() == {"total": 0, "requests": []}
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "/endless", "stream": True}) as answer:
            next(answer.iter_lines())
            time.sleep(0.3)  # older than an answer that is given again
            found = httpx.get(f"{server.url}/requests", trust_env=False).json()
        assert found["total"] == 1
        (request,) = found["requests"]
        assert request == {
            "id": str(server.fake.last().request_ids[0]), "state": "decode", "age_seconds": 1.5,
            "prompt_tokens": 3, "computed_tokens": 7, "output_tokens": 4,
        }  # fmt: skip
        assert "/endless" not in json.dumps(found)


def test_many_who_ask_are_one_question_to_the_engine(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server()
    monkeypatch.setattr(request_watch, "FRESH_S", 3600.0)  # however slow the machine is
    monkeypatch.setattr(request_watch, "PATIENCE_S", 60.0)
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for _ in range(20):
            assert http.get("/requests").status_code == 200
    assert server.fake.questions == 1
    server.fake.listing = False
    monkeypatch.setattr(request_watch, "FRESH_S", 0.0)
    monkeypatch.setattr(request_watch, "PATIENCE_S", 0.1)
    refused = httpx.get(f"{server.url}/requests", trust_env=False, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")

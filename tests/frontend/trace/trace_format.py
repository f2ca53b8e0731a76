"""What makes a Chrome trace a good one, after the Trace Event Format's description: a schema of its events, and what no
schema can say (spans nest, flows begin and end, times are in range)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jsonschema

_NUMBER = {"type": "number"}
_ID = {"type": "string", "pattern": "^[0-9a-f]+$"}


def _event(phase: str, required: list[str], **properties: Any) -> dict[str, Any]:
    base = {"ph": {"const": phase}, "pid": {"type": "integer"}, "tid": {"type": "integer"}, "name": {"type": "string"}}
    return {
        "type": "object",
        "properties": base | {"ts": _NUMBER, "cat": {"type": "string"}} | properties,
        "required": ["ph", "pid", "tid", "name", *required],
        "additionalProperties": False,
    }


_FLOW = {"id": _ID, "bp": {"const": "e"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    _event("X", ["ts", "dur", "cat"], dur={"type": "number", "minimum": 0}, args={"type": "object"}),
                    _event("M", ["args"], args={"type": "object", "minProperties": 1, "maxProperties": 1}),
                    _event(
                        "C",
                        ["ts", "args"],
                        args={"type": "object", "minProperties": 1, "additionalProperties": _NUMBER},
                    ),
                    _event("b", ["ts", "id", "cat"], id=_ID, args={"type": "object"}),
                    _event("e", ["ts", "id", "cat"], id=_ID),
                    *(_event(phase, ["ts", "id", "cat", "bp"], **_FLOW) for phase in "stf"),
                ]
            },
        },
    },
    "required": ["traceEvents", "displayTimeUnit"],
    "additionalProperties": False,
}


def check(trace: dict[str, Any], length_us: float) -> None:
    """Raises AssertionError or ValidationError."""
    jsonschema.validate(trace, SCHEMA)
    events = trace["traceEvents"]
    for event in events:
        if "ts" in event:
            assert 0 <= event["ts"] <= event["ts"] + event.get("dur", 0) <= length_us + 1e-6, event
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in events} <= named
    _check_nesting(events)
    _check_flows(events)
    _check_async(events)


def _check_nesting(events: list[dict[str, Any]]) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        stack: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= begin + 1e-9:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-9, "spans of a thread overlap"
            stack.append(end)


def _check_flows(events: list[dict[str, Any]]) -> None:
    flows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
        elif event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", *"t" * (len(flow) - 2), "f"]
        assert [event["ts"] for event in flow] == sorted(event["ts"] for event in flow)
        for event in flow:  # an arrow binds to the slice it lies in
            here = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in here), event


def _check_async(events: list[dict[str, Any]]) -> None:
    open_at: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        if event["ph"] in "be":
            key = event["id"], event["name"]
            open_at[key] += 1 if event["ph"] == "b" else -1
            assert open_at[key] in (0, 1)
    assert not any(open_at.values())

"""A timeline as one HTML page: the table's figures as pictures. Nothing is loaded and nothing runs: inline SVG, styles,
and tooltips that are titles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from frontend.trace.chrome import lanes
from frontend.trace.summary import EngineSummary, Stat, Summary
from frontend.trace.table import micro, milli, name_of, seconds
from frontend.trace.timeline import NOT_ON_A_TRACK, STAGES, RequestLife, Span, Timeline
from ipc.recorder import events

WIDTH, ROW = 1160, 18
MOST_SPANS = 4000  # drawn in the timeline: the end of the recording
MOST_REQUESTS = 60
BUCKETS = 60

_COLORS = {
    "parse": "#7b9fd4", "named": "#999", "deliver": "#a9c4e6", "write": "#4f76b3", "encode": "#c58ac9",
    "intake": "#e0c469", "schedule": "#d98c3f", "launch": "#c4563b", "gpu step": "#3d9a5b", "collect": "#d9d9d9",
    "commit": "#b0823c", "prepare": "#a58fd0", "publish": "#8c6d46", "decode": "#5fb3b3", "wait": "#f0f0f0",
    "gc": "#d1347a", "tokenize": "#c58ac9", "queue": "#e3b04b", "prefill": "#2f7d48", "detokenize": "#5fb3b3",
    "hand-over": "#e58fb0", "device": "#8fa88f", "engine": "#777",
}  # fmt: skip
_STAGE_COLORS = {**_COLORS, "decode": "#7ccf95"}

_STYLE = """
:root { color-scheme: light dark; font: 14px/1.5 system-ui, sans-serif; }
body { max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 2rem .5rem 0; display: inline-table; vertical-align: top; }
th, td { text-align: right; padding: .1rem .7rem; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
caption { text-align: left; font-weight: 600; }
svg { display: block; max-width: 100%; height: auto; background: #fff; }
svg text { font: 11px system-ui, sans-serif; fill: #222; }
.key span { display: inline-block; margin-right: 1rem; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
"""


def page(timeline: Timeline, summary: Summary, title: str) -> str:
    """The whole document."""
    body = [f"<h1>{escape(title)}</h1>"]
    for engine in summary.engines:
        body += _engine(engine)
    body += ["<h2>Timeline</h2>", *_timeline(timeline)]
    if summary.requests:
        body += ["<h2>Requests</h2>", *_waterfall(summary.requests), _stats("by stage", summary.stages)]
    if summary.others:
        body += ["<h2>Other processes</h2>", *(_stats(name, stats) for name, stats in summary.others)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _engine(engine: EngineSummary) -> list[str]:
    name = escape(f"{engine.device} of {engine.process.name}")
    if not engine.steps:
        return [f"<h2>{name}</h2><p>No step was recorded.</p>"]
    rest = f", {seconds(engine.no_requests)} without requests left out" if engine.no_requests else ""
    return [
        f"<h2>{name}</h2>",
        f'<p class="device">{engine.steps:,} steps in {seconds(engine.span)}: busy {engine.share(engine.busy):.1%}, '
        f"idle {engine.share(engine.idle_total):.1%}{rest}.</p>",
        *_idle(engine),
        *_histogram([step.duration / 1000 for step in engine.process.device]),
        _stats("by step", engine.stats),
    ]


def _idle(engine: EngineSummary) -> list[str]:
    if not engine.idle:
        return []
    largest = max(engine.idle.values())
    bars = []
    for index, (cause, time) in enumerate(engine.idle.items()):
        y = index * ROW
        width = max(1.0, 600 * time / largest)
        label = f"{seconds(time)} ({engine.share(time):.2%})"
        bars.append(
            f'<text x="0" y="{y + 13}">{escape(cause)}</text>'
            + _rect(100, y + 2, width, ROW - 4, cause, f"{cause}: {label}")
            + f'<text x="{108 + width:.1f}" y="{y + 13}">{label}</text>'
        )
    return ["<h3>What the device waited for</h3>", _svg("idle", len(bars) * ROW, bars)]


def _histogram(times: Sequence[float]) -> list[str]:
    """Of step times in µs, up to the 99th percentile's double."""
    ordered = sorted(times)
    low, high = ordered[0], min(ordered[-1], 2 * ordered[int(0.99 * (len(ordered) - 1))])
    step = max((high - low) / BUCKETS, 1e-3)
    counts = [0] * BUCKETS
    for time in ordered:
        counts[min(BUCKETS - 1, int((time - low) / step))] += 1
    tallest, width = max(counts), WIDTH / BUCKETS
    bars = []
    for i, count in enumerate(counts):
        height = 100 * count / tallest
        text = f"{micro(low + i * step)} to {micro(low + (i + 1) * step)}: {count} steps"
        bars.append(_rect(i * width, 100 - height, width - 1, height, "gpu step", text))
    bars.append(f'<text x="0" y="114">{micro(low)}</text><text x="{WIDTH - 60}" y="114">{micro(high)}</text>')
    return ["<h3>Time of a step on the device</h3>", _svg("histogram", 120, bars)]


def _timeline(timeline: Timeline) -> list[str]:
    """The newest spans of all processes, one row for each process and device."""
    tracks: list[tuple[str, list[Span]]] = []
    for process in timeline.processes:
        spans = [s for s in process.spans if s.code not in NOT_ON_A_TRACK and s.code != events.WAIT]
        tracks.append((process.name, spans))
        if process.device:
            tracks.append(("compute" if process.computes_itself else "GPU", process.device))
    newest = sorted((span.end for _, spans in tracks for span in spans), reverse=True)
    begin = newest[min(MOST_SPANS, len(newest)) - 1] if newest else 0
    scale = (WIDTH - 110) / max(1, timeline.end - begin)
    drawn, y = list[str](), 0
    for name, spans in tracks:
        rows = 1
        drawn.append(f'<text x="0" y="{y + 13}">{escape(name)}</text>')
        for lane, span in lanes(span for span in spans if span.end >= begin and span.begin <= timeline.end):
            rows = max(rows, lane)
            left = max(span.begin, begin)
            text = f"{span.name} {span.id or ''}: {micro(span.duration / 1000)}"
            top = y + (lane - 1) * ROW + 2
            x, width = 110 + (left - begin) * scale, max(0.3, (min(span.end, timeline.end) - left) * scale)
            drawn.append(_rect(x, top, width, ROW - 4, span.name, text))
        y += rows * ROW + 4
    names = dict.fromkeys(span.name for _, spans in tracks for span in spans)
    return [f"<p>The last {seconds(timeline.end - begin)}.</p>", _svg("timeline", y, drawn), _key(names, _COLORS)]


def _waterfall(requests: Sequence[RequestLife]) -> list[str]:
    shown = sorted(requests, key=lambda request: request.begin)[-MOST_REQUESTS:]
    begin = shown[0].begin
    scale = (WIDTH - 110) / max(1, max(request.written for request in shown) - begin)
    drawn = []
    for index, request in enumerate(shown):
        at, y = request.begin, index * ROW
        drawn.append(f'<text x="0" y="{y + 13}">{escape(name_of(request))}</text>')
        for stage, time in request.stages().items():
            text = f"{stage}: {milli(time)} of {milli(request.total)}"
            x, width = 110 + (at - begin) * scale, max(0.3, time * scale)
            drawn.append(_rect(x, y + 2, width, ROW - 4, stage, text, _STAGE_COLORS))
            at += time
    return [_svg("waterfall", len(shown) * ROW, drawn), _key(STAGES, _STAGE_COLORS)]


def _stats(title: str, stats: Sequence[Stat]) -> str:
    rows = "".join(
        f"<tr><td>{escape(stat.name)}</td><td>{stat.count:,}</td><td>{micro(stat.p50)}</td><td>{micro(stat.p99)}</td></tr>"
        for stat in stats
    )
    head = "<tr><th></th><th>count</th><th>p50</th><th>p99</th></tr>"
    return f"<table><caption>{escape(title)}</caption>{head}{rows}</table>"


def _key(names: Iterable[str], colors: dict[str, str]) -> str:
    items = "".join(
        f'<span><i style="background:{colors.get(name, "#999")}"></i>{escape(name)}</span>' for name in names
    )
    return f'<p class="key">{items}</p>'


def _svg(name: str, height: float, parts: Iterable[str]) -> str:
    return f'<svg id="{name}" viewBox="0 0 {WIDTH} {max(1, height):.0f}" role="img">{"".join(parts)}</svg>'


def _rect(
    x: float, y: float, width: float, height: float, name: str, title: str, colors: dict[str, str] = _COLORS
) -> str:
    color = colors.get(name, "#999")
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{color}">'
        f"<title>{escape(title)}</title></rect>"
    )

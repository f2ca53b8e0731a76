"""The step and stall parts of `bench.online`: times between the ends of decode steps of exactly so many rows.

A step's time depends on its rows and on how many tokens they have in the KV cache, so runs are compared over the same
totals of tokens in the cache, not over the same seconds.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.recorded import ENGINE, EngineWatch, Records, Steps, in_common, rings, steady_steps, who_idled
from bench.report import Report, missed, rounded
from bench.served import CONTEXT, Served
from bench.steps_alone import measure_alone
from bench.streams import Streams, incomplete
from frontend.loadtest.workload import WORDS
from ipc.config import EngineConfig

STEP_TARGET, STALL_TARGET, IDLE_TARGET = 0.03, 0.02, 0.01
PROMPT_TOKENS = 128
LEAD_S = 1.0  # of undisturbed steps before and after a disturbance
LONG_PROMPT = 1_000_000  # characters

Disturbance = Callable[[], dict[str, Any]]  # returns its "begin" and "end", CLOCK_MONOTONIC ns, and what it has to tell


@dataclass
class Run:
    """Streams that began together, from their beginning to their end."""

    steps: Steps
    records: Records  # of the engine
    seen: dict[str, Any]  # by the clients
    told: dict[str, Any]  # by the disturbance


@dataclass
class StepBench:
    report: Report
    quick: bool
    client_procs: int
    alone: dict[int, list[Steps]] = field(default_factory=dict)
    online: dict[int, list[Steps]] = field(default_factory=dict)

    # --- online beside alone --------------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        return (1, 4) if self.quick else (1, 16, 64, 256)

    @property
    def tokens(self) -> int:
        return 40 if self.quick else 1000

    def measure_alone(self, config: EngineConfig, turn: str) -> None:
        found = measure_alone(config, self.sizes, PROMPT_TOKENS, self.tokens, 1 if self.quick else 3)
        for size, many in found.items():
            self.alone.setdefault(size, []).extend(many)
            self.report.emit("step alone", turn=turn, n=size, **_figures(many))

    def measure_online(self, server: Served) -> None:
        for size in self.sizes:
            self.run(server, size, self.tokens)  # may capture graphs
            runs = [self.run(server, size, self.tokens) for _ in range(1 if self.quick else 3)]
            self.online[size] = many = [run.steps for run in runs]
            last = many[-1]
            window = (int(last.end[0]), int(last.end[-1])) if len(last) else (0, 0)
            idle = who_idled(server.recordings, runs[-1].records, *window)
            self.report.emit("step online", n=size, **_figures(many), causes=idle.get("causes"))

    def compare(self) -> None:
        for size in self.sizes:
            sides = {"alone": self.alone.get(size, []), "online": self.online.get(size, [])}
            if not all(sides.values()):
                continue
            common = in_common([steps for many in sides.values() for steps in many])
            cut = {name: [steps.with_kv(*common) for steps in many] for name, many in sides.items()}
            p50 = {name: [steps.p50_ms for steps in many] for name, many in cut.items()}
            mean = {name: [steps.mean_ms for steps in many] for name, many in cut.items()}
            idle = {name: [steps.idle for steps in many] for name, many in cut.items()}
            slower, slower_mean = _over(p50["online"], p50["alone"]), _over(mean["online"], mean["alone"])
            self.report.emit(
                "step compared",
                n=size,
                kv_tokens=common,
                p50_ms={name: rounded(values) for name, values in p50.items()},
                mean_ms={name: rounded(values) for name, values in mean.items()},
                steady_idle={name: rounded(values) for name, values in idle.items()},
                online_over_alone_p50=round(slower, 4),
                online_over_alone_mean=round(slower_mean, 4),
                met=slower <= STEP_TARGET,
            )
            median = {name: statistics.median(values) for name, values in idle.items()}
            self.report.say(
                f"step of {size}: alone {statistics.median(p50['alone']):.4f} ms ({min(p50['alone']):.4f} to "
                f"{max(p50['alone']):.4f}), online {statistics.median(p50['online']):.4f} ({min(p50['online']):.4f} to "
                f"{max(p50['online']):.4f}), so p50 {slower:+.2%}, mean {slower_mean:+.2%} (target {STEP_TARGET:.0%}"
                f"{missed(slower <= STEP_TARGET)}); idle in steady decode {median['alone']:.2%} alone, "
                f"{median['online']:.2%} online (target {IDLE_TARGET:.0%}{missed(median['online'] <= IDLE_TARGET)})"
            )

    # --- beside busy and stopped processes ------------------------------------------------------------------------

    def measure_stalls(self, server: Served) -> None:
        count, seconds = (4, 2.0) if self.quick else (64, 5.0)
        longest = 300 if self.quick else CONTEXT - PROMPT_TOKENS - 8
        first = self.report.attempt("stall: how long", 90, lambda: self.run(server, count, longest))
        if first is None or not len(first.steps):
            return
        # As many tokens as make a run hold the disturbance, with undisturbed steps before and after it.
        enough = first.steps.end <= first.steps.end[0] + round((2 * LEAD_S + seconds) * 1e9)
        tokens = min(longest, int(first.steps.kv[enough][-1]) // count - PROMPT_TOKENS + 50)
        disturbances: dict[str, Disturbance | None] = {
            "undisturbed before": None,
            "prompts of a million characters": lambda: long_prompts(server, seconds),
            "tokenizers stopped": lambda: stopped(server, "tokenizer_proc", seconds),
            "detokenizers stopped": lambda: stopped(server, "detokenizer_proc", seconds),
            "frontends stopped": lambda: stopped(server, "frontend", seconds),
            "undisturbed after": None,
        }
        runs: dict[str, Run] = {}
        for name, disturb in disturbances.items():
            done = self.report.attempt(f"stall: {name}", 75, lambda d=disturb: self.run(server, count, tokens, d))  # type: ignore[misc]
            if done is not None and len(done.steps):
                runs[name] = done
        calm = [runs[name].steps for name, disturb in disturbances.items() if disturb is None and name in runs]
        for name, done in runs.items():
            if done.told and calm:
                self.report.attempt(f"compare: {name}", 30, lambda n=name, d=done: self.compare_stall(n, d, calm))  # type: ignore[misc]

    def compare_stall(self, name: str, run: Run, calm: Sequence[Steps]) -> None:
        told, last = run.told, int(run.steps.end[-1])
        during, common, bases = _beside(run.steps.between(told["begin"], told["end"]), calm)
        following, _, bases_following = _beside(run.steps.between(told["end"], last), calm)
        slower = during.p50_ms / statistics.fmean(base.p50_ms for base in bases) - 1
        slower_mean = during.mean_ms / statistics.fmean(base.mean_ms for base in bases) - 1
        then = following.mean_ms / statistics.fmean(base.mean_ms for base in bases_following) - 1
        spread = max(base.mean_ms for base in bases) / min(base.mean_ms for base in bases) - 1
        met = abs(slower) <= STALL_TARGET and abs(slower_mean) <= STALL_TARGET and not run.seen["incomplete"]
        self.report.emit(
            "stall",
            disturbance=name,
            seconds=round((told["end"] - told["begin"]) / 1e9, 2),
            steps=len(during),
            kv_tokens=common,
            p50_ms=round(during.p50_ms, 4),
            mean_ms=round(during.mean_ms, 4),
            undisturbed_p50_ms=rounded([base.p50_ms for base in bases]),
            undisturbed_mean_ms=rounded([base.mean_ms for base in bases]),
            p50_change=round(slower, 4),
            mean_change=round(slower_mean, 4),
            undisturbed_spread=round(spread, 4),
            mean_change_afterwards=round(then, 4),
            idle=round(during.idle, 4),
            undisturbed_idle=rounded([base.idle for base in bases]),
            incomplete=run.seen["incomplete"],
            longest_silence_s=run.seen["longest_silence_s"],
            told={key: value for key, value in told.items() if key not in ("begin", "end")},
            met=met,
        )
        self.report.say(
            f"{name}: step p50 {slower:+.2%}, mean {slower_mean:+.2%} over {len(during)} steps, then {then:+.2%} "
            f"(undisturbed runs differ by {spread:.2%}; target ± {STALL_TARGET:.0%}{missed(met)}); "
            f"{run.seen['incomplete']} of {run.seen['streams']} streams incomplete {told.get('answers', '')}"
        )

    def run(self, server: Served, count: int, tokens: int, disturb: Disturbance | None = None) -> Run:
        """`count` streams of `tokens` tokens, and `disturb` once all stream. A disturbance that fails is told, and the
        streams are read to their end all the same."""
        told: dict[str, Any] = {}
        with EngineWatch(rings(server.recordings)[ENGINE]) as watch:
            begin = time.monotonic_ns()
            with Streams(server.url, count, tokens, PROMPT_TOKENS, self.client_procs) as clients:
                clients.ask()
                clients.wait_until_begun()
                if disturb is not None:
                    try:
                        time.sleep(LEAD_S)
                        told = disturb()
                    except OSError as error:
                        self.report.emit("failed", part="disturbance", error=f"{type(error).__name__}: {error}")
                streams = clients.results()
        seen = {
            "streams": count,
            "tokens": tokens,
            "incomplete": incomplete(streams, tokens),
            "longest_silence_s": round(max(stream.silence for stream in streams), 3),
            "events_per_token": round(sum(stream.events for stream in streams) / (count * tokens), 3),
        }
        steps = steady_steps(watch.records, count, begin)
        self.report.emit("streams", **seen, steps=len(steps), p50_ms=round(steps.p50_ms, 4), records_lost=watch.lost)
        return Run(steps, watch.records, seen, told)


def stopped(server: Served, kind: str, seconds: float) -> dict[str, Any]:
    with server.stopped(kind) as names:
        begin = time.monotonic_ns()
        time.sleep(seconds)
        end = time.monotonic_ns()
    return {"stopped": names, "begin": begin, "end": end}


def long_prompts(server: Served, seconds: float) -> dict[str, Any]:
    """A prompt of a million characters, answered before the next is sent, for so long. Each is encoded, and refused by
    the engine, whose context is shorter."""
    text = " ".join(WORDS[index * 7 % len(WORDS)] for index in range(LONG_PROMPT // 2))[:LONG_PROMPT]
    body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
    begin, taken, answer = time.monotonic_ns(), [], (0, "")
    while time.monotonic_ns() - begin < seconds * 1e9:
        asked = time.monotonic()
        answer = server.ask(body)
        taken.append(time.monotonic() - asked)
    return {
        "begin": begin,
        "end": time.monotonic_ns(),
        "answers": f"({len(taken)} prompts, a {answer[0]} after {min(taken):.2f} to {max(taken):.2f} s)",
        "answer": answer[1],
    }


def _figures(many: Sequence[Steps]) -> dict[str, Any]:
    common = in_common(many)
    cut = [steps.with_kv(*common) for steps in many]
    return {
        "kv_tokens": common,
        "steps": [len(steps) for steps in cut],
        "p50_ms": rounded([steps.p50_ms for steps in cut]),
        "mean_ms": rounded([steps.mean_ms for steps in cut]),
        "steady_idle": rounded([steps.idle for steps in cut]),
    }


def _over(values: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(values) / statistics.median(base) - 1


def _beside(steps: Steps, calm: Sequence[Steps]) -> tuple[Steps, tuple[int, int], list[Steps]]:
    """`steps` and the undisturbed ones over the tokens that they have in common, and those."""
    common = in_common([steps, *calm])
    return steps.with_kv(*common), common, [base.with_kv(*common) for base in calm]

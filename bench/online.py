"""A server under load on the machine it is for: what its clients feel, whether its engine steps as fast as alone, and
whether it keeps stepping while other processes are busy or stopped.

    python -m bench.online --make-tokenizer MODEL.gguf FOLDER                        # once; a few MB
    python -m bench.online --tokenizer FOLDER [--device cuda] [--parts table,step,stall] [--client sse_load.py]
        [--out results.jsonl] [--serve-args "--max-num-seqs 512"] [--quick]

The model is SmolLM2-135M's shape with random weights. Every figure is printed, and appended to --out, as soon as it is
there; what fails is told and the rest goes on.

table   closed loops of 1 to 256 streams. tok/s, time to first token, time between reads that brought events (--client:
        the script that measured others, as a program; without it `gapless bench serve`'s client, whose gaps are between
        events); CPU of each process; step time and idle share from the flight recorder
step    time from the end of one decode step to the end of the next, of exactly N rows, prompts of 128 tokens, in the
        server and in an engine alone in a process of its own, over the same total of tokens in the KV cache
stall   the same with 64 streams, while prompts of a million characters come one after the other, and while all
        tokenizers, detokenizers, frontends are stopped; against undisturbed runs before and after, over the same totals
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from bench.loads import Load, Row, run_load
from bench.recorded import EngineWatch, Steps, all_steps, in_common, rings, steady_steps, who_idled
from bench.served import Served, make_model, make_tokenizer, serve
from bench.steps_alone import measure_alone
from bench.streams import Streams, incomplete
from ipc.cores import usable_cores

SHAPE = "smollm2-135m"
ROWS = (
    Row(1, 64, 256, tokens_s=1_500, ttft_p50_ms=5),
    Row(16, 64, 256, tokens_s=20_000),
    Row(64, 64, 256, tokens_s=60_000, ttft_p50_ms=25),
    Row(256, 64, 256, tokens_s=100_000, ttft_p99_ms=150),
    Row(64, 1000, 16, tokens_s=10_000),
)
QUICK_ROWS = (Row(1, 16, 16), Row(4, 16, 16))
LOOKED_AT_S = 2.0  # of a row, for the causes of idle time: what all rings still hold
STEP_TARGET, STALL_TARGET, IDLE_TARGET = 0.03, 0.02, 0.01
PROMPT_TOKENS = 128
LEAD_S = 1.0  # of undisturbed streams before and after a disturbance


class Bench:
    """The measurements, and where their results go."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.quick: bool = given.quick
        self.out: Path | None = given.out
        self.deadline = time.monotonic() + given.budget
        self.summary: list[str] = []
        self.alone: dict[int, list[Steps]] = {}
        self.online: dict[int, list[Steps]] = {}

    def emit(self, what: str, **fields: Any) -> None:
        line = {"what": what, **fields}
        print(json.dumps(line), flush=True)
        if self.out is not None:
            about = {"date": date.today().isoformat(), "commit": self.given.commit, "device": self.given.device}
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, **about}) + "\n")

    def say(self, text: str) -> None:
        self.summary.append(text)

    def attempt(self, what: str, limit_s: float, work: Callable[[], Any]) -> Any:
        """`work`'s result, or None: what goes wrong, or takes too long, costs this part alone."""
        begin = time.monotonic()
        limit_s = min(limit_s, self.deadline - begin)
        if limit_s < 5:
            self.emit("left out", part=what, why="the budget is spent")
            return None
        try:
            with alarm(limit_s):
                return work()
        except Exception as error:
            traceback.print_exc()
            self.emit("failed", part=what, error=f"{type(error).__name__}: {error}"[:2000])
            return None
        finally:
            self.emit("took", part=what, s=round(time.monotonic() - begin, 2))

    # --- table ----------------------------------------------------------------------------------------------------

    def table(self, server: Served) -> None:
        for row in QUICK_ROWS if self.quick else ROWS:
            self.attempt(f"table {row}", 75, lambda row=row: self.row(server, row))  # type: ignore[misc]

    def row(self, server: Served, row: Row) -> None:
        load = Load(server.port, server.name, self.given.client, self.given.client_procs)
        # Other lengths: prompts of the warm-up must not be found in the prefix cache.
        warm_up = run_load(load, row._replace(words=row.words - 3), 2 if self.quick else max(3, 8 // row.streams))
        seconds = 1.0 if self.quick else self.given.row_seconds
        rounds = max(2, round(seconds * warm_up.tokens_s / (row.streams * row.tokens)))
        before, hits = server.cpu_seconds(), self.cached(server)
        with EngineWatch(rings(server.recordings)["engine_core"]) as watch:
            begin = time.monotonic_ns()
            result = run_load(load, row, rounds)
        after, hits = server.cpu_seconds(), self.cached(server) - hits
        steps, _, rows = all_steps(watch.records, begin)
        busy_s = float(steps.end[-1] - steps.end[0]) / 1e9  # without the client's own start
        used = {name: round((after[name] - before[name]) / busy_s, 2) for name in after if name in before}
        self.emit(
            "table",
            **row.named(),
            requests=result.requests,
            **result.figures(),
            client_cpu=round(result.cpu_seconds / busy_s, 2),
            cpu=used,
            cached_prompt_tokens=hits,
            steps=len(steps),
            steps_lost=watch.lost,
            step_ms_p50=round(steps.p50_ms, 4),
            gpu_step_ms_p50=round(float(statistics.median(steps.duration.tolist())) / 1e6, 4),
            rows_p50=float(statistics.median(rows.tolist())),
            device_idle_of_all_time=round(steps.idle, 4),
            met=row.met(result),
            errors=result.errors,
        )
        last = int(steps.end[-1])
        idle = who_idled(server.recordings, max(int(steps.end[0]), last - int(LOOKED_AT_S * 1e9)), last)
        self.emit("table idle", **row.named(), **idle)
        causes = ", ".join(f"{cause} {share:.1%}" for cause, share in list(idle.get("causes", {}).items())[:4])
        self.say(
            f"{row!s:<26}{result.tokens_s:>9,.0f} tok/s  TTFT {result.ttft_p50_ms:.1f} / {result.ttft_p99_ms:.1f} ms  "
            f"gap {result.gap_p50_ms:.2f} / {result.gap_p99_ms:.2f} ms  {result.events_s:,.0f} events/s  "
            f"{result.failed} failed  step {steps.p50_ms:.3f} ms  idle {idle.get('idle', 0.0):.1%} ({causes})  "
            f"{row.verdict(result)}"
        )

    @staticmethod
    def cached(server: Served) -> float:
        return server.metric("gapless:prefix_cache_hits_total")

    # --- step -----------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        return (1, 4) if self.quick else (1, 16, 64, 256)

    @property
    def tokens(self) -> int:
        return 40 if self.quick else 1000

    def step_alone(self, model: Path, turn: str) -> None:
        rounds = 1 if self.quick else 3
        found = measure_alone(model, self.given.device, self.sizes, PROMPT_TOKENS, self.tokens, rounds)
        for size, many in found.items():
            self.alone.setdefault(size, []).extend(many)
            self.emit("step alone", turn=turn, n=size, **self.of_rounds(many))

    def step_online(self, server: Served) -> None:
        ring = rings(server.recordings)["engine_core"]
        for size in self.sizes:
            many, looked = [], {}
            for turn in range(2 if self.quick else 4):
                with EngineWatch(ring) as watch:
                    begin, _ = self.stream(server, size, self.tokens)
                steps = steady_steps(watch.records, size, begin)
                if turn:  # the first one may have captured graphs
                    many.append(steps)
            if len(steps):
                looked = who_idled(server.recordings, int(steps.end[0]), int(steps.end[-1]))
            self.online[size] = many
            self.emit("step online", n=size, **self.of_rounds(many), causes=looked.get("causes"))

    def of_rounds(self, many: Sequence[Steps]) -> dict[str, Any]:
        common = in_common(many)
        many = [steps.with_kv(*common) for steps in many]
        return {
            "kv_tokens": common,
            "steps": [len(steps) for steps in many],
            "p50_ms": [round(steps.p50_ms, 4) for steps in many],
            "mean_ms": [round(steps.mean_ms, 4) for steps in many],
            "steady_idle": [round(steps.idle, 5) for steps in many],
        }

    def compare_steps(self) -> None:
        for size in self.sizes:
            alone, online = self.alone.get(size), self.online.get(size)
            if not alone or not online:
                continue
            common = in_common([*alone, *online])
            sides = {"alone": alone, "online": online}
            p50 = {name: [s.with_kv(*common).p50_ms for s in side] for name, side in sides.items()}
            mean = {name: [s.with_kv(*common).mean_ms for s in side] for name, side in sides.items()}
            idle = {name: [s.with_kv(*common).idle for s in side] for name, side in sides.items()}
            ratio = statistics.median(p50["online"]) / statistics.median(p50["alone"]) - 1
            ratio_of_means = statistics.median(mean["online"]) / statistics.median(mean["alone"]) - 1
            self.emit(
                "step compared",
                n=size,
                kv_tokens=common,
                p50_ms={name: rounded(values) for name, values in p50.items()},
                mean_ms={name: rounded(values) for name, values in mean.items()},
                steady_idle={name: rounded(values) for name, values in idle.items()},
                online_over_alone_p50=round(ratio, 4),
                online_over_alone_mean=round(ratio_of_means, 4),
                met=ratio <= STEP_TARGET,
            )
            least, most = min(p50["alone"]), max(p50["alone"])
            self.say(
                f"step of {size}: alone {statistics.median(p50['alone']):.4f} ms ({least:.4f} to {most:.4f}), online "
                f"{statistics.median(p50['online']):.4f} ms, p50 {ratio:+.2%}, mean {ratio_of_means:+.2%} "
                f"(target {STEP_TARGET:.0%}{'' if ratio <= STEP_TARGET else ' MISSED'}); idle in steady decode: alone "
                f"{statistics.median(idle['alone']):.2%}, online {statistics.median(idle['online']):.2%} "
                f"(target {IDLE_TARGET:.0%}{'' if statistics.median(idle['online']) <= IDLE_TARGET else ' MISSED'})"
            )

    def stream(
        self, server: Served, count: int, tokens: int, disturb: Callable[[], Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Streams from beginning to end, and what `disturb` does once all stream. When they were asked; what clients
        saw, and what `disturb` returned."""
        with Streams(server.url, count, tokens, PROMPT_TOKENS, self.given.client_procs) as clients:
            begin = time.monotonic_ns()
            clients.ask()
            clients.wait_until_begun()
            told = disturb() if disturb is not None else {}
            streams = clients.results()
        bad = incomplete(streams, tokens)
        seen = {
            "streams": count,
            "tokens": tokens,
            "incomplete": bad,
            "longest_silence_s": round(max(stream.silence for stream in streams), 3),
            "events_per_token": round(sum(stream.events for stream in streams) / (count * tokens), 3),
        }
        if bad:
            self.emit("streams not complete", **seen)
        return begin, {**seen, "told": told}

    # --- stall ----------------------------------------------------------------------------------------------------

    def stall(self, server: Served, context: int) -> None:
        count, seconds = (4, 2.0) if self.quick else (64, 5.0)
        longest = 300 if self.quick else context - PROMPT_TOKENS - 8
        first = self.attempt("stall: how long", 90, lambda: self.curve(server, count, longest))
        if not first:
            return
        # As many tokens as make a run hold the disturbance, with undisturbed steps before and after it.
        steps = first["steps"]
        wanted_ns = int((2 * LEAD_S + seconds) * 1e9)
        enough = steps.kv[steps.end <= steps.end[0] + wanted_ns]
        tokens = min(longest, int(enough[-1]) // count - PROMPT_TOKENS + 50)

        def stop(kind: str) -> Callable[[], dict[str, Any]]:
            def disturb() -> dict[str, Any]:
                time.sleep(LEAD_S)
                with server.stopped(kind) as names:
                    begin = time.monotonic_ns()
                    time.sleep(seconds)
                    end = time.monotonic_ns()
                return {"stopped": names, "begin": begin, "end": end}

            return disturb

        kinds: dict[str, Callable[[], dict[str, Any]] | None] = {
            "undisturbed before": None,
            "a prompt of a million characters": lambda: long_prompts(server, seconds),
            "tokenizer stopped": stop("tokenizer_proc"),
            "detokenizer stopped": stop("detokenizer_proc"),
            "frontend stopped": stop("frontend"),
            "undisturbed after": None,
        }
        found = {
            name: self.attempt(f"stall: {name}", 75, lambda d=disturb: self.curve(server, count, tokens, d))  # type: ignore[misc]
            for name, disturb in kinds.items()
        }
        calm = [found[name]["steps"] for name in ("undisturbed before", "undisturbed after") if found[name]]
        for name, run in found.items():
            if run and run["seen"]["told"] and calm:
                self.compare_stall(name, run, calm)

    def curve(
        self, server: Served, count: int, tokens: int, disturb: Callable[[], Any] | None = None
    ) -> dict[str, Any]:
        with EngineWatch(rings(server.recordings)["engine_core"]) as watch:
            begin, seen = self.stream(server, count, tokens, disturb)
        steps = steady_steps(watch.records, count, begin)
        self.emit("stall run", **seen, steps=len(steps), p50_ms=round(steps.p50_ms, 4), steps_lost=watch.lost)
        return {"steps": steps, "seen": seen}

    def compare_stall(self, name: str, run: dict[str, Any], calm: Sequence[Steps]) -> None:
        told, steps = run["seen"]["told"], run["steps"]
        during = steps.between(told["begin"], told["end"])
        following = steps.between(told["end"], int(steps.end[-1]) if len(steps) else 0)
        low, high = in_common([during, *calm])
        window = during.with_kv(low, high)
        bases = [steps.with_kv(low, high) for steps in calm]
        base_p50 = statistics.fmean(base.p50_ms for base in bases)
        base_mean = statistics.fmean(base.mean_ms for base in bases)
        p50, mean = window.p50_ms / base_p50 - 1, window.mean_ms / base_mean - 1
        after_common = in_common([following, *calm])
        after_base = statistics.fmean(base.with_kv(*after_common).mean_ms for base in calm)
        after = following.with_kv(*after_common).mean_ms / after_base - 1
        met = abs(p50) <= STALL_TARGET and mean <= STALL_TARGET
        self.emit(
            "stall",
            disturbance=name,
            seconds=round((told["end"] - told["begin"]) / 1e9, 2),
            steps=len(window),
            kv_tokens=(low, high),
            p50_ms=round(window.p50_ms, 4),
            mean_ms=round(window.mean_ms, 4),
            undisturbed_p50_ms=rounded([base.p50_ms for base in bases]),
            undisturbed_mean_ms=rounded([base.mean_ms for base in bases]),
            p50=round(p50, 4),
            mean=round(mean, 4),
            mean_in_what_followed=round(after, 4),
            idle=round(window.idle, 4),
            undisturbed_idle=rounded([base.idle for base in bases]),
            incomplete=run["seen"]["incomplete"],
            longest_silence_s=run["seen"]["longest_silence_s"],
            told={key: value for key, value in told.items() if key not in ("begin", "end")},
            met=met,
        )
        spread = max(base.mean_ms for base in bases) / min(base.mean_ms for base in bases) - 1
        self.say(
            f"{name}: step p50 {p50:+.2%}, mean {mean:+.2%} over {len(window)} steps (undisturbed runs differ by "
            f"{spread:.2%}; target ± {STALL_TARGET:.0%}{'' if met else ' MISSED'}), then {after:+.2%}; "
            f"{run['seen']['incomplete']} of {run['seen']['streams']} streams incomplete; {told.get('answers', '')}"
        )


def long_prompts(server: Served, seconds: float) -> dict[str, Any]:
    """A prompt of a million characters, answered before the next is sent, for so long."""
    from frontend.loadtest.workload import WORDS

    text = " ".join(WORDS[index * 7 % len(WORDS)] for index in range(250_000))[:1_000_000]
    body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
    time.sleep(LEAD_S)
    begin, answers = time.monotonic_ns(), []
    while time.monotonic_ns() - begin < seconds * 1e9:
        asked = time.monotonic()
        status, answer = server.ask(body)
        answers.append((status, round(time.monotonic() - asked, 3), answer[:160]))
    taken = [took for _, took, _ in answers]
    return {
        "begin": begin,
        "end": time.monotonic_ns(),
        "answers": f"{len(answers)} prompts, each answered after {min(taken)} to {max(taken)} s: {answers[-1][0]}",
        "answer": answers[-1][2],
    }


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in here after so long."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def run(bench: Bench, given: argparse.Namespace, root: Path) -> None:
    parts = set(given.parts.split(","))
    context = json.loads((make_model(SHAPE, given.tokenizer, root) / "config.json").read_text(encoding="utf-8"))
    model = root / SHAPE
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    bench.emit(
        "machine", cores=usable_cores(), python=platform.python_version(), shm_free_mb=shared >> 20,
        load=round(os.getloadavg()[0], 2), client=str(given.client or "frontend.loadtest"),
    )  # fmt: skip
    if "step" in parts:
        bench.attempt("step: alone, before", 120, lambda: bench.step_alone(model, "before"))
    # Other clients call us by other names than localhost, as they may a server that others can reach.
    open_to_all = ["--host", "0.0.0.0"] if given.client else []
    with serve(model, given.device, [*open_to_all, *shlex.split(given.serve_args)]) as server:
        if bench.attempt("start", 200, lambda: started(bench, server)):
            if "table" in parts:
                bench.table(server)
            if "step" in parts:
                bench.attempt("step: online", 120, lambda: bench.step_online(server))
            if "stall" in parts:
                bench.stall(server, context["max_position_embeddings"])
            bench.emit("server log", tail=server.log_tail(15), running=server.process.poll() is None)
    if "step" in parts:
        if not bench.quick:
            bench.attempt("step: alone, after", 90, lambda: bench.step_alone(model, "after"))
        bench.attempt("step: compared", 30, bench.compare_steps)


def started(bench: Bench, server: Served) -> bool:
    ready = server.wait_until_ready()
    print(server.log_tail(), flush=True)
    settled = server.wait_until_settled()
    sizes = {name: path.stat().st_size >> 10 for name, path in rings(server.recordings).items()}
    bench.emit("start", ready_s=round(ready, 2), settled_s=round(settled, 2), ring_kb=sizes)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json for this vocabulary")
    parser.add_argument("--make-tokenizer", nargs=2, type=Path, metavar=("GGUF", "FOLDER"), help="write it, and end")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", default="table,step,stall")
    parser.add_argument(
        "--client", type=Path, help="a client as a program: PORT MODEL STREAMS ROUNDS TOKENS WORDS PROCS"
    )
    parser.add_argument("--client-procs", type=int, default=4)
    parser.add_argument("--row-seconds", type=float, default=5.0, help="of each row of the table")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds, after which nothing more is begun")
    parser.add_argument("--serve-args", default="", help="more flags of `gapless serve`, in one string")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--quick", action="store_true", help="few streams and tokens: to try the script out")
    parser.add_argument("--commit", default="", help="what to write as the commit measured")
    given = parser.parse_args()
    if given.make_tokenizer:
        make_tokenizer(*given.make_tokenizer)
        return
    if given.tokenizer is None:
        parser.error("--tokenizer FOLDER is needed (see --make-tokenizer)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped
    bench = Bench(given)
    with tempfile.TemporaryDirectory() as root:
        try:
            run(bench, given, Path(root))
        finally:
            print("\n".join(["", *bench.summary]), flush=True)


if __name__ == "__main__":
    main()

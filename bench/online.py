"""A server under load on the machine it is for: what its clients feel, whether its engine steps as fast as alone, and
whether it keeps stepping while other processes are busy or stopped.

    python -m bench.online --make-tokenizer MODEL.gguf FOLDER                        # once; a few MB
    python -m bench.online --tokenizer FOLDER [--device cuda] [--parts table,step,stall] [--client sse_load.py]
        [--out results.jsonl] [--serve-args "--max-num-batched-tokens 4096"] [--quick]

The model is SmolLM2-135M's shape with random weights. Every figure is printed, and appended to --out, as soon as it is
there; what fails is told and the rest goes on.

table   closed loops of 1 to 256 streams. tok/s, time to first token, time between reads that brought events (--client:
        a client as a program, such as others were measured with; without it that of `gapless bench serve`, whose gaps
        are between events); CPU of each process in cores; step time, idle time and its causes from the flight recorder
step    time from the end of one decode step to the end of the next, of exactly N rows, in the server and in an engine
        alone in a process of its own; prompts of 128 random tokens, 1,000 outputs
stall   the same with 64 streams, while prompts of a million characters come one after the other, and while all
        tokenizers, detokenizers, frontends are stopped; against undisturbed runs before and after
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from bench.online_steps import StepBench
from bench.online_table import measure_table
from bench.recorded import rings
from bench.report import Report
from bench.served import TOKENIZER_FILES, Served, engine_config, make_model, make_tokenizer, serve, serve_arguments
from ipc.cores import usable_cores
from ipc.errors import UserError
from ipc.recorder.store import SHARED_MEMORY

SHAPE = "smollm2-135m"


def run(report: Report, given: argparse.Namespace, root: Path) -> None:
    parts = given.parts.split(",")
    # Other clients may call us by other names than localhost, which is for servers that others can reach.
    more = [*(["--host", "0.0.0.0"] if given.client else []), *shlex.split(given.serve_args)]
    arguments = serve_arguments(make_model(SHAPE, given.tokenizer, root), given.device, more)
    steps = StepBench(report, given.quick, given.client_procs)
    seconds = 1.0 if given.quick else given.row_seconds
    work = {
        "table": lambda server: measure_table(report, server, given.client, given.client_procs, seconds, given.quick),
        "step": lambda server: report.attempt("step: online", 120, lambda: steps.measure_online(server)),
        "stall": steps.measure_stalls,
    }
    about = {"client": str(given.client or "frontend.loadtest"), "arguments": arguments}
    report.attempt("machine", 10, lambda: report.emit("machine", **machine(), **about))
    if "step" in parts:
        report.attempt("step: alone, before", 120, lambda: steps.measure_alone(engine_config(arguments), "before"))
    with contextlib.ExitStack() as stack:
        server: Served | None = None
        for part in parts:
            if server is None or server.process.poll() is not None:  # the first, or the last one has died
                server = start(report, stack, arguments)
            if server is not None:
                work[part](server)
        if server is not None:
            report.emit("server", running=server.process.poll() is None, log=server.log_tail(15))
    if "step" in parts:
        if not given.quick:
            report.attempt("step: alone, after", 90, lambda: steps.measure_alone(engine_config(arguments), "after"))
        report.attempt("step: compared", 30, steps.compare)


def start(report: Report, stack: contextlib.ExitStack, arguments: Sequence[str]) -> Served | None:
    """A server that is ready and has prepared what it puts off; None if it did not start."""
    server = stack.enter_context(serve(arguments))

    def wait() -> Served:
        ready = server.wait_until_ready()
        print(server.log_tail(), flush=True)
        settled = server.wait_until_settled()
        sizes = {name: path.stat().st_size >> 10 for name, path in rings(server.recordings).items()}
        report.emit("start", ready_s=round(ready, 2), settled_s=round(settled, 2), ring_kb=sizes)
        return server

    return report.attempt("start", 200, wait)


def machine() -> dict[str, object]:
    shared = shutil.disk_usage(SHARED_MEMORY).free >> 20 if SHARED_MEMORY.is_dir() else 0
    cores, load = usable_cores(), round(os.getloadavg()[0], 2)
    return {"cores": cores, "load": load, "python": platform.python_version(), "shared_memory_mb": shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json for this vocabulary")
    parser.add_argument("--make-tokenizer", nargs=2, type=Path, metavar=("GGUF", "FOLDER"), help="write it, and end")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", default="table,step,stall", help="some of them, in this order")
    parser.add_argument("--client", type=Path, help="called with PORT MODEL STREAMS REQUESTS_EACH TOKENS WORDS PROCS")
    parser.add_argument("--client-procs", type=int, default=4)
    parser.add_argument("--row-seconds", type=float, default=5.0, help="of each row of the table")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds, after which nothing more is begun")
    parser.add_argument("--serve-args", default="", help="more flags of `gapless serve`, in one string")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--quick", action="store_true", help="few streams and tokens: to try the script out")
    parser.add_argument("--commit", default="", help="what to write as the commit measured")
    given = parser.parse_args()
    if given.make_tokenizer:
        try:
            make_tokenizer(*given.make_tokenizer)
        except (OSError, UserError) as error:
            sys.exit(f"error: {error}")
        return
    if given.tokenizer is None:
        parser.error("--tokenizer FOLDER is needed (--make-tokenizer writes one)")
    if not (given.tokenizer / TOKENIZER_FILES[0]).is_file():
        sys.exit(f"error: {given.tokenizer} has no {TOKENIZER_FILES[0]}; --make-tokenizer writes one")
    if unknown := set(given.parts.split(",")) - {"table", "step", "stall"}:
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped
    about = {"date": date.today().isoformat(), "commit": given.commit, "device": given.device}
    report = Report(given.out, given.budget, about)
    with tempfile.TemporaryDirectory() as root:
        try:
            run(report, given, Path(root))
        finally:
            print("\n".join(["", *report.summary]), flush=True)


if __name__ == "__main__":
    main()

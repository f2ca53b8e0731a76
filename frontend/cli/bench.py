"""`gapless bench serve`: load on a running server. `gapless bench offline`: the engine of a model, with no server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from frontend.cli.errors import CliError
from frontend.cli.output import check_output, write_output

GOODPUT = ("ttft", "tpot", "e2el")


class Limit(click.ParamType[tuple[str, float]]):
    """METRIC:MILLISECONDS"""

    name = "METRIC:MS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        metric, _, text = str(value).partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if metric not in GOODPUT or not limit > 0:
            self.fail(f"{value!r} is not METRIC:MS with one of {', '.join(GOODPUT)}, such as ttft:200", param, ctx)
        return metric, limit


@click.group(name="bench", no_args_is_help=True, help="Measure a running server, or the engine alone.")
def COMMAND() -> None:
    """Holds the two."""


@COMMAND.command(help="Send requests to the server at --url and print what its clients felt: TTFT, TPOT, ITL, E2EL.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="the server, Gapless or another")
@click.option("--model", help="name to ask for [whatever is served]")
@click.option("--api-key", envvar="GAPLESS_API_KEY", help="key of the server")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option("--dataset", type=click.Choice(["random", "sharegpt"]), default="random", show_default=True,
              help="random words; or lengths like ShareGPT's, or its file with --dataset-path")  # fmt: skip
@click.option("--dataset-path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="ShareGPT's JSON")
@click.option("--input-len", type=click.IntRange(1), default=1024, show_default=True, help="words of a random prompt")
@click.option("--output-len", type=click.IntRange(1), default=128, show_default=True, help="tokens of its answer")
@click.option("--range-ratio", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True,
              help="spread of both: ± this share")  # fmt: skip
@click.option("--num-prompts", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--request-rate", type=click.FloatRange(0, min_open=True), default=float("inf"), show_default=True,
              help="requests per second (open loop); inf: all at once")  # fmt: skip
@click.option("--burstiness", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="1: Poisson; below: in bursts; above: more even")  # fmt: skip
@click.option("--max-concurrency", type=click.IntRange(1), help="most requests at once (closed loop)")
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="answers of full length")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--goodput", type=Limit(), multiple=True, help="a limit of the goodput; may be repeated")
@click.option("--percentiles", default="99", show_default=True, help="of each latency, such as 50,90,99")
@click.option("--procs", type=click.IntRange(1), help="client processes [half of the cores, at most 8]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print JSON, not a table")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="write the JSON to this file too")
def serve(**given: Any) -> None:
    """Run a load test and print its figures."""
    import msgspec

    from frontend.loadtest.report import summarize, table
    from frontend.loadtest.run import LoadTestError, check, measure

    percentiles = _percentiles(given["percentiles"])
    _check_lengths(given["dataset"])
    check_output(given["output"])
    target, requests = _target(given), _requests(given)
    procs = given["procs"] or min(8, max(1, (os.cpu_count() or 1) // 2))
    try:
        served = check(target, requests[0])
        measured = measure(target, requests, given["max_concurrency"], procs)
    except LoadTestError as error:
        raise CliError(str(error)) from None
    given["model"] = given["model"] or served or None
    result = {**_settings(given), **summarize(measured, percentiles, dict(given["goodput"]))}
    text = msgspec.json.format(msgspec.json.encode(result)).decode()
    click.echo(text if given["as_json"] else table(result, percentiles))
    if given["output"] is not None:
        write_output(given["output"], text + "\n")
    if not result["completed"]:
        raise CliError("no request succeeded")


@COMMAND.command(
    help="""Time the engine of MODEL alone: decode steps, prefill, a workload, the first token. A JSON line for each.

\b
  --device NAME    auto, cuda or cpu [auto]
  --dummy          random weights of the model's shape
  --quick          one and four sequences and a short prompt only
  --first-token    only load and make one token
  --out FILE       append the lines to this file
  --commit TEXT    what to write as the commit measured
""",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("model", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def offline(model: str | None, arguments: Sequence[str]) -> None:
    """Run the measurement where the engine is: in a process of its own."""
    from frontend.cli.models import resolve_model
    from frontend.cli.progress import Reporter
    from ipc.processes import child_environment

    if model is not None and model.startswith("-"):
        arguments, model = [model, *arguments], None
    with Reporter() as reporter:
        path = resolve_model(model, reporter.progress, weights="--dummy" not in arguments).path
    # By module string: torch has no place in this process.
    command = [sys.executable, "-P", "-m", "engine_core.measure", str(path), *arguments]
    done = subprocess.run(command, env=child_environment(), check=False)
    if done.returncode:
        raise CliError(f"the measurement ended with status {done.returncode}")


def _percentiles(text: str) -> list[float]:
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = [-1.0]
    if not all(0 < p < 100 for p in found):
        raise click.UsageError(f"--percentiles must be numbers between 0 and 100 with commas between, got {text!r}")
    return found


def _check_lengths(dataset: str) -> None:
    """Raises `click.UsageError` for lengths that the data set would not heed."""
    context = click.get_current_context()
    for flag in ("--input-len", "--output-len", "--range-ratio"):
        source = context.get_parameter_source(flag.removeprefix("--").replace("-", "_"))
        if dataset != "random" and source is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"{flag} is for --dataset random; the lengths of {dataset} are its own")


def _target(given: dict[str, Any]) -> Any:
    from frontend.loadtest.client import Target

    url = given["url"] if "://" in given["url"] else f"http://{given['url']}"
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--url must be http://HOST[:PORT] or https://HOST[:PORT], got {url!r}")
    extra: dict[str, Any] = {"temperature": given["temperature"]}
    if given["ignore_eos"]:
        extra["ignore_eos"] = True
    return Target(
        url.rstrip("/").removesuffix("/v1"), given["endpoint"] == "chat", given["model"], given["api_key"], extra
    )


def _requests(given: dict[str, Any]) -> Any:
    import random

    from frontend.loadtest import workload

    rng = random.Random(given["seed"])
    count = given["num_prompts"]
    try:
        if given["dataset"] == "random":
            lengths = given["input_len"], given["output_len"], given["range_ratio"]
            pairs = workload.random_pairs(rng, count, *lengths)
        elif given["dataset_path"] is None:
            pairs = workload.sharegpt_like_pairs(rng, count)
        else:
            pairs = workload.sharegpt_pairs(rng, count, given["dataset_path"])
    except (OSError, ValueError) as error:
        raise CliError(str(error)) from None
    return workload.schedule(rng, pairs, given["request_rate"], given["burstiness"])


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, as part of the result."""
    from datetime import UTC, datetime

    names = ("model", "endpoint", "dataset", "num_prompts", "burstiness", "max_concurrency", "seed")
    rate = given["request_rate"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: given[name] for name in names},
        "request_rate": "inf" if rate == float("inf") else rate,  # JSON has no infinity
        "goodput": dict(given["goodput"]),
    }

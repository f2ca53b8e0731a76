"""From checked settings to a running server: in the foreground for `serve`, private to `run` and `chat`."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from frontend.cli.client import Client
from frontend.cli.errors import CliError
from frontend.cli.models import DEFAULT_MODEL, ResolvedModel, resolve_model
from frontend.cli.progress import Reporter
from frontend.cli.settings import Settings
from frontend.cli.summary import summary
from frontend.topology import Facts, LaunchConfig, ProcessFailed, Server, serve
from ipc.messages import Progress


def launch_config(settings: Settings, model: ResolvedModel) -> LaunchConfig:
    """What to start. The server answers to the model's own name and to what the user typed, unless that is a path."""
    name = settings.server.served_model_name or model.name
    typed = settings.program.model or DEFAULT_MODEL
    aliases = dict.fromkeys([model.name] if Path(typed).expanduser().exists() else [model.name, typed])
    return LaunchConfig(
        model=str(model.path),
        engine=settings.engine,
        text=settings.text,
        server=msgspec.structs.replace(settings.server, served_model_name=name),
        model_aliases=tuple(alias for alias in aliases if alias != name),
        log_level=settings.program.log_level,
    )


def serve_foreground(settings: Settings) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises `CliError`."""
    begin = time.monotonic()
    with Reporter() as reporter:
        model = _model(settings, reporter)
        launch = launch_config(settings, model)

        def on_ready(facts: Facts) -> None:
            reporter.close()
            print(summary(launch, facts, time.monotonic() - begin), flush=True)

        with _plain_failures():
            serve(
                launch,
                on_progress=lambda news: _forward(reporter, news),
                on_ready=on_ready,
                on_output=lambda name, line: reporter.line(f"{name}: {line}"),
            )


def _model(settings: Settings, reporter: Reporter) -> ResolvedModel:
    program, weights = settings.program, settings.engine.load_format != "dummy"
    return resolve_model(program.model, reporter.progress, program.cache_dir, weights=weights)


@contextlib.contextmanager
def client_for(settings: Settings, model: str | None) -> Iterator[Client]:
    """A client of the server at --url, or of one that is started for this command alone and stopped after it.

    `model` is what the command line names: a server must know it. One from the settings file is only for starting.
    """
    if settings.answer.url is not None:
        yield Client(settings.answer.url, settings.server.api_key, model)
        return
    with Reporter() as reporter, _plain_failures():
        resolved = _model(settings, reporter)
        # Other users of this machine can reach a loopback port, but do not know the key.
        private = msgspec.structs.replace(
            settings.server,
            host="127.0.0.1",
            port=0,
            api_key=secrets.token_urlsafe(),
            served_model_name="",
            frontend_procs=1,  # one user, one request at a time
            tokenizer_procs=1,
            detokenizer_procs=1,
        )
        launch = launch_config(msgspec.structs.replace(settings, server=private), resolved)
        server = Server(
            launch,
            on_progress=lambda news: _forward(reporter, news),
            on_output=lambda name, line: reporter.line(f"{name}: {line}"),
        )
        try:
            server.start()
            reporter.close()
            yield Client(server.url, private.api_key)
        finally:
            server.stop()


def _forward(reporter: Reporter, news: Progress) -> None:
    reporter.progress(news.phase, news.fraction, lane=news.name)


@contextlib.contextmanager
def _plain_failures() -> Iterator[None]:
    try:
        yield
    except ProcessFailed as failure:
        raise CliError(str(failure)) from None
    except OSError as error:
        raise CliError(f"cannot start the server: {error}") from None

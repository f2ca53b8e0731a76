"""Settings of the `gapless` command: one definition, four sources.

Each field marked with `ipc.config.option` is a flag, an environment variable and a TOML key; names, help, bounds and
the reference page are derived from the structs. Precedence: flag, then environment, then file, then default.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

from frontend.cli.errors import SettingsError
from ipc.config import Config, EngineOptions, Positive, ServerOptions, TextOptions, option
from ipc.expected import describe

ENV_PREFIX = "GAPLESS_"


class ProgramOptions(Config, frozen=True):
    """The settings of the command itself."""

    model: Annotated[str | None, option("Model", "alias, folder, .gguf file or hub id [smollm2]")] = None
    config: Annotated[str | None, option("Program", "TOML file with settings [see gapless --help]")] = None
    cache_dir: Annotated[str | None, option("Program", "where models are kept [the user's cache]")] = None
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], option("Program", "log")] = "WARNING"


class AnswerOptions(Config, frozen=True):
    """What `run` and `chat` ask of the server."""

    url: Annotated[str | None, option("Answer", "use this running server, e.g. http://127.0.0.1:8000")] = None
    system: Annotated[str | None, option("Answer", "system message")] = None
    # Room for a long answer or a model that thinks first, but an end to one that has lost its way.
    max_tokens: Annotated[Positive, option("Answer", "longest answer in tokens")] = 2048
    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=100.0)] | None, option("Answer", "0: always the likeliest token [1]")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None, option("Answer", "sample from this share of probability [1]")
    ] = None


class ExplainOptions(Config, frozen=True):
    """What only `explain` wants to know."""

    gpu: Annotated[str, option("Explain", "card to reckon with, such as h200, a100, l4, rtx4090")] = "h200"


class Settings(Config, frozen=True):
    """All settings, checked."""

    program: ProgramOptions = ProgramOptions()
    engine: EngineOptions = EngineOptions()
    text: TextOptions = TextOptions()
    server: ServerOptions = ServerOptions()
    answer: AnswerOptions = AnswerOptions()
    explain: ExplainOptions = ExplainOptions()


class Option(msgspec.Struct, frozen=True):
    """One setting as seen from outside."""

    key: str  # TOML key; the flag and the environment variable follow from it
    part: str  # field of `Settings` that holds it
    group: str
    help: str
    default: Any
    value_type: Any  # annotated type: msgspec converts and checks with it
    expected: str  # "an integer between 0 and 65535"
    metavar: str

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.key.upper()

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag; for a switch, the one that turns it on and the one that turns it off."""
        name = self.key.replace("_", "-")
        if not self.is_switch:
            return (f"--{name}",)
        bare = name.removeprefix("enable-")
        return (f"--enable-{bare}", f"--disable-{bare}") if bare != name else (f"--{name}", f"--no-{name}")


def _options() -> dict[str, Option]:
    found: dict[str, Option] = {}
    for part, owner in typing.get_type_hints(Settings).items():
        hints = typing.get_type_hints(owner, include_extras=True)
        for field in inspect.type_info(owner).fields:  # type: ignore[attr-defined]
            meta = field.type
            expected, metavar = describe(meta)
            found[field.name] = Option(
                key=field.name,
                part=part,
                group=meta.extra["group"],
                help=meta.extra_json_schema["description"],
                default=field.default,
                value_type=hints[field.name],
                expected=expected,
                metavar=metavar,
            )
    return found


OPTIONS: Mapping[str, Option] = _options()


def default_config_path(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base) / "gapless" / "config.toml"


def load(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Merge flags (key -> text or bool, None: not given), the environment and the TOML file into checked settings.

    Raises `SettingsError`.
    """
    environ = os.environ if environ is None else environ
    from_flags = {key: value for key, value in flags.items() if value is not None}
    from_env = _environment(environ)
    config = from_flags.get("config", from_env.get("config"))
    from_file, path = _file(config, environ)
    values: dict[str, dict[str, Any]] = {part: {} for part in Settings.__struct_fields__}
    for key, opt in OPTIONS.items():
        if key in from_flags:
            values[opt.part][key] = _convert(opt, from_flags[key], opt.flags[0], strict=False)
        elif key in from_env:
            values[opt.part][key] = _convert(opt, from_env[key], opt.env, strict=False)
        elif key in from_file:
            values[opt.part][key] = _convert(opt, from_file[key], str(path), strict=True)
    return msgspec.convert(values, Settings)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    known = {opt.env: key for key, opt in OPTIONS.items()}
    found = {}
    for name, value in environ.items():
        if name in known:
            found[known[name]] = value
        elif name.startswith(ENV_PREFIX):
            raise SettingsError(f"unknown environment variable {name}{_nearest(name, known)}")
    return found


def _file(config: str | None, environ: Mapping[str, str]) -> tuple[dict[str, Any], Path]:
    path = Path(config).expanduser() if config is not None else default_config_path(environ)
    if config is None and not path.exists():
        return {}, path
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from None
    known = OPTIONS.keys() - {"config"}  # a file does not name another file
    for key in found:
        if key not in known:
            raise SettingsError(f"unknown setting {key!r} in {path}{_nearest(key, known)}")
    return found, path


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    # Without the prefix that all variables share, or everything would look alike.
    tails = {other.removeprefix(ENV_PREFIX): other for other in known}
    close = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), tails, n=1, cutoff=0.5)
    return f"; did you mean {tails[close[0]]}?" if close else ""


def _convert(opt: Option, value: Any, source: str, strict: bool) -> Any:
    try:
        return msgspec.convert(value, opt.value_type, strict=strict)
    except msgspec.ValidationError:
        raise SettingsError(f"{opt.key} must be {opt.expected}, got {value!r} (from {source})") from None

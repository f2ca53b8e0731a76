"""The library's options to an `EngineConfig`, and a model's name to its path. Errors name the option."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import inspect

from engine_core.plan import ProgressCallback
from engine_core.text_side import RESOLVE_MODEL, lookup
from ipc.config import EngineConfig, EngineOptions
from ipc.errors import UserError
from ipc.expected import describe

OWN_ARGUMENTS = ("chat_template", "progress")  # those of LLM and AsyncLLM that are no options of the engine


def make_config(path: str, options: Mapping[str, object]) -> EngineConfig:
    """Raises ValueError naming the option, its value and what would be right."""
    known = EngineOptions.__struct_fields__
    for name in options:
        if name not in known:
            arguments = (*known, *OWN_ARGUMENTS)
            close = difflib.get_close_matches(name, arguments, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(arguments)}"
            raise ValueError(f"unknown option {name}; {hint}")
    try:
        return msgspec.convert({"model": path, **options}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ValueError(_explain(str(error), options)) from None


def _explain(problem: str, options: Mapping[str, object]) -> str:
    """msgspec's "Expected ... - at `$.name`" in terms of the option."""
    name = problem.partition(" - at ")[2].strip("`").removeprefix("$.")
    fields = inspect.type_info(EngineOptions).fields  # type: ignore[attr-defined]
    kind = next((field.type for field in fields if field.name == name), None)
    return problem if kind is None else f"{name} must be {describe(kind)[0]}, got {options[name]!r}"


@contextmanager
def python_names() -> Iterator[None]:
    """Errors of the engine name the server's flags: here they name the library's options instead."""
    try:
        yield
    except UserError as error:
        error.args = (re.sub(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)", _python_name, str(error)),)
        raise


def _python_name(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return name if name in EngineOptions.__struct_fields__ else flag[0]


def resolve_path(model: str, progress: ProgressCallback) -> str:
    """The file or directory of a path, an alias or a hub id."""
    path = Path(model).expanduser()
    if path.exists():
        return str(path)
    try:
        resolve = lookup(RESOLVE_MODEL)
    except ImportError:
        raise ValueError(f"no such file or directory: {model}") from None
    return str(resolve(model, progress).path)

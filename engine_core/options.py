"""The library's options to an `EngineConfig`, and a model's name to its path. Errors name the option."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine_core.plan import ProgressCallback
from engine_core.text_side import RESOLVE_MODEL, lookup
from ipc.config import EngineConfig, EngineOptions


def make_config(path: str, options: Mapping[str, object]) -> EngineConfig:
    """Raises ValueError naming the option, its value and what would be right."""
    known = EngineOptions.__struct_fields__
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(known)}"
            raise ValueError(f"unknown option {name}; {hint}")
    try:
        return msgspec.convert({"model": path, **options}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ValueError(_explain(str(error), options)) from None


def _explain(problem: str, options: Mapping[str, object]) -> str:
    """msgspec's "Expected ... - at `$.name`" in terms of the option."""
    reason, _, where = problem.partition(" - at ")
    name = where.strip("`").removeprefix("$.").partition(".")[0].partition("[")[0]
    if name not in options:
        return problem
    bound = re.sub(r"^Expected ", "must be ", reason).replace("`", "")
    if reason.startswith("Invalid enum value"):
        bound = f"must be one of {', '.join(choices_of(name))}"
    return f"{name} {bound}, got {options[name]!r}"


def choices_of(name: str) -> list[str]:
    """The values an enumerated option may have."""
    field = next(item for item in msgspec.inspect.type_info(EngineOptions).fields if item.name == name)  # type: ignore[attr-defined]
    kind = field.type
    while isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    return [str(value) for value in getattr(kind, "values", ())]


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

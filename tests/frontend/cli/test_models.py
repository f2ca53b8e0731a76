"""A model's name becomes files, or a sentence that says what to do."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from frontend.cli import download, models
from frontend.cli.download import fetch_config
from frontend.cli.errors import ModelError
from frontend.cli.models import ALIASES, SMOLLM2, cached_models, models_dir, no_progress, resolve_model


def hf_folder(path: Path, *without: str) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if name not in without:
            (path / name).write_bytes(b"{}")
    return path


def test_a_complete_folder(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "tiny")
    found = resolve_model(str(folder))
    assert (found.path, found.name, found.format) == (folder, "tiny", "safetensors")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_names_what_is_missing(tmp_path: Path, name: str) -> None:
    folder = hf_folder(tmp_path / "tiny", name)
    shown = "*.safetensors" if name == "model.safetensors" else name
    with pytest.raises(ModelError) as raised:
        resolve_model(str(folder))
    assert str(raised.value) == f"{folder} is not a complete model: missing {shown}"


def test_random_weights_need_no_file_of_weights(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "tiny", "model.safetensors")
    assert resolve_model(str(folder), weights=False).path == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"missing tokenizer\.json$"):
        resolve_model(str(folder), weights=False)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "tiny", "model.safetensors")
    (folder / "a-00001.safetensors").write_bytes(b"")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a-00001.safetensors", "y": "a-00002.safetensors"}}))
    with pytest.raises(ModelError, match=r"missing a-00002\.safetensors"):
        resolve_model(str(folder))
    index.write_text("[]")
    with pytest.raises(ModelError, match="damaged"):
        resolve_model(str(folder))


def test_a_folder_of_ggufs_points_at_them(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"the folder holds m\.gguf"):
        resolve_model(str(tmp_path))


def test_gguf_files(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    good.write_bytes(b"GGUF....")
    bad.write_bytes(b"PK..")
    assert resolve_model(str(good)).format == "gguf"
    assert resolve_model(str(good)).name == "good"
    with pytest.raises(ModelError, match="is not a GGUF file"):
        resolve_model(str(bad))
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(str(tmp_path / "missing.gguf"))


def test_an_unknown_name_suggests_the_nearest_alias() -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2\?"):
        resolve_model("smolm2")
    with pytest.raises(ModelError, match="unknown model 'zzz'\n"):
        resolve_model("zzz")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models_dir() == tmp_path / "xdg" / "gapless" / "models"
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "own"))
    assert models_dir() == tmp_path / "own" / "models"
    assert models_dir(tmp_path / "argument") == tmp_path / "argument" / "models"


def test_aliases_are_found_in_the_cache_without_any_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smollm2_path: Path
) -> None:
    monkeypatch.setattr(download, "_install", lambda *_: pytest.fail("downloads though it is cached"))
    folder = models_dir(tmp_path)
    folder.mkdir(parents=True)
    (folder / SMOLLM2.file_name).symlink_to(smollm2_path)
    assert {resolve_model(name, cache_dir=tmp_path).path for name in (None, "SmolLM2", *ALIASES)} == {
        folder / SMOLLM2.file_name
    }
    (listed,) = cached_models(tmp_path)
    assert (listed.name, listed.size, listed.format) == ("smollm2:135m", SMOLLM2.size, "gguf")


class FakeHub:
    """Stands in for `snapshot_download`: a cache, and a hub behind it or none."""

    def __init__(self, cached: Path | None = None, online: Path | None = None, error: Exception | None = None) -> None:
        self.cached, self.online, self.error = cached, online, error
        self.downloads: list[dict[str, Any]] = []

    def __call__(self, repo: str, *, local_files_only: bool = False, dry_run: bool = False, **patterns: Any) -> Any:
        if local_files_only:
            if self.cached is None:
                raise errors.LocalEntryNotFoundError("not cached")
            return str(self.cached)
        if self.error is not None:
            raise self.error
        if dry_run:
            return []
        self.downloads.append(patterns)
        return str(self.online)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_a_cached_hub_model_asks_nobody(hub: FakeHub, tmp_path: Path) -> None:
    hub.cached = hf_folder(tmp_path / "snapshot")
    hub.error = AssertionError("asked the hub")
    found = resolve_model("org/model")
    assert (found.path, found.name, found.format) == (hub.cached, "org/model", "safetensors")


def test_a_half_downloaded_hub_model_is_completed(hub: FakeHub, tmp_path: Path) -> None:
    hub.cached = hf_folder(tmp_path / "half", "tokenizer.json")
    hub.online = hf_folder(tmp_path / "whole")
    assert resolve_model("org/model").path == hub.online
    (patterns,) = hub.downloads
    assert "*.safetensors" in patterns["allow_patterns"]
    assert not any(name.endswith(("bin", "gguf")) for name in patterns["allow_patterns"])


def test_a_hub_model_without_safetensors(hub: FakeHub, tmp_path: Path) -> None:
    hub.online = hf_folder(tmp_path / "snapshot", "model.safetensors")
    with pytest.raises(ModelError, match=r"missing \*\.safetensors"):
        resolve_model("org/model")


def test_offline_says_so_and_lists_the_cache(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smollm2_path: Path
) -> None:
    hub.error = errors.LocalEntryNotFoundError("no route")
    hub.error.__cause__ = ConnectionError("Name or service not known")
    folder = models_dir(tmp_path)
    folder.mkdir(parents=True)
    (folder / SMOLLM2.file_name).symlink_to(smollm2_path)
    with pytest.raises(ModelError) as raised:
        resolve_model("org/model", cache_dir=tmp_path)
    text = str(raised.value)
    assert "org/model is not in the cache, and the hub cannot be reached" in text
    assert "Name or service not known" in text
    assert "Cached models:\n  smollm2:135m" in text
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        resolve_model("org/model", cache_dir=tmp_path)


def test_an_unreachable_hub_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real client, against a port where nobody listens."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(models, "_cached_hub_models", lambda: iter(()))
    unreachable = r"org/model is not in the cache.*cannot be reached(?s:.*)Cached models: none"
    with pytest.raises(ModelError, match=unreachable):
        resolve_model("org/model", cache_dir=tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"tries again, after {seconds} s"))
    with pytest.raises(ModelError, match=unreachable):
        fetch_config("org/model", no_progress)


def test_a_config_is_taken_from_the_cache_or_fetched_alone(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.online = hf_folder(tmp_path / "online")
    assert fetch_config("org/model", no_progress) == hub.online
    assert [patterns["allow_patterns"] for patterns in hub.downloads] == [["config.json"]]
    hub.online = hf_folder(tmp_path / "without", "config.json")
    with pytest.raises(ModelError, match=r"org/model on the hub has no config\.json"):
        fetch_config("org/model", no_progress)
    cached = str(tmp_path / "cached" / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: cached)
    hub.error = AssertionError("asked the hub")
    assert fetch_config("org/model", no_progress) == tmp_path / "cached"


def test_complete_models_of_the_hub_cache_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the cache's real layout: blobs, snapshots, refs."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name, missing in (("whole", ()), ("half", ("config.json",))):
        repo = tmp_path / f"models--org--{name}"
        hf_folder(repo / "snapshots" / ("a" * 40), *missing)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("a" * 40)
        (repo / "blobs").mkdir()
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    assert [model.name for model in cached_models(tmp_path)] == ["org/whole"]

"""`gapless serve` and the private server of `gapless run`: the real processes, the real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from frontend.cli.launch import launch_config
from frontend.cli.models import ResolvedModel
from frontend.cli.settings import load
from frontend.cli.summary import summary
from ipc.messages import Ready

# Read before the fixtures move it: compiled CPU kernels are kept there too, and compiling them takes its time.
USERS_CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
README = Path(__file__).parents[3] / "README.md"
SMALL = ["--kv-tokens", "1024", "--max-model-len", "512", "--threads", "1"]


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, smollm2_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    (folder / smollm2_path.name).symlink_to(smollm2_path)
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", USERS_CACHE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a second start needs no network


@pytest.fixture
def served(cached: None) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "frontend.cli", "serve", "--port", "0", *SMALL],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line.rstrip())
        if line.startswith("Ctrl-C"):
            break
    yield process, shown
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.mark.model
def test_serve_prints_what_it_chose_answers_and_leaves_nothing(
    served: tuple[subprocess.Popen[str], list[str]], tmp_path: Path
) -> None:
    process, shown = served
    assert shown, process.communicate()[1]
    found = re.search(r"serves SmolLM2-135M-Instruct on (http://127\.0\.0\.1:\d+) \(ready in", shown[0])
    assert found is not None, shown
    url = found[1]
    rows = dict(line.split(maxsplit=1) for line in shown[5:] if line.startswith("  "))
    assert {"device", "dtype", "weights", "attention", "KV", "context"} <= rows.keys()
    assert rows["device"] == "cpu"
    assert rows["context"] == "512 tokens"

    curl = "\n".join(shown[2:4]).strip()
    assert curl.startswith(f"curl -N {url}/v1/chat/completions")
    body = json.loads(re.search(r"-d '(.*)'", curl)[1])  # type: ignore[index]
    body |= {"stream": False, "max_tokens": 3, "model": "smollm2"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 3

    # The README's example, against this server.
    example = re.search(r"```python\n(from openai.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    code = example[1].replace("http://127.0.0.1:8000", url)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.strip()

    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert "engine_core: " in err  # progress, in plain lines
    assert not any(child.is_running() for child in children)
    assert list(tmp_path.glob("gapless-*")) == []


@pytest.mark.model
def test_run_starts_the_model_for_one_answer(cached: None, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "frontend.cli", "run", "Say hello.", "--max-tokens", "3", "--temperature", "0", *SMALL],
        input="",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert list(tmp_path.glob("gapless-*")) == []


@pytest.mark.model
def test_a_start_that_fails_says_why_in_one_line(cached: None, tmp_path: Path) -> None:
    words = ["run", "Hi", "--chat-template", str(tmp_path / "missing.jinja"), *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "frontend.cli", *words], input="", capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: tokenizer_proc: ")
    assert "missing.jinja" in error
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("gapless-*")) == []


def test_the_server_answers_to_the_models_name_and_to_what_the_user_typed(tmp_path: Path) -> None:
    model = ResolvedModel(tmp_path / "m.gguf", "Model", "gguf")
    plain = launch_config(load({}), model)
    assert (plain.server.served_model_name, plain.model_aliases) == ("Model", ("smollm2",))
    path = launch_config(load({"model": str(tmp_path)}), model)
    assert (path.server.served_model_name, path.model_aliases) == ("Model", ())
    named = launch_config(load({"model": "org/m", "served_model_name": "mine"}), model)
    assert (named.server.served_model_name, named.model_aliases) == ("mine", ("Model", "org/m"))


def test_summary_rows_follow_the_facts() -> None:
    launch = launch_config(load({"api_key": "secret"}), ResolvedModel(Path("/m.gguf"), "Model", "gguf"))
    facts = {
        "frontend": Ready("frontend", 1, {"host": "::", "port": 80, "url": "http://[::1]:80"}),
        "engine_core": Ready("engine_core", 2, {"device": "cpu", "kv_tokens": 12345}, {"loading": 1.25, "idle": 0.01}),
        "tokenizer_proc": Ready("tokenizer_proc", 3, {"load_seconds": {"reading": 2.0}}, {"all": 3.0}),
    }
    text = summary(launch, facts, 3.21)
    assert "serves Model on http://[::1]:80 (ready in 3.2 s)" in text
    assert re.search(r"^  KV cache +12,345 tokens$", text, re.MULTILINE)
    whole = {
        "frontend": facts["frontend"],
        "engine_core": Ready("e", 2, {"kv_tokens": 600_000, "max_model_len": 16_384, "kv_dtype": "int8"}),
    }
    kv = r"^  KV cache +600,000 tokens, 36 requests of 16,384, in int8$"
    assert re.search(kv, summary(launch, whole, 1.0), re.MULTILINE)
    assert re.search(r"^  engine_core +loading 1\.2 s$", text, re.MULTILINE)
    assert re.search(r"^  tokenizer_proc +reading 2\.0 s$", text, re.MULTILINE)
    assert "dtype" not in text
    assert "secret" not in text  # it is on the screen of who runs it, and in many a log
    assert "$GAPLESS_API_KEY" in text

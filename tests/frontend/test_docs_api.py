"""docs/api.md names every route, field, error code and metric there is."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from frontend import cold
from frontend.metrics import Metrics
from frontend.openai import schema
from ipc.messages import ModelReady
from ipc.sampling import SamplingParams
from tests.frontend.fake import stats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`\n]+)`", PAGE))


@pytest.mark.parametrize(
    "body",
    [
        schema.ChatRequest,
        schema.CompletionRequest,
        schema.TokenizeRequest,
        schema.DetokenizeRequest,
        schema.ChatMessage,
    ],
)
def test_every_field_is_named(body: type[msgspec.Struct]) -> None:
    assert set(body.__struct_fields__) - NAMED == set()


def test_every_route_is_named() -> None:
    paths = set(re.findall(r'Route\("([^"{:]*)', Path(cold.__file__).read_text(encoding="utf-8")))
    assert len(paths) > 5
    for path in paths:
        assert re.search(rf"`(GET|POST) {re.escape(path)}|, `POST {re.escape(path)}", PAGE), path


def test_every_error_code_is_named() -> None:
    folders = (ROOT / name for name in ("frontend", "tokenizer_proc", "engine_core", "detokenizer_proc"))
    source = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    codes = set(re.findall(r'\bcode="(\w+)"', source))
    assert len(codes) > 5
    assert codes - NAMED == set()


def test_every_metric_is_named() -> None:
    metrics = Metrics("m")
    metrics.heard(stats())
    metrics.ready(ModelReady(max_model_len=1, vocab_size=1, facts={"peaks": {"bytes": 1.0, "flops": 1.0}}))
    names = set(re.findall(r"^# TYPE gapless:(\w+) ", metrics.render().decode(), re.MULTILINE))
    assert len(names) > 15
    assert {name for name in names if not name.endswith("_created")} - NAMED == set()


def test_the_bounds_are_those_of_the_code() -> None:
    good = {"temperature": 100, "n": 128, "repetition_penalty": 10, "prompt_logprobs": 20, "stop": ("x" * 4096,) * 64}
    SamplingParams(**good)  # type: ignore[arg-type]
    for field, value in {**good, "stop": ("x",) * 65}.items():
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value if field == "stop" else value + 1})  # type: ignore[arg-type, operator]

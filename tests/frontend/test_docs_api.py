"""docs/api.md names every route, field, error code and metric there is."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from frontend import cold
from frontend.errors import ApiError
from frontend.metrics import Metrics
from frontend.openai import schema
from frontend.openai.job import Limits
from frontend.openai.parse import CHAT, COMPLETIONS, Parser
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


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, "{", None, "invalid_json"),
        (CHAT, "{}", None, "invalid_type"),
        (CHAT, '{"messages": 5}', "messages", "invalid_type"),
        (CHAT, '{"messages": [{"role": "user", "content": "x"}], "temperature": 200}', "temperature", "invalid_value"),
        (COMPLETIONS, '{"prompt": [99]}', "prompt", "invalid_value"),
        (CHAT, '{"messages": []}', "messages", None),
        (COMPLETIONS, '{"prompt": []}', "prompt", None),
        (CHAT, '{"messages": [{"role": "x", "content": "x"}]}', "messages", None),
        (CHAT, '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages", None),
        (CHAT, '{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}', "top_logprobs", None),
        (COMPLETIONS, '{"prompt": "x", "guided_regex": "x"}', "guided_regex", None),
    ],
)
def test_a_400_has_the_code_and_param_that_the_page_says(
    path: str, body: str, param: str | None, code: str | None
) -> None:
    with pytest.raises(ApiError) as caught:
        Parser().job(path, body.encode(), Limits(max_model_len=64, vocab_size=10))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)

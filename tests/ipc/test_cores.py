from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from ipc.config import ServerOptions
from ipc.cores import default_detokenizers, default_frontends, default_tokenizers


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("frontend_procs", default_frontends),
        ("tokenizer_procs", default_tokenizers),
        ("detokenizer_procs", default_detokenizers),
    ],
)
def test_the_help_tells_how_many_processes_there_are(field: str, default: Callable[[int], int]) -> None:
    """For every number of cores, what the setting's text promises is what the launcher does."""
    types = {found.name: found.type for found in msgspec.inspect.type_info(ServerOptions).fields}  # type: ignore[attr-defined]
    text = types[field].extra_json_schema["description"]
    rule = re.search(r"\[cores / (\d+), at most (\d+)\]", text)
    assert rule is not None, text
    for cores in range(1, 257):
        assert default(cores) == min(int(rule[2]), max(1, cores // int(rule[1]))), cores

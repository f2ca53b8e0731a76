"""Fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.cli.models import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, found as the product finds it: from the cache, or downloaded once."""
    return Path(resolve_model("smollm2").path)

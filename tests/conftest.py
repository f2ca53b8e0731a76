"""Fixtures of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Triton decides between compiler and interpreter when it is imported, by whichever test file comes first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of the servers that tests start are not the user's."""
    path = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(path)
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, found as the product finds it: from the cache, or downloaded once."""
    from frontend.cli.models import resolve_model  # tests of the kernels also run where no frontend is installed

    return Path(resolve_model("smollm2").path)

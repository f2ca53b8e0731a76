"""The engine: usable alone as a library.

    from engine_core import LLM, SamplingParams

Importing this package is cheap; torch is imported when a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.async_llm import AsyncLLM as AsyncLLM
    from engine_core.llm import LLM as LLM
    from ipc.sampling import SamplingParams as SamplingParams

_HOMES = {"LLM": "engine_core.llm", "AsyncLLM": "engine_core.async_llm", "SamplingParams": "ipc.sampling"}

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)

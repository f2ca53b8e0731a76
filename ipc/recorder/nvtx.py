"""The recorder's spans as NVTX ranges, for a process that one of NVIDIA's profilers has started.

Whether there is a profiler is asked once, at the start: without one this module's only cost is a look at the
environment, and `nvtx` is never imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ipc.recorder.events import KINDS, WRITE
from ipc.recorder.ring import Recorder

logger = logging.getLogger(__name__)

DOMAIN = "gapless"
# What a profiler sets in the processes that it starts; NVTX itself looks for the first.
INJECTION = "NVTX_INJECTION64_PATH"
# Other tasks of an event loop may run inside such a span: it cannot be part of the thread's stack of ranges.
_CROSSING = frozenset({WRITE})


def profiler_attached(environ: Mapping[str, str] = os.environ) -> bool:
    return bool(environ.get(INJECTION))


def with_nvtx(recorder: Recorder) -> Recorder:
    """`recorder`, and NVTX ranges beside it if a profiler is there to see them."""
    if not profiler_attached():
        return recorder
    try:
        return NvtxRecorder(recorder)
    except ImportError:
        logger.warning("a profiler is attached, but the package nvtx is not installed: it will see no ranges")
        return recorder


class NvtxRecorder(Recorder):
    """Passes everything on to `inner`. Raises ImportError without the package `nvtx`."""

    def __init__(self, inner: Recorder) -> None:
        import nvtx

        self._nvtx, self._inner = nvtx, inner
        self.keeps = inner.keeps
        self._names = {code: kind.name for code, kind in KINDS.items()}
        # Loads the profiler's library: half a second, better now than in a step.
        nvtx.push_range("start", domain=DOMAIN)
        nvtx.pop_range(domain=DOMAIN)
        self._crossing: dict[int, Any] = {}  # time of `begin` -> NVTX's handle

    def begin(self, code: int) -> int:
        if code not in _CROSSING:
            self._nvtx.push_range(self._names[code], domain=DOMAIN)
            return self._inner.begin(code)
        handle = self._nvtx.start_range(self._names[code], domain=DOMAIN)
        began = self._inner.begin(code)
        self._crossing[began] = handle
        return began

    def end(self, code: int, began: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        self._inner.end(code, began, id, a, b, c)
        if code not in _CROSSING:
            self._nvtx.pop_range(domain=DOMAIN)
        elif (handle := self._crossing.pop(began, None)) is not None:
            self._nvtx.end_range(handle)

    def span(self, code: int, began: int, ended: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        self._inner.span(code, began, ended, id, a, b, c)

    def mark(self, code: int, id: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        self._inner.mark(code, id, a, b, c)

    def watch_gc(self) -> None:
        self._inner.watch_gc()

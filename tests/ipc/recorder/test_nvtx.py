from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from ipc.recorder.events import COMMIT, GPU, LAUNCH, SCHEDULE, WRITE
from ipc.recorder.nvtx import INJECTION, NvtxRecorder, profiler_attached, with_nvtx
from ipc.recorder.reader import read_ring
from ipc.recorder.ring import Recorder, RingRecorder

ROOT = Path(__file__).parents[3]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What NVTX hears, from a stand-in for the package."""
    heard: list[tuple[str, ...]] = []
    fake = types.ModuleType("nvtx")

    def start(name: str, domain: str) -> int:
        heard.append(("start", name, domain))
        return len(heard)

    fake.push_range = lambda name, domain: heard.append(("push", name, domain))  # type: ignore[attr-defined]
    fake.pop_range = lambda domain: heard.append(("pop", domain))  # type: ignore[attr-defined]
    fake.start_range = start  # type: ignore[attr-defined]
    fake.end_range = lambda handle: heard.append(("end", str(handle)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    return heard


def test_ranges_have_the_names_of_the_spans(calls: list[tuple[str, ...]], tmp_path: Path) -> None:
    inner = RingRecorder(tmp_path, "engine_core", 16)
    recorder = NvtxRecorder(inner)
    assert recorder.keeps
    assert calls == [("push", "start", "gapless"), ("pop", "gapless")]
    calls.clear()
    outer = recorder.begin(LAUNCH)
    began = recorder.begin(SCHEDULE)
    recorder.end(SCHEDULE, began, 3, 1, 2, 4)
    recorder.end(LAUNCH, outer, 3)
    recorder.span(GPU, began, began + 5, 3)
    recorder.mark(COMMIT, 3)
    pop = ("pop", "gapless")
    assert calls == [("push", "launch", "gapless"), ("push", "schedule", "gapless"), pop, pop]
    assert [(r.code, r.id, r.a, r.b, r.c) for r in read_ring(inner.path).records] == [
        (SCHEDULE, 3, 1, 2, 4), (LAUNCH, 3, 0, 0, 0), (GPU, 3, 0, 0, 0), (COMMIT, 3, 0, 0, 0),
    ]  # fmt: skip


def test_spans_between_which_other_tasks_run_are_no_part_of_the_stack(calls: list[tuple[str, ...]]) -> None:
    recorder = NvtxRecorder(Recorder())
    calls.clear()
    first = recorder.begin(WRITE)
    second = recorder.begin(WRITE)
    recorder.end(WRITE, first)
    recorder.end(WRITE, second)
    assert calls == [("start", "write", "gapless"), ("start", "write", "gapless"), ("end", "1"), ("end", "2")]


def test_without_a_profiler_nothing_is_imported() -> None:
    code = (
        "import sys; from ipc.recorder.nvtx import with_nvtx; from ipc.recorder.ring import Recorder;"
        "recorder = Recorder(); assert with_nvtx(recorder) is recorder; assert 'nvtx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PATH": ""}, check=True)


def test_whether_a_profiler_is_there(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]]) -> None:
    assert not profiler_attached({})
    assert not profiler_attached({INJECTION: ""})
    assert profiler_attached({INJECTION: "/opt/nsys/libToolsInjection64.so"})
    monkeypatch.setenv(INJECTION, "/opt/nsys/libToolsInjection64.so")
    assert isinstance(with_nvtx(Recorder()), NvtxRecorder)


def test_a_profiler_without_the_package_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(INJECTION, "/opt/nsys/libToolsInjection64.so")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    recorder = Recorder()
    assert with_nvtx(recorder) is recorder
    assert "nvtx is not installed" in caplog.text

"""The flight recorder's view of a GPU: steps by its own clock, placed in the host's time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from engine_core.build import build_engine
from frontend.trace.summary import summarize
from frontend.trace.timeline import build
from ipc.messages import Profile
from ipc.recorder.events import COLLECT, GPU, LAUNCH
from ipc.recorder.reader import read_ring
from ipc.recorder.ring import RingRecorder
from ipc.sampling import SamplingParams
from tests.gpu.models import generate, save_model, settings

TOKENS = 300
SLACK_NS = 50_000  # how late the host may see a step's end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_model(folder, "qwen3")
    return folder


@pytest.mark.parametrize("overlap", [True, False])
def test_each_step_lies_between_its_launch_and_its_tokens(model: Path, tmp_path: Path, overlap: bool) -> None:
    recorder = RingRecorder(tmp_path, "engine_core", 1 << 14)
    engine = build_engine(settings(model, overlap=overlap, profile_steps="20:40"), recorder=recorder)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    generate(engine, [([1 + index, 2, 3], sampling) for index in range(4)])
    recording = read_ring(recorder.path)
    steps = [record for record in recording.records if record.code == GPU and record.id]
    launches = {record.id: record for record in recording.records if record.code == LAUNCH}
    collects = {record.id: record for record in recording.records if record.code == COLLECT}
    assert len(steps) >= TOKENS
    assert [step.id for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        assert 1_000 < step.duration < 1_000_000_000
        assert step.begin >= launches[step.id].begin
        assert step.end <= collects[step.id].end
    for earlier, later in itertools.pairwise(steps):
        assert later.begin >= earlier.end - SLACK_NS  # the chain is moved to the host's clock now and then
    (summary,) = summarize(build([recording])).engines
    assert summary.device == "GPU"
    assert summary.busy + summary.idle_total + summary.no_requests == summary.span
    print(f"overlap {overlap}: busy {summary.share(summary.busy):.1%}, idle by cause {summary.idle}")


def test_a_profilers_capture_can_be_started_and_stopped(model: Path) -> None:
    engine = build_engine(settings(model))
    for on in (True, False):
        assert engine.profile(Profile(call_id=1, frontend=0, on=on)).error is None

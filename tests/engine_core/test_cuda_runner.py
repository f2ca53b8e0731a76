"""The GPU runner's steps with prompt tokens, its kernels in Triton's interpreter, against transformers' logits: as a
graph would run them, padded, with decode rows as prompts or by decode attention, and launch by launch as they are."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine_core.cuda import mixed_graphs, prompt_logprobs
from engine_core.cuda import runner as cuda_runner
from engine_core.cuda.results import TURNS
from engine_core.cuda.runner import CudaRunner
from engine_core.kernels import triton_slots
from engine_core.layers.linear import DenseLinear
from engine_core.loader import checkpoint
from engine_core.loader.checkpoint import ModelBuilder
from engine_core.loader.select import open_checkpoint
from engine_core.loader.weights import dense
from engine_core.logprobs import token_logprobs
from engine_core.models.registry import model_class
from engine_core.plan import ScheduledRow, StepPlan, StepTokens
from engine_core.request import Request
from engine_core.runner import _attention_spec
from ipc.config import EngineConfig
from ipc.sampling import SamplingParams
from tests.engine_core.tiny_models import make_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same steps on the GPU")
BLOCK_SIZE, CPU = 16, torch.device("cpu")


class Nothing:
    """An event or a stream of a device that does everything at once."""

    def __init__(self, *args: object, **options: object) -> None:
        """All alike."""

    def record(self, *args: object) -> None:
        """Has happened."""

    synchronize = wait_event = record

    def query(self) -> bool:
        return True


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Event", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None: product(a, b))
    monkeypatch.setattr(cuda_runner, "product_rate", lambda *_: 1e15)

    def dense_linear(
        parts: Sequence[Any], biases: Sequence[Any] = (), *, mode: str = "none", **kind: Any
    ) -> DenseLinear:
        return DenseLinear(dense(parts, **kind), dense(biases, **kind) if biases else None)

    monkeypatch.setattr(checkpoint, "make_linear", dense_linear)  # as on a GPU, not packed for the CPU's kernels


class Steps:
    def __init__(self, folder: Path) -> None:
        self.reference: PreTrainedModel = make_model(
            "qwen3", 0, hidden_size=64, intermediate_size=32, head_dim=16, num_attention_heads=2, num_hidden_layers=1
        )
        self.reference.save_pretrained(folder)
        opened = open_checkpoint(str(folder))
        model = model_class(opened.config.architecture)(ModelBuilder(opened, "none", torch.float32, CPU))
        spec = _attention_spec(opened.config, BLOCK_SIZE, torch.float32, CPU)
        config = EngineConfig(model=str(folder), max_num_seqs=6, max_num_batched_tokens=64)
        self.runner = CudaRunner(model, spec, config, 256)
        results = self.runner.sampling.results
        results._copies, results._copied = Nothing(), [Nothing()] * TURNS  # type: ignore[assignment, list-item]
        self.runner.allocate(64)
        self.runner.cache.fill_(float("nan"))  # what failed requests may leave behind
        self.runner.cache[:, :, 0] = 0.0  # block 0 is padding's
        self.sizes: list[int] = []
        self._logits = torch.empty(0)
        draw = self.runner.sampling.draw

        def keep(logits: torch.Tensor, *rest: Any) -> None:
            self._logits = logits.clone()
            self.sizes.append(len(logits))
            draw(logits, *rest)

        self.runner.sampling.draw = keep  # type: ignore[assignment, method-assign]

    def run(self, rows: Sequence[tuple[Request, int, int]]) -> StepTokens:
        """One step of (request, start, stop); each that reaches its end samples, and its logits are checked."""
        scheduled = tuple(
            ScheduledRow(request, start, stop - start, stop >= request.num_tokens) for request, start, stop in rows
        )
        plan = StepPlan(scheduled, num_tokens=sum(row.count for row in scheduled))
        tokens = self.runner.launch(plan).wait()
        assert not tokens.failed
        sampling = [row for row in scheduled if row.samples]
        for row, token, logits in zip(sampling, tokens.token_ids, self._logits, strict=False):
            ids = row.request.known_ids(0, row.stop)
            expected = self.reference(torch.tensor([ids])).logits[0, -1]
            assert float((logits - expected).abs().max()) < 1e-4
            assert token == int(logits.argmax())  # not of `expected`, whose two largest may be as near as that
            row.request.output_ids.append(token)
        return tokens


@pytest.fixture(params=["padded", "decode rows as prompts", "as it is"])
def steps(
    request: pytest.FixtureRequest, no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Steps, list[int]]:
    if request.param == "padded":
        monkeypatch.setattr(mixed_graphs, "FEW_ROWS", 2)
        monkeypatch.setattr(mixed_graphs, "ROW_LADDER", (4,))
    made = Steps(tmp_path)
    if request.param == "as it is":
        monkeypatch.setattr(made.runner.mixed_graphs, "_pays", lambda *_: False)
    return made, {"padded": [4, 4, 8, 8], "decode rows as prompts": [32] * 4, "as it is": [2, 2, 4, 5]}[request.param]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding tokens compute with what is in memory
@torch.inference_mode()
def test_prompts_beside_decode_rows(steps: tuple[Steps, list[int]]) -> None:
    made, sizes = steps
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng, blocks = random.Random(seed), iter(range(1, 64))
    a, b, c, d, e = (
        Request(
            slot,
            [rng.randrange(300) for _ in range(length)],
            SamplingParams(temperature=0.0),
            block_ids=[next(blocks) for _ in range(4)],
            slot=slot,
        )
        for slot, length in enumerate((20, 37, 5, 3, 30))
    )
    made.run([(a, 0, 20), (c, 0, 5)])
    made.run([(b, 0, 17), (a, 20, 21), (c, 5, 6)])
    made.run([(a, 21, 22), (c, 6, 7), (b, 17, 37), (d, 0, 3)])
    made.run([(d, 3, 4), (e, 0, 30), (c, 7, 8), (a, 22, 23), (b, 37, 38)])
    assert made.sizes == sizes


@torch.inference_mode()
def test_prompt_logprobs_without_a_wait(no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two chunks, beside one that asks for none; more positions than are scored at a time."""
    monkeypatch.setattr(triton_slots, "PARTS", 2)
    monkeypatch.setattr(prompt_logprobs, "ROWS", 5)
    made = Steps(tmp_path)
    rng = random.Random(4)
    asked, other = (
        Request(
            slot,
            [rng.randrange(300) for _ in range(length)],
            SamplingParams(temperature=0.0, prompt_logprobs=wanted),
            block_ids=[1 + slot],
            slot=slot,
        )
        for slot, (length, wanted) in enumerate(((12, 3), (4, None)))
    )
    found = []
    for start, stop in ((0, 7), (7, 12)):
        tokens = made.run([(asked, start, stop), *([(other, 0, 4)] if start else [])])
        assert list(tokens.prompt_logprobs) == [asked.request_id]
        found += tokens.prompt_logprobs[asked.request_id]
    ids = asked.prompt_ids.tolist()
    logits = made.reference(torch.tensor([ids])).logits[0].numpy()
    assert len(found) == len(ids) - 1
    for value, row, token in zip(found, logits, ids[1:], strict=False):
        expected = token_logprobs(row, token, 3)
        assert (value.rank, value.top_ids) == (expected.rank, expected.top_ids)
        assert value.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert np.frombuffer(value.top_logprobs, "<f4") == pytest.approx(
            np.frombuffer(expected.top_logprobs, "<f4"), abs=1e-4
        )

"""Memory on the GPU: what the pool leaves, and what happens when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_core.cuda.runner import CudaRunner
from engine_core.errors import UserError
from engine_core.runner import build_runner
from ipc.codec import pack_ids
from ipc.messages import Generate
from ipc.sampling import SamplingParams
from tests.gpu.models import Answer, collect, engine, generate, save_model, settings

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_model(folder, "qwen3", max_position_embeddings=8192)
    return folder


def test_the_largest_step_fits_beside_a_pool_that_takes_the_rest(model: Path) -> None:
    """The pool is cut to what `max_num_seqs` full requests need, so there must be many to fill a card."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    sizes = {"max_num_seqs": 512, "max_num_batched_tokens": 8192}
    on_gpu = engine(model, dtype="bfloat16", kv_tokens=None, gpu_memory_utilization=0.3, **sizes)
    per_token = on_gpu.facts.kv_bytes_per_token
    pool = on_gpu.facts.num_blocks * on_gpu.facts.block_size * per_token
    assert pool <= 0.3 * total
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    generate(on_gpu, [([1] * 4000, GREEDY), ([2] * 3600, GREEDY), *[([3], GREEDY)] * 400])
    grown = torch.cuda.max_memory_reserved() - before
    assert grown < 2**30, f"{grown / 2**20:.0f} MiB more than at the start"


def test_a_step_without_memory_ends_its_requests_and_the_engine_lives_on(model: Path) -> None:
    on_gpu = engine(model, kv_tokens=16384, max_num_batched_tokens=8192)
    whole = generate(on_gpu, [([5] * 40, GREEDY)])[0].tokens
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated() / total)
        prompt = pack_ids([7] * 8000)  # what it needs was cached, and is not any more
        on_gpu.add(Generate(request_id=7, frontend=0, prompt_ids=prompt, sampling=GREEDY, arrival=0))
        (lost,) = [finished for _ in range(2) for finished in on_gpu.step().finished]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert lost.error is not None
    assert "not enough memory for a step of 8000 tokens; lower --max-num-batched-tokens" in lost.error.message
    answers = {8: Answer()}
    on_gpu.add(Generate(request_id=8, frontend=0, prompt_ids=pack_ids([5] * 40), sampling=GREEDY, arrival=0))
    while on_gpu.has_work:
        collect(on_gpu, answers)
    assert answers[8].tokens == whole


def test_a_start_without_memory_names_the_flag(model: Path) -> None:
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(0.002)
        with pytest.raises(UserError, match=r"not enough memory for .*; (lower --|use a smaller)"):
            build_runner(settings(model, kv_tokens=10**6))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_graphs_there_is_no_memory_for_are_not_captured(model: Path) -> None:
    on_gpu = engine(model, kv_tokens=16384, max_num_batched_tokens=8192)
    jobs = [([5] * 40, GREEDY), ([6] * 3000, GREEDY)]
    expected = [answer.tokens for answer in generate(on_gpu, jobs)]
    runner = on_gpu._pipeline.runner
    assert isinstance(runner, CudaRunner)
    for refuse in (False, True):  # by what is free, then by what a capture runs into
        runner.graphs.forget()
        torch.cuda.empty_cache()
        runner.graphs.reserve = 1 if refuse else 1 << 50
        if refuse:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated() / total)
        try:
            with torch.inference_mode():
                assert next(runner.mixed_graphs.prepare(), "none") == "none"
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert runner.graphs.full
        assert [answer.tokens for answer in generate(on_gpu, jobs, first_id=10 + 10 * refuse)] == expected

"""The runner: plans in, sampled tokens and log-probabilities out; settings that cannot work are named."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine_core.attention.base import AttentionSpec
from engine_core.attention.select import with_pool
from engine_core.batch import make_batch
from engine_core.build import build_engine
from engine_core.errors import UserError
from engine_core.kv_size import choose_num_blocks
from engine_core.plan import ScheduledRow, StepPlan, StepTokens
from engine_core.request import Request
from engine_core.runner import ModelRunner, build_runner
from engine_core.warmup import largest_step, run_largest_step
from ipc.codec import pack_ids
from ipc.config import EngineConfig
from ipc.messages import Generate
from ipc.sampling import SamplingParams
from tests.engine_core.tiny_models import load, reference_logits, save_model, scattered_requests


def run(runner: ModelRunner, *rows: tuple[Request, int, int, bool]) -> StepTokens:
    plan = StepPlan(
        tuple(ScheduledRow(request, start, stop - start, samples) for request, start, stop, samples in rows)
    )
    return runner.launch(plan).wait()


def requests(sampling: SamplingParams, *lengths: int) -> list[Request]:
    rng = random.Random(8)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in lengths]
    made = scattered_requests([[*ids, *ids] for ids in prompts], 16, 1024, rng)  # blocks for an answer, too
    return [
        Request(old.request_id, ids, sampling, block_ids=old.block_ids, slot=old.slot)
        for old, ids in zip(made, prompts, strict=True)
    ]


def test_only_rows_that_sample_get_tokens(tmp_path: Path) -> None:
    reference = save_model(tmp_path, "llama")
    runner = load(tmp_path)
    a, b, c = requests(SamplingParams(temperature=0.0), 40, 30, 20)
    tokens = run(runner, (a, 0, 10, False), (b, 0, 30, True), (c, 0, 20, True))
    expected = [int(reference_logits(reference, request.prompt_ids)[-1].argmax()) for request in (b, c)]
    assert tokens.token_ids == expected
    assert run(runner, (a, 10, 30, False)).token_ids == []
    assert run(runner).token_ids == []


def test_a_step_launched_before_the_last_token_is_committed(tmp_path: Path) -> None:
    """Its input is the token that the runner has sampled for that slot."""
    save_model(tmp_path, "qwen3")
    runner = load(tmp_path)
    committed, ahead = requests(SamplingParams(temperature=0.0), 20, 20)
    ahead.prompt_ids = committed.prompt_ids
    for position in range(20, 30):
        first = run(runner, (committed, position - 1 if position > 20 else 0, position, True))
        committed.output_ids += first.token_ids
    in_flight: list[int] = []
    for position in range(20, 30):
        in_flight += run(runner, (ahead, position - 1 if position > 20 else 0, position, True)).token_ids
        if ahead.num_pending:
            ahead.output_ids.append(in_flight[-2])
        ahead.num_pending = 1
    assert in_flight == committed.output_ids


def test_prompt_logprobs_in_chunks(tmp_path: Path) -> None:
    reference = save_model(tmp_path, "llama")
    runner = load(tmp_path)
    wanted = SamplingParams(temperature=0.0, prompt_logprobs=2)
    request, other = requests(wanted, 300, 7)
    values = []
    for start, stop in ((0, 270), (270, 271), (271, 300)):
        tokens = run(runner, (other, 0, 7, True), (request, start, stop, stop == 300))
        values += tokens.prompt_logprobs[request.request_id]
        assert len(tokens.prompt_logprobs[other.request_id]) == 6
    logprobs = reference_logits(reference, request.prompt_ids).log_softmax(-1)
    following = torch.tensor(request.prompt_ids[1:])
    expected = logprobs[:-1].gather(1, following[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([value.logprob for value in values]), expected, atol=1e-4, rtol=0)


def test_a_decode_step_gives_no_prompt_logprobs(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    runner = load(tmp_path)
    (request,) = requests(SamplingParams(temperature=0.0, prompt_logprobs=0), 10)
    request.output_ids += run(runner, (request, 0, 10, True)).token_ids
    assert run(runner, (request, 10, 11, True)).prompt_logprobs == {}


def test_batch_layout() -> None:
    first = Request(1, list(range(100, 110)), SamplingParams(), block_ids=[7, 2, 5], slot=0)
    second = Request(2, [50, 51, 52], SamplingParams(), block_ids=[3], slot=1, output_ids=[60])
    rows = (ScheduledRow(first, 3, 6, False), ScheduledRow(second, 3, 1, True))
    batch = make_batch(StepPlan(rows), 4, torch.device("cpu"))
    assert batch.token_ids.tolist() == [103, 104, 105, 106, 107, 108, 60]
    assert batch.positions.tolist() == [3, 4, 5, 6, 7, 8, 3]
    assert batch.slot_mapping.tolist() == [31, 8, 9, 10, 11, 20, 15]
    assert batch.block_tables.tolist() == [[7, 2, 5], [3, 0, 0]]
    assert batch.query_starts.tolist() == [0, 6, 7]
    assert batch.query_lens.tolist() == [6, 1]
    assert batch.context_lens.tolist() == [9, 4]
    assert batch.logits_rows.tolist() == [6]


def test_decode_rows_take_the_last_sampled_ids_of_their_slots_and_chunks_their_own() -> None:
    sampling = SamplingParams()
    committed = Request(1, [5, 6], sampling, block_ids=[1], slot=3, output_ids=[70])
    pending = Request(2, [7, 8, 9], sampling, block_ids=[2], slot=0, output_ids=[71], num_pending=1)
    resumed = Request(3, [10, 11], sampling, block_ids=[3], slot=2, output_ids=[72, 73])  # in another's former slot
    new = Request(4, [20, 21, 22, 23], sampling, block_ids=[4], slot=1)
    last = np.array([81, 99, 99, 70])
    rows = (ScheduledRow(committed, 2, 1, True), ScheduledRow(pending, 4, 1, True))
    chunks = (ScheduledRow(resumed, 3, 1, True), ScheduledRow(new, 1, 2, False))
    for plan, expected in (
        (StepPlan(rows, num_tokens=2, num_decodes=2), [70, 81]),
        (StepPlan((*rows, *chunks), num_tokens=5, num_decodes=2), [70, 81, 73, 21, 22]),
        (StepPlan(chunks, num_tokens=3), [73, 21, 22]),
    ):
        assert make_batch(plan, 4, torch.device("cpu"), last).token_ids.tolist() == expected


def test_facts_and_progress(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", eos_token_id=4)
    news: list[tuple[str, float | None]] = []
    config = EngineConfig(model=str(tmp_path), kv_tokens=100, threads=1, device="cpu")
    _, facts = build_runner(config, lambda phase, fraction: news.append((phase, fraction)))
    assert facts.architecture == "Qwen3ForCausalLM"
    assert (facts.device, facts.dtype, facts.weights) == ("cpu", "float32", "none")
    assert facts.num_blocks == 1 + 7  # block 0 holds nothing; 100 tokens need 7 blocks of 16
    assert facts.max_model_len == 112  # what the pool holds
    assert (facts.vocab_size, facts.eos_token_ids) == (320, {4})
    assert facts.kv_bytes_per_token == 2 * 3 * 2 * 32 * 4
    _, facts = build_runner(msgspec.structs.replace(config, weights="int8"))
    assert (facts.kv_dtype, facts.kv_bytes_per_token) == ("int8", 2 * 3 * 2 * (32 + 4))
    _, facts = build_runner(msgspec.structs.replace(config, weights="int8", kv_cache_dtype="float16"))
    assert (facts.kv_dtype, facts.kv_bytes_per_token) == ("float16", 2 * 3 * 2 * 32 * 2)
    _, facts = build_runner(msgspec.structs.replace(config, weights="int8", attention="torch"))
    assert facts.kv_bytes_per_token == 2 * 3 * 2 * 32 * 4
    fractions = [fraction for phase, fraction in news if phase == "loading weights"]
    assert fractions == sorted(fractions, key=float)
    assert fractions[-1] == 1.0
    assert news[-1][0] in ("warming up", "compiling kernels")  # the latter at a first start


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, r"--max-model-len 513 must be .* 512 tokens"),
        ({"kv_tokens": 10**12}, r"--kv-tokens 1000000000000 needs .* GiB.*--kv-tokens \d+ would fit"),
        ({"kv_bytes": "10TiB"}, r"--kv-bytes 10TiB needs 10240.0 GiB, .*--kv-tokens \d+ would fit"),
        ({"kv_bytes": "1KB"}, r"--kv-bytes 1KB is less than one block takes: 0.\d MiB"),
        ({"kv_bytes": "1GB", "kv_tokens": 100}, "give one of them"),
        ({"kv_bytes": "100KB", "max_model_len": 200}, r"cannot hold one request .*raise --kv-bytes or lower"),
        ({"kv_tokens": 100, "max_model_len": 200}, r"cannot hold one request .*raise --kv-tokens or lower"),
        ({"attention": "flash_attn"}, "--attention flash_attn"),
        ({"device": "cuda"}, "--device cuda"),
    ],
)
def test_settings_that_cannot_work_name_the_flag(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        settings = {**settings, "attention": "cpu"}
        message = "--attention cpu"
    save_model(tmp_path, "llama")
    with pytest.raises(UserError, match=message):
        build_runner(EngineConfig(model=str(tmp_path), threads=1, **settings))


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_attention_that_is_not_there_is_refused_before_loading(name: Any, tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    news: list[str] = []
    with pytest.raises(UserError, match=f"--attention {name} is not there for --device cpu; choose one of: auto, cpu"):
        build_runner(
            EngineConfig(model=str(tmp_path), device="cpu", attention=name), lambda phase, fraction: news.append(phase)
        )
    assert not news


@pytest.mark.parametrize(
    ("settings", "head_dim"),
    [
        ({"attention": "torch", "kv_cache_dtype": "int8"}, 32),
        ({"attention": "torch", "kv_cache_dtype": "float16"}, 32),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float16"}, 32),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, 32),
        ({"block_size": 8, "kv_cache_dtype": "int8"}, 32),
        ({"kv_cache_dtype": "int8"}, 80),
        ({"kv_cache_dtype": "float16"}, 24),
    ],
)
def test_a_pool_that_is_not_there_is_refused_before_loading(
    settings: dict[str, Any], head_dim: int, tmp_path: Path
) -> None:
    save_model(tmp_path, "qwen3", head_dim=head_dim)
    news: list[float | None] = []
    multiple = 32 if settings["kv_cache_dtype"] == "int8" else 16
    message = (
        f"--kv-cache-dtype {settings['kv_cache_dtype']} needs .* --block-size 16, 32 or 64, "
        f"head sizes that are multiples of {multiple}; use"
    )
    with pytest.raises(UserError, match=message):
        build_runner(
            EngineConfig(model=str(tmp_path), device="cpu", threads=1, **settings),
            lambda phase, fraction: news.append(fraction),
        )
    assert news == [0.0]  # weights were about to be loaded


def spec(block_size: int = 16, num_layers: int = 2) -> AttentionSpec:
    return AttentionSpec(num_layers, 4, 2, 32, block_size, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("wanted", ["int8", "float16"])
def test_a_gpu_keeps_what_it_computes(wanted: str) -> None:
    gpu = replace(spec(), device=torch.device("cuda"))
    assert with_pool("auto", gpu, "auto", rounds=True, biased=False) == gpu
    assert with_pool("auto", gpu, "float32", rounds=False, biased=False).pool_dtype == torch.float32
    with pytest.raises(UserError, match=f"--kv-cache-dtype {wanted} needs the CPU's own kernels: --device cpu"):
        with_pool("auto", gpu, wanted, rounds=False, biased=False)


def test_the_pool_takes_its_share_but_no_more_than_all_requests_need() -> None:
    config = EngineConfig(model="", max_num_seqs=3)
    assert choose_num_blocks(config, spec(), 100) == (1 + 3 * 7, 100)
    small, _ = choose_num_blocks(EngineConfig(model="", cpu_memory_utilization=0.001), spec(), 10**6)
    large, _ = choose_num_blocks(EngineConfig(model="", cpu_memory_utilization=0.01), spec(), 10**6)
    assert 5 * small < large < 20 * small


def test_a_pool_of_so_many_bytes() -> None:
    one = spec().kv_bytes_per_token * 16
    for text, size in (("3MiB", 3 * 2**20), ("1.5MB", 1_500_000), (str(5 * one - 1), 5 * one - 1)):
        blocks, _ = choose_num_blocks(EngineConfig(model="", kv_bytes=text), spec(), 10**6)
        assert blocks == 1 + size // one


def test_the_largest_step_fills_every_limit_and_stays_in_block_0() -> None:
    for seqs, budget, length in ((4, 64, 1000), (4, 64, 10), (8, 3, 100), (1, 50, 50), (3, 3, 1)):
        plan = largest_step(EngineConfig(model="", max_num_seqs=seqs), budget, 16, length)
        assert plan.num_tokens == sum(row.count for row in plan.rows) == min(budget, min(seqs, budget) * length)
        assert [row.request.slot for row in plan.rows] == list(range(min(seqs, budget)))
        assert all(row.samples and row.count <= length for row in plan.rows)
        assert all(set(row.request.block_ids) == {0} for row in plan.rows)


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_the_largest_step_runs_in_a_pool_of_one_block(attention: str, tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config = EngineConfig(model=str(tmp_path), max_num_seqs=5, max_num_batched_tokens=90)
    runner = load(tmp_path, attention=attention, max_num_seqs=5)
    runner.allocate(1)
    run_largest_step(runner, config, runner.spec, 64)


def test_a_share_too_small_for_one_block_names_the_flag() -> None:
    config = EngineConfig(model="", cpu_memory_utilization=1e-12)
    with pytest.raises(UserError, match="--cpu-memory-utilization"):
        choose_num_blocks(config, spec(), 100)


def test_an_allocation_that_fails_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_core.attention.torch import TorchAttention

    def fail(self: TorchAttention, num_blocks: int) -> None:
        raise MemoryError

    monkeypatch.setattr(TorchAttention, "allocate", fail)
    save_model(tmp_path, "llama")
    with pytest.raises(UserError, match="not enough memory for 1024 KV tokens; lower --kv-tokens"):
        load(tmp_path, attention="torch")


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 9")]
)
def test_a_step_without_memory_ends_its_requests_and_names_the_flags(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "llama")
    engine = build_engine(EngineConfig(model=str(tmp_path), kv_tokens=512, threads=1, device="cpu"))
    assert isinstance(engine._pipeline.runner, ModelRunner)
    forward = engine._pipeline.runner.forward

    def add(request_id: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=3)
        engine.add(
            Generate(request_id=request_id, frontend=0, prompt_ids=pack_ids([1] * 20), sampling=sampling, arrival=0)
        )

    def fail(*_: Any) -> torch.Tensor:
        raise error

    add(1)
    monkeypatch.setattr(engine._pipeline.runner, "forward", fail)
    (lost,) = engine.step().finished
    assert lost.error is not None
    assert lost.error.message == (
        "the engine failed: not enough memory for a step of 20 tokens; "
        "lower --max-num-batched-tokens, --max-num-seqs or the KV pool (--kv-tokens)"
    )
    monkeypatch.setattr(engine._pipeline.runner, "forward", forward)
    add(2)
    ended = [finished for _ in range(3) for finished in engine.step().finished]
    assert [finished.reason for finished in ended] == ["length"]

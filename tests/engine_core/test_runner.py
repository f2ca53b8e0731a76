"""The runner: plans in, sampled tokens and log-probabilities out; settings that cannot work are named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core.attention.base import AttentionSpec
from engine_core.batch import make_batch
from engine_core.errors import UserError
from engine_core.kv_size import choose_num_blocks
from engine_core.plan import ScheduledRow, StepPlan, StepTokens
from engine_core.request import Request
from engine_core.runner import ModelRunner, build_runner
from ipc.config import EngineConfig
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
    fractions = [fraction for phase, fraction in news if phase == "loading weights"]
    assert fractions == sorted(fractions, key=float)
    assert fractions[-1] == 1.0
    assert news[-1][0] == "warming up"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, r"--max-model-len 513 must be .* 512 tokens"),
        ({"kv_tokens": 10**12}, r"--kv-tokens 1000000000000 needs .* GiB.*--kv-tokens \d+ would fit"),
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


def spec(block_size: int = 16, num_layers: int = 2) -> AttentionSpec:
    return AttentionSpec(num_layers, 4, 2, 32, block_size, torch.float32, torch.device("cpu"))


def test_the_pool_takes_its_share_but_no_more_than_all_requests_need() -> None:
    config = EngineConfig(model="", max_num_seqs=3)
    assert choose_num_blocks(config, spec(), 100) == (1 + 3 * 7, 100)
    small, _ = choose_num_blocks(EngineConfig(model="", cpu_memory_utilization=0.001), spec(), 10**6)
    large, _ = choose_num_blocks(EngineConfig(model="", cpu_memory_utilization=0.01), spec(), 10**6)
    assert 5 * small < large < 20 * small


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
    with pytest.raises(UserError, match="not enough memory for 1040 KV tokens; lower --kv-tokens"):
        load(tmp_path, attention="torch")

"""The engine on the GPU: what must give identical tokens does, and nothing is left behind.

Identical in any precision: graphs on and off (the same launches), overlap on and off as long as steps hold the same
rows. In float32 also: alone and in any batch, from the prefix cache, after preemption, and on the CPU; bfloat16 rounds
differently from one batch size to the next, so there near-ties may fall either way.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from ipc.codec import pack_ids
from ipc.messages import Generate, TokenLogprobs
from ipc.sampling import SamplingParams
from tests.gpu.models import BLOCK_SIZE, VOCABULARY, Answer, collect, engine, generate, save_model, tokens

TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
LENGTHS = (1, 2, 15, 16, 17, 1, 64, 150, 300, 33, 90, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of the CPU engine in float32."""
    return tokens(generate(engine(model, device="cpu"), [(ids, GREEDY) for ids in prompts]))


def test_one_after_the_other_as_on_the_cpu(model: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """A prompt of one token follows on longer ones in the same slot: its step must not take their last token."""
    on_gpu = engine(model)
    for index, ids in enumerate(prompts):
        assert generate(on_gpu, [(ids, GREEDY)], first_id=index)[0].tokens == expected[index]


@pytest.mark.parametrize(("budget", "copies"), [(2048, 1), (64, 1), (2048, 8), (200, 8)])
def test_one_batch_as_on_the_cpu(
    budget: int, copies: int, model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Of so many copies, steps hold prompts beside up to 63 decode rows."""
    on_gpu = engine(model, max_num_batched_tokens=budget)
    assert tokens(generate(on_gpu, [(ids, GREEDY) for ids in prompts * copies])) == expected * copies


@pytest.mark.parametrize("family", ["mistral-window", "qwen3-moe"])
def test_windows_and_experts_as_on_the_cpu(family: str, tmp_path: Path, prompts: list[list[int]]) -> None:
    save_model(tmp_path, family)
    jobs = [(ids, GREEDY) for ids in prompts]
    on_gpu, on_cpu = (generate(engine(tmp_path, device=device), jobs) for device in ("cuda", "cpu"))
    assert tokens(on_gpu) == tokens(on_cpu)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flag", ["overlap", "cuda_graphs"])
def test_overlap_and_graphs_change_no_token(flag: str, dtype: str, model: Path, prompts: list[list[int]]) -> None:
    jobs = [(ids, GREEDY) for ids in prompts]
    with_it, without = (engine(model, dtype=dtype, **{flag: value}) for value in (True, False))
    assert tokens(generate(with_it, jobs)) == tokens(generate(without, jobs))


def test_graphs_captured_while_idle_change_no_token(
    model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    on_gpu = engine(model, max_num_seqs=8, max_model_len=512)
    assert on_gpu._pipeline.runner.idle()
    while on_gpu._pipeline.runner.idle():
        pass
    assert tokens(generate(on_gpu, [(ids, GREEDY) for ids in prompts])) == expected


def drawn(seed: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True, **more)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(model: Path, prompts: list[list[int]]) -> None:
    on_gpu = engine(model)
    alone = generate(on_gpu, [(prompts[7], drawn(42))])[0].tokens
    jobs = [(ids, drawn(index) if index % 2 else GREEDY) for index, ids in enumerate(prompts)]
    jobs[4] = (prompts[7], drawn(42))
    batch = generate(on_gpu, jobs, first_id=1)
    assert batch[4].tokens == alone
    assert generate(on_gpu, [(prompts[7], drawn(43))], first_id=100)[0].tokens != alone
    assert generate(engine(model), [(prompts[7], drawn(42))])[0].tokens == alone


GREEDY_KINDS: list[dict[str, object]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "logprobs": 3},
    {"frequency_penalty": 0.7, "logprobs": 0},
    {"logit_bias": {7: 100.0}},
    {"allowed_token_ids": tuple(range(0, VOCABULARY, 3)), "frequency_penalty": 0.4},
    {"min_tokens": 9, "stop_token_ids": tuple(range(0, VOCABULARY, 2))},
    {"logprobs": 2, "prompt_logprobs": 1},
    {},
]
DRAWN_KINDS: list[dict[str, object]] = [
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.02, "logprobs": 20},
    {"frequency_penalty": 0.7, "top_k": 40, "top_p": 0.9},
    {},
]


def kinds() -> list[SamplingParams]:
    greedy = [SamplingParams(temperature=0.0, max_tokens=TOKENS, **kind) for kind in GREEDY_KINDS]  # type: ignore[arg-type]
    return greedy + [drawn(seed, **kind) for seed, kind in enumerate(DRAWN_KINDS)]  # type: ignore[arg-type]


def test_edits_and_logprobs_as_the_hosts_sampler_has_them(model: Path, prompts: list[list[int]]) -> None:
    greedy = [sampling for sampling in kinds() if sampling.greedy]
    jobs = [(ids, greedy[index % len(greedy)]) for index, ids in enumerate(prompts)]
    on_gpu, on_cpu = (generate(engine(model, device=device), jobs) for device in ("cuda", "cpu"))
    assert tokens(on_gpu) == tokens(on_cpu)
    for (ids, sampling), one, other in zip(jobs, on_gpu, on_cpu, strict=True):
        assert len(one.logprobs) == (len(one.tokens) if sampling.logprobs is not None else 0)
        assert len(one.prompt) == (len(ids) if sampling.prompt_logprobs is not None else 0)
        for a, b in zip([*one.logprobs, *one.prompt], [*other.logprobs, *other.prompt], strict=True):
            same_value(a, b)


@pytest.mark.parametrize("budget", [2048, 64])
def test_prompts_are_scored_as_on_the_cpu(budget: int, model: Path, prompts: list[list[int]]) -> None:
    """Whole and in chunks, beside those that ask for nothing; more positions than are scored at a time."""
    scored = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3)
    jobs = [(ids, scored if len(ids) > 60 else GREEDY) for ids in prompts]
    on_gpu = generate(engine(model, max_num_batched_tokens=budget), jobs)
    on_cpu = generate(engine(model, device="cpu"), jobs)
    for (ids, sampling), one, other in zip(jobs, on_gpu, on_cpu, strict=True):
        assert len(one.prompt) == (len(ids) if sampling is scored else 0)
        for a, b in zip(one.prompt, other.prompt, strict=True):
            same_value(a, b)


def same_value(a: TokenLogprobs | None, b: TokenLogprobs | None) -> None:
    """But for near-ties: neighbours in rank may have changed places."""
    if a is None or b is None:  # the first token of a prompt
        assert a is b
        return
    assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    assert abs(a.rank - b.rank) <= 1
    best, expected = (np.frombuffer(value.top_logprobs, "<f4") for value in (a, b))
    assert best == pytest.approx(expected, abs=1e-3)
    if np.diff(best).max(initial=-np.inf) < -2e-3:
        assert a.top_ids[:-4] == b.top_ids[:-4]  # but for the last, which may be next to one left out


@pytest.mark.parametrize("flag", ["overlap", "cuda_graphs"])
def test_overlap_and_graphs_change_no_token_of_any_kind(flag: str, model: Path, prompts: list[list[int]]) -> None:
    """Penalties must see the token of the step before, which the host does not know yet."""
    jobs = [(ids, kinds()[index % len(kinds())]) for index, ids in enumerate(prompts * 2)]
    one, other = (generate(engine(model, **{flag: value}), jobs) for value in (True, False))
    assert tokens(one) == tokens(other)
    for a, b in zip(one, other, strict=True):
        assert [value.rank for value in a.logprobs] == [value.rank for value in b.logprobs]


@pytest.mark.parametrize("sampling", [drawn(42), GREEDY], ids=["drawn", "greedy"])
def test_a_row_that_needs_less_keeps_its_tokens_in_a_larger_step(
    sampling: SamplingParams, model: Path, prompts: list[list[int]]
) -> None:
    alone = generate(engine(model), [(prompts[7], sampling)])[0].tokens
    for others in (drawn(1, top_p=0.9), drawn(2, presence_penalty=1.0)):
        assert generate(engine(model), [(prompts[7], sampling), (prompts[3], others)])[0].tokens == alone


def test_penalties_and_truncation_survive_preemption(model: Path, prompts: list[list[int]]) -> None:
    jobs = [(ids, kinds()[index % len(kinds())]) for index, ids in enumerate(prompts)]
    jobs = [(ids, sampling) for ids, sampling in jobs if sampling.prompt_logprobs is None]
    roomy, tight = (engine(model, kv_tokens=size, enable_prefix_caching=False) for size in (8192, 512))
    assert tokens(generate(roomy, jobs)) == tokens(generate(tight, jobs))
    assert tight.stats().preemptions > 0


def test_prefix_cache(model: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    on_gpu = engine(model)
    jobs = [(ids, GREEDY) for ids in prompts]
    generate(on_gpu, jobs)
    again = generate(on_gpu, jobs)
    assert tokens(again) == expected
    cached = [answer.finished.num_cached_tokens for answer in again if answer.finished is not None]
    assert cached == [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption(overlap: bool, model: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    on_gpu = engine(model, kv_tokens=512, enable_prefix_caching=False, overlap=overlap)
    assert tokens(generate(on_gpu, [(ids, GREEDY) for ids in prompts])) == expected
    assert on_gpu.stats().preemptions > 0


def test_aborts_under_load_leave_nothing(model: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    rng = random.Random(9)
    on_gpu = engine(model, kv_tokens=4096, max_num_batched_tokens=256, enable_prefix_caching=False)
    free = on_gpu.stats().kv_blocks_free
    answers: dict[int, Answer] = {}
    for step in range(300):
        if step < 250:
            request_id = 1000 + step
            answers[request_id] = Answer()
            ids = rng.choice(prompts)
            sampling = drawn(step) if step % 3 else GREEDY
            on_gpu.add(
                Generate(request_id=request_id, frontend=0, prompt_ids=pack_ids(ids), sampling=sampling, arrival=0)
            )
        if answers and rng.random() < 0.7:
            on_gpu.abort([rng.choice(list(answers))])
        collect(on_gpu, answers)
    while on_gpu.has_work:
        collect(on_gpu, answers)
    assert all(answer.finished is not None for answer in answers.values())
    assert {answer.finished.reason for answer in answers.values() if answer.finished} == {"abort", "length"}
    stats = on_gpu.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_free) == (0, 0, free)
    assert tokens(generate(on_gpu, [(ids, GREEDY) for ids in prompts])) == expected


def test_smollm2_as_on_the_cpu() -> None:
    path = os.environ.get("_GAPLESS_TEST_GGUF")
    if not path:
        pytest.skip("_GAPLESS_TEST_GGUF does not name SmolLM2's GGUF file")
    rng = random.Random(10)
    jobs = [([rng.randrange(100, 40000) for _ in range(length)], GREEDY) for length in (1, 7, 16, 40, 100, 300)]
    on_gpu, on_cpu = (engine(Path(path), device=device, max_model_len=2048) for device in ("cuda", "cpu"))
    assert tokens(generate(on_gpu, jobs)) == tokens(generate(on_cpu, jobs))

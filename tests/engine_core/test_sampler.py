"""The sampler against transformers' processors, a float64 reference written here, and exact distributions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine_core.plan import ScheduledRow, StepTokens
from engine_core.request import Request
from engine_core.sampler import Sampler
from engine_core.truncation import Truncation, pick, uniform
from ipc.messages import TokenLogprobs
from ipc.sampling import SamplingParams

CPU = torch.device("cpu")


def make_sampler(vocab: int, slots: int = 8) -> Sampler:
    return Sampler(vocab, slots, CPU)


def make_request(slot: int = 0, seed: int = 1, prompt: tuple[int, ...] = (1, 2), **sampling: object) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(slot + 100, list(prompt), params, frozenset({0}), slot=slot, seed=seed)


def random_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample(
    sampler: Sampler, logits: torch.Tensor, requests: list[Request], positions: list[int] | None = None
) -> StepTokens:
    """For these output positions, by default those after the committed tokens."""
    positions = positions or [len(request.output_ids) for request in requests]
    pairs = zip(requests, positions, strict=True)
    rows = [ScheduledRow(request, request.num_prompt_tokens + position - 1, 1, True) for request, position in pairs]
    return sampler.sample(logits, rows)


def chosen(sampler: Sampler, logits: torch.Tensor, request: Request) -> int:
    return sample(sampler, logits.reshape(1, -1), [request]).token_ids[0]


def run(sampler: Sampler, logits: torch.Tensor, request: Request, steps: int) -> list[int]:
    """`steps` committed tokens, all from the same logits."""
    for _ in range(steps):
        request.output_ids.append(chosen(sampler, logits, request))
    return request.output_ids


def reference_probabilities(
    logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float
) -> NDArray[np.float64]:
    """transformers' warpers in our order, in float64."""
    scores, ids = logits.double().reshape(1, -1), torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    probabilities: NDArray[np.float64] = torch.softmax(scores, -1)[0].numpy()
    return probabilities


def our_probabilities(
    logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float
) -> NDArray[np.float64]:
    row = logits.numpy()
    ids, weights = Truncation(len(row)).support(row, float(row.max()), temperature, min_p, top_k, top_p)
    result = np.zeros(len(row))
    if ids is None:
        assert not weights[len(row) :].any(), "padding must carry no weight"
        result[:] = weights[: len(row)]
    else:
        result[ids] = weights
    return result / result.sum()


@pytest.mark.parametrize("vocab", [5, 37, 1000, 20_011])
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 100.0])
def test_truncated_distribution_equals_that_of_transformers(vocab: int, temperature: float) -> None:
    logits = random_logits(1, vocab, seed=vocab)[0]
    cases = itertools.product([0.0, 0.05, 1.0], [0, 1, 3, 60, 900, 10**6], [1.0, 0.95, 0.3, 1e-6])
    for min_p, top_k, top_p in cases:
        expected = reference_probabilities(logits, temperature, min_p, top_k, top_p)
        ours = our_probabilities(logits, temperature, min_p, top_k, top_p)
        label = f"{vocab=} {temperature=} {min_p=} {top_k=} {top_p=}"
        # At a cut of float32 sums, a token whose cumulative probability equals top_p to 1e-6 may fall on either side.
        assert abs(int((ours > 0).sum()) - int((expected > 1e-40).sum())) <= (top_p < 1), label
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=2e-4 if top_p < 1 else 1e-6, err_msg=label)


def test_ties_are_cut_by_token_id() -> None:
    logits = torch.zeros(3000)
    assert (our_probabilities(logits, 1.0, 0.0, 7, 1.0).nonzero()[0] == np.arange(7)).all()
    assert (our_probabilities(logits, 1.0, 0.0, 0, 0.5).nonzero()[0] == np.arange(1500)).all()
    assert (our_probabilities(logits, 1.0, 1.0, 0, 1.0) > 0).all()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 8},
        {"temperature": 2.0, "min_p": 0.1, "top_k": 12, "top_p": 0.8},
        {"temperature": 50.0, "top_p": 0.9},
    ],
)
def test_samples_follow_the_exact_distribution(sampling: dict[str, float]) -> None:
    draws, vocab = 4000, 40
    logits = random_logits(1, vocab, seed=3, scale=1.5)
    sampler = make_sampler(vocab)
    request = make_request(seed=77, **sampling)
    tokens = [sample(sampler, logits, [request], [position]).token_ids[0] for position in range(draws)]
    expected = draws * reference_probabilities(
        logits[0],
        sampling["temperature"],
        sampling.get("min_p", 0.0),
        int(sampling.get("top_k", 0)),
        sampling.get("top_p", 1.0),
    )
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[expected < 1e-9].any()
    kept = expected >= 5
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = max(int(kept.sum()) - 1, 1)
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5, f"{chi_square=} {freedom=}"


def test_large_vocabulary_draws_follow_the_weights_of_blocks() -> None:
    weights = np.zeros(4096, np.float32)
    weights[[3, 255, 256, 2000, 4095]] = [1, 2, 3, 4, 10]
    counts = np.bincount([pick(weights, uniform(5, i)) for i in range(8000)], minlength=4096)
    assert set(counts.nonzero()[0]) == {3, 255, 256, 2000, 4095}
    np.testing.assert_allclose(counts[[3, 255, 256, 2000, 4095]] / 8000, np.array([1, 2, 3, 4, 10]) / 20, atol=0.02)
    assert pick(weights, 0.0) == 3
    assert pick(weights, 1.0 - 2.0**-53) == 4095


def test_uniform_numbers_are_uniform_over_seeds_and_positions() -> None:
    for numbers in ([uniform(seed, 0) for seed in range(5000)], [uniform(-9, position) for position in range(5000)]):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 250) ** 2 / 250).sum() < 19 + 5 * 38**0.5
    assert uniform(2**63 - 1, 5) == uniform(-(2**63) - 1, 5)  # any int is a seed


def test_greedy_takes_the_largest_logit_and_the_first_of_equals() -> None:
    logits = random_logits(4, 5000, seed=1)
    logits[2, [17, 40]] = 1000.0
    requests = [make_request(slot=i, temperature=0.0) for i in range(4)]
    step = sample(make_sampler(5000), logits, requests)
    assert step.token_ids == logits.argmax(-1).tolist()
    assert step.token_ids[2] == 17
    assert not step.logprobs
    assert not step.failed


MIXED: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 40, "frequency_penalty": 0.7},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {5: 9.0}, "min_tokens": 4},
    {"temperature": 30.0, "top_p": 0.97, "presence_penalty": 1.1},
    {"temperature": 0.0, "allowed_token_ids": (9, 12, 13)},
]


def test_tokens_do_not_depend_on_the_batch() -> None:
    vocab, steps = 3001, 12
    logits = [random_logits(len(MIXED), vocab, seed=step) for step in range(steps)]

    def generate(indices: list[int]) -> dict[int, list[int]]:
        sampler = make_sampler(vocab)
        requests = {i: make_request(slot=n, seed=50 + i, **MIXED[i]) for n, i in enumerate(indices)}
        for step in range(steps):
            result = sample(sampler, logits[step][indices], list(requests.values()))
            for request, token in zip(requests.values(), result.token_ids, strict=True):
                request.output_ids.append(token)
        return {i: request.output_ids for i, request in requests.items()}

    together = generate(list(range(len(MIXED))))
    assert generate(list(reversed(range(len(MIXED))))) == together
    for i in range(len(MIXED)):
        assert generate([i])[i] == together[i], MIXED[i]
    assert len({tuple(tokens) for tokens in together.values()}) == len(MIXED)


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_tokens_survive_preemption_and_moving_to_another_slot(index: int) -> None:
    vocab = 500
    logits = random_logits(1, vocab, seed=9, scale=1.0)
    expected = run(make_sampler(vocab), logits, make_request(**MIXED[index]), 20)

    sampler, request = make_sampler(vocab), make_request(**MIXED[index])
    run(sampler, logits, request, 7)
    chosen(sampler, logits, request)  # sampled, then discarded with the preempted step
    sampler.release(request)
    request.slot = 3
    run(sampler, logits, request, 6)
    chosen(sampler, logits, request)  # discarded, and the request keeps its slot
    assert run(sampler, logits, request, 7) == expected


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_tokens_are_the_same_when_commits_lag_one_step(index: int) -> None:
    logits = random_logits(1, 500, seed=9, scale=1.0)
    expected = run(make_sampler(500), logits, make_request(**MIXED[index]), 20)
    sampler, request, pending = make_sampler(500), make_request(**MIXED[index]), []
    for position in range(20):
        pending.append(sample(sampler, logits, [request], [position]).token_ids[0])
        if position:
            request.output_ids.append(pending[position - 1])
    assert pending == expected


def test_different_seeds_and_positions_give_different_tokens() -> None:
    logits = torch.zeros(1, 4000)
    tokens = {chosen(make_sampler(4000), logits, make_request(seed=seed)) for seed in range(50)}
    assert len(tokens) > 45
    assert len(set(run(make_sampler(4000), logits, make_request(), 50))) > 45


def test_repetition_penalty_equals_that_of_transformers_over_prompt_and_output() -> None:
    vocab = 60
    logits = random_logits(1, vocab, seed=4, scale=1.0)
    request = make_request(prompt=(5, 6, 6, 7), temperature=0.0, repetition_penalty=1.4)
    sampler, seen = make_sampler(vocab), [5, 6, 6, 7]
    for _ in range(40):
        expected = int(RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([seen]), logits.clone()).argmax())
        assert chosen(sampler, logits, request) == expected
        request.output_ids.append(expected)
        seen.append(expected)
    assert len(set(seen)) > 5


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    vocab = 200  # more distinct tokens than the arrays start with
    logits = random_logits(1, vocab, seed=8, scale=0.7)
    request = make_request(prompt=tuple(range(50)), temperature=0.0, presence_penalty=0.4, frequency_penalty=0.9)
    sampler, counts = make_sampler(vocab), np.zeros(vocab)
    for _ in range(400):
        expected = int((logits[0].double().numpy() - 0.9 * counts - 0.4 * (counts > 0)).argmax())
        token = chosen(sampler, logits, request)
        assert token == expected
        request.output_ids.append(token)
        counts[token] += 1
    assert (counts > 0).sum() > 100


def test_a_recycled_slot_keeps_nothing_of_the_last_request() -> None:
    vocab = 50
    logits = random_logits(1, vocab, seed=2, scale=0.5)
    settings: dict[str, object] = {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    expected = run(make_sampler(vocab), logits, make_request(prompt=(3,), **settings), 10)
    for release in (True, False):
        sampler = make_sampler(vocab)
        old = make_request(prompt=(9, 10), logit_bias={4: 50.0}, **settings)
        run(sampler, logits, old, 30)
        if release:
            sampler.release(old)
            sampler.release(old)
        assert run(sampler, logits, make_request(prompt=(3,), **settings), 10) == expected


def test_bias_allowed_ids_and_their_order() -> None:
    logits = random_logits(1, 100, seed=6)
    best, sampler = int(logits.argmax()), make_sampler(100)
    assert chosen(sampler, logits, make_request(temperature=0.0, logit_bias={42: 100.0})) == 42
    assert chosen(sampler, logits, make_request(temperature=0.0, logit_bias={best: -100.0})) != best
    for seed in range(20):
        assert chosen(sampler, logits, make_request(seed=seed, temperature=100.0, allowed_token_ids=(31,))) == 31
    request = make_request(temperature=0.0, allowed_token_ids=(7, 8), logit_bias={8: 60.0, 42: 100.0})
    assert chosen(sampler, logits, request) == 8
    tokens = {
        chosen(sampler, logits, make_request(seed=s, temperature=100.0, allowed_token_ids=(7, 8, 8))) for s in range(60)
    }
    assert tokens == {7, 8}


def test_min_tokens_masks_every_end_until_then() -> None:
    logits = torch.full((1, 20), -5.0)
    logits[0, [0, 4, 9]] = torch.tensor([5.0, 4.0, 3.0])  # EOS, a stop token, an ordinary one
    sampler = make_sampler(20)
    request = make_request(temperature=0.0, min_tokens=3, stop_token_ids=(4, 4))
    assert run(sampler, logits, request, 5) == [9, 9, 9, 0, 0]
    ignoring = make_request(temperature=0.0, min_tokens=1, ignore_eos=True)
    assert run(sampler, logits, ignoring, 1) == [0]  # an EOS that ends nothing is an ordinary token
    outside = make_request(temperature=0.0, min_tokens=1)
    outside.eos_token_ids = frozenset({0, 4000})
    assert run(sampler, logits, outside, 2) == [4, 0]


def test_a_row_of_nan_or_infinity_fails_alone() -> None:
    logits = random_logits(5, 300, seed=5)
    clean = logits.clone()
    logits[1, 7] = float("nan")
    logits[2] = float("inf")
    logits[3] = float("nan")
    requests = [make_request(slot=i, temperature=t, logprobs=3) for i, t in enumerate([0, 0, 1, 1, 1])]
    step = sample(make_sampler(300), logits, requests)
    assert sorted(step.failed) == [1, 2, 3]
    assert sorted(step.logprobs) == [0, 4]
    expected = sample(make_sampler(300), clean, requests)
    assert [step.token_ids[i] for i in (0, 4)] == [expected.token_ids[i] for i in (0, 4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_masked_fails_alone(temperature: float) -> None:
    logits = random_logits(3, 64, seed=5)
    logits[2] = -float("inf")
    requests = [
        make_request(slot=0, temperature=temperature),
        make_request(slot=1, temperature=temperature, allowed_token_ids=(0,), min_tokens=2),
        make_request(slot=2, temperature=temperature),
    ]
    step = sample(make_sampler(64), logits, requests)
    assert sorted(step.failed) == [1, 2]
    assert "masked" in step.failed[1]


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 10**6},
        {"top_k": 64},
        {"top_p": 1e-12},
        {"min_p": 1.0},
        {"temperature": 0.01},
        {"temperature": 1e-5},
        {"temperature": 100.0, "top_k": 1},
        {"temperature": 100.0, "top_p": 0.999999},
        {"allowed_token_ids": (3, 5), "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"logit_bias": dict.fromkeys(range(64), -100.0)},
    ],
)
def test_extreme_settings_draw_a_possible_token(sampling: dict[str, object]) -> None:
    logits = random_logits(1, 64, seed=12)
    logits[0, 10:20] = -float("inf")
    logits[0, 30] = -3e38
    for seed in range(30):
        token = chosen(make_sampler(64), logits, make_request(seed=seed, **sampling))
        assert token not in range(10, 20)
        if (sampling.keys() & {"min_p", "top_p"} and len(sampling) == 1) or sampling.get("top_k") == 1:
            assert token == int(logits.argmax())


def unpack(value: TokenLogprobs) -> tuple[list[int], list[float]]:
    return np.frombuffer(value.top_ids, "<i4").tolist(), np.frombuffer(value.top_logprobs, "<f4").tolist()


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(3, 5000, seed=3)
    before = logits.clone()
    requests = [
        make_request(slot=0, temperature=0.0, logprobs=5),
        make_request(slot=1, temperature=2.0, top_k=9, frequency_penalty=1.0, logit_bias={77: 100.0}, logprobs=20),
        make_request(slot=2, temperature=1.0, logprobs=0),
    ]
    step = sample(make_sampler(5000), logits, requests)
    assert torch.equal(logits, before)
    expected = torch.log_softmax(logits.double(), -1)
    assert step.token_ids[1] == 77
    for i, count in enumerate((5, 20, 0)):
        value, token = step.logprobs[i], step.token_ids[i]
        assert value.logprob == pytest.approx(float(expected[i, token]), abs=1e-5)
        assert value.rank == 1 + int((expected[i] > expected[i, token]).sum())
        ids, values = unpack(value)
        top = torch.topk(expected[i], count)
        assert ids == top.indices.tolist()
        assert values == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_are_always_finite() -> None:
    logits = torch.full((3, 30), -float("inf"))
    logits[0, 4] = 1.0
    logits[1] = float("nan")
    for value in make_sampler(30).prompt_logprobs(logits, [5, 5, 5], top=3):
        assert value.logprob == -9999.0
        assert np.isfinite(unpack(value)[1]).all()
    assert unpack(make_sampler(30).prompt_logprobs(logits[:1], [4], top=3)[0]) == ([4], [0.0])


def test_prompt_logprobs_and_ranks_of_equal_logits() -> None:
    logits = random_logits(6, 700, seed=1)
    next_ids = [3, 600, 5, 0, 699, 42]
    values = make_sampler(700).prompt_logprobs(logits, next_ids, top=2)
    expected = torch.log_softmax(logits.double(), -1)
    assert [v.logprob for v in values] == pytest.approx(
        [float(expected[i, t]) for i, t in enumerate(next_ids)], abs=1e-5
    )
    assert [unpack(v)[0] for v in values] == torch.topk(expected, 2).indices.tolist()
    equal = make_sampler(700).prompt_logprobs(torch.zeros(1, 700), [9], top=4)[0]
    assert (equal.rank, unpack(equal)[0]) == (10, [0, 1, 2, 3])


def test_an_empty_batch_and_half_precision_are_fine() -> None:
    assert sample(make_sampler(10), torch.empty(0, 10), []).token_ids == []
    logits = random_logits(1, 300, seed=2).bfloat16()
    assert chosen(make_sampler(300), logits, make_request(temperature=0.0)) == int(logits.float().argmax())

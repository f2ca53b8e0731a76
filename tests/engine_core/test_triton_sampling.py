"""Sampling on the device against transformers' warpers, the host's sampler, torch, and exact distributions.

On a GPU the kernels run compiled. Without one they run in Triton's interpreter, on vocabularies small enough for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine_core.cuda.results import read_records
from engine_core.cuda.sampling import DeviceSampler, Needs
from engine_core.kernels import triton_cut, triton_draw, triton_edits, triton_logprobs, triton_slots, triton_survey
from engine_core.penalties import LogitEdits
from engine_core.request import Request
from ipc.messages import TokenLogprobs
from ipc.sampling import MAX_LOGPROBS, SamplingParams
from tests.engine_core.test_sampler import reference_probabilities, unpack

GPU = torch.cuda.is_available()  # if not, tests/conftest.py has chosen the interpreter
DEVICE = torch.device("cuda" if GPU else "cpu")
VOCABULARIES = [257, 1000, 20_011] if GPU else [257, 1000]
INF = float("inf")
NAN = float("nan")


@pytest.fixture(autouse=True)
def seed() -> int:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes 10 ms per program; and with little room for ranking, small rows need the search as well."""
    if not GPU:
        monkeypatch.setattr(triton_slots, "PARTS", 2)
    monkeypatch.setattr(triton_cut, "COLLECTED", 32)
    monkeypatch.setattr(triton_cut, "BLOCK", 256)


def make_request(slot: int, prompt: Sequence[int] = (1, 2), seed: int = 1, **sampling: object) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(slot + 100, list(prompt), params, frozenset({0}), slot=slot, seed=seed)


class Rig:
    """A device sampler whose requests enter when they are first seen in their slot."""

    def __init__(self, vocab: int, slots: int = 8) -> None:
        self.sampler = DeviceSampler(vocab, slots, slots, DEVICE)
        self._owners: dict[int, Request] = {}

    def enter(self, requests: Sequence[Request]) -> None:
        new = [request for request in requests if self._owners.get(request.slot) is not request]
        if new:
            self.sampler.enter(new)
            self._owners.update({request.slot: request for request in new})

    def draw(self, logits: torch.Tensor, requests: Sequence[Request], needs: Needs | None = None) -> list[int]:
        """A token for each row, or what is wrong with it. Commits nothing."""
        self.enter(requests)
        slots = [request.slot for request in requests]
        lengths = torch.tensor([r.num_prompt_tokens + r.num_output_tokens for r in requests]).int().to(DEVICE)
        results = self.sampler.results
        results.tokens.fill_(-7)
        turn = torch.tensor([2], dtype=torch.int32, device=DEVICE)
        where = torch.tensor(slots).int().to(DEVICE)
        needs = self.sampler.needs(slots) if needs is None else needs
        self.sampler.draw(logits.to(DEVICE).contiguous(), where, lengths, turn, needs)
        tokens: list[int] = results.tokens[2, : len(slots)].tolist()
        assert self.sampler.last_tokens[where.long()].tolist() == [max(token, 0) for token in tokens]
        assert results.tokens[0].tolist() == [-7] * results.tokens.shape[1]
        return tokens

    def logprobs(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        assert self.sampler.results.logprobs is not None
        return read_records(self.sampler.results.logprobs[2, : len(counts)].cpu().numpy(), counts)


def distinct_logits(rows: int, vocab: int, scale: float) -> torch.Tensor:
    """Normal numbers in each row, no two of them equal or nearly so: in random order, one of each quantile."""
    ranks = torch.rand(rows, vocab).argsort(1)
    return torch.special.ndtri((ranks + 0.25 + 0.5 * torch.rand(rows, vocab).double()) / vocab).float() * scale


def kept(logits: torch.Tensor, settings: Sequence[dict[str, object]]) -> list[list[int]]:
    """The ids before the cut of each row of `logits`."""
    rig = Rig(logits.shape[1], len(settings))
    requests = [make_request(slot, **sampling) for slot, sampling in enumerate(settings)]
    rig.enter(requests)
    logits = logits.to(DEVICE).contiguous()
    slots = torch.arange(len(settings), device=DEVICE).int()
    table = rig.sampler._settings
    found = triton_survey.survey(logits, logits, slots, table, logprobs=False)
    cut = triton_cut.cut(logits, logits, slots, table, found)
    threshold, last = cut.thresholds[:, None], cut.last_ids[:, None]
    ids = torch.arange(logits.shape[1], device=DEVICE)
    inside = (logits > threshold) | ((logits == threshold) & (ids <= last))
    return [row.nonzero().flatten().tolist() for row in inside.cpu()]


CUTS: list[dict[str, float]] = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 60},
    {"top_k": 200},
    {"top_k": 256},
    {"top_p": 0.95},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 150, "top_p": 0.9, "min_p": 0.01},
    {"min_p": 0.3, "top_k": 100},
    {"min_p": 0.02, "top_p": 0.7},
    {"top_k": 10**6, "top_p": 0.6},
]


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 30.0])
def test_the_tokens_kept_are_those_of_transformers(vocab: int, temperature: float) -> None:
    logits = distinct_logits(len(CUTS), vocab, 3.0)
    logits[:, torch.randperm(vocab)[: vocab // 10]] = -INF
    ours = kept(logits, [{"temperature": temperature, **cut} for cut in CUTS])
    for row, ids, cut in zip(logits, ours, CUTS, strict=True):
        top_k = int(cut.get("top_k", 0))
        expected = reference_probabilities(row, temperature, cut.get("min_p", 0.0), top_k, cut.get("top_p", 1.0))
        disputed = set(np.flatnonzero(expected).tolist()).symmetric_difference(ids)
        # Sums are of float32: tokens at which they equal top_p to 1e-6, if tiny several, may fall on either side. One
        # that is just as likely as min_p says may, too.
        before = reference_probabilities(row, temperature, cut.get("min_p", 0.0), top_k, 1.0)
        uncut = reference_probabilities(row, temperature, 0.0, 0, 1.0)
        for token in disputed:
            ahead = before[before > before[token]].sum(dtype=np.float64)
            at_top_p = ahead == pytest.approx(cut.get("top_p", 2.0), abs=2e-6)
            at_min_p = uncut[token] / uncut.max() == pytest.approx(cut.get("min_p", 2.0), rel=1e-5)
            assert at_top_p or at_min_p, (cut, token)


def test_equal_logits_are_kept_by_id() -> None:
    """Few and many of them: ranked against one another, and counted."""
    vocab = 1000
    logits = torch.zeros(7, vocab)
    logits[2, 100:120] = 1.0  # above the equal ones
    logits[3, ::3] = 2.0
    logits[4] = torch.randn(vocab).clamp(max=0.5)
    logits[5, 500:] = -INF
    logits[6] = 1.0
    logits[6, ::2] = float(np.nextafter(np.float32(1.0), np.float32(0.0)))  # no number lies between
    settings: list[dict[str, object]] = [
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_k": 50},
        {"top_k": 10},
        {"top_k": 40},
        {"top_k": 600},
        {"top_k": 501},
    ]
    ours = kept(logits, settings)
    assert sorted(ours[6]) == sorted([0, *range(1, vocab, 2)])
    assert ours[0] == list(range(7))
    assert ours[1] == list(range(500))
    assert ours[2] == [*range(30), *range(100, 120)]
    assert ours[3] == list(range(0, 30, 3))
    assert ours[4] == (logits[4] == 0.5).nonzero().flatten().tolist()[:40]
    assert ours[5][:500] == list(range(500))
    assert kept(logits[:1], [{"min_p": 1.0}])[0] == list(range(vocab))
    # a cut inside of what another has cut: equal probabilities, so half of 200 tokens
    assert kept(logits[:1], [{"top_k": 200, "top_p": 0.5}])[0] == list(range(100))


def test_logits_of_any_size_are_cut() -> None:
    vocab = 1000
    logits = distinct_logits(6, vocab, 1.0)
    logits[0] *= 1e30
    logits[1] *= 1e-30
    logits[2, 7] = -3e38
    logits[3] = -INF
    logits[3, 555] = -2.0
    logits[4] = torch.arange(vocab) * -1e-3 + 5.0
    logits[5, :400] = -0.0
    ours = kept(logits, [{"top_k": 300}] * 6)
    for row, ids in list(zip(logits, ours, strict=True))[:3]:
        assert ids == sorted(row.topk(300).indices.tolist())
    assert 555 in ours[3]
    assert ours[4] == list(range(300))
    assert len(ours[5]) == 300
    for settings in ({"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.1}):
        one = kept(logits[3:4], [settings])[0]
        assert 555 in one
        assert logits[3, [token for token in one if token != 555]].eq(-INF).all()


# --- edits ------------------------------------------------------------------------------------------------------------

EDITS: list[dict[str, object]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6, "presence_penalty": 0.7},
    {"frequency_penalty": 0.9, "presence_penalty": -0.4},
    {"logit_bias": {5: 3.5, 250: -100.0, 77: 0.25}},
    {"allowed_token_ids": tuple(range(3, 250, 3))},
    {"min_tokens": 5, "stop_token_ids": (9, 31, 32, 255)},
    {"logit_bias": {9: 4.0, 6: 2.0}, "allowed_token_ids": (6, 9, 12, 15), "min_tokens": 30, "stop_token_ids": (9,)},
    {"logit_bias": {3: 4.0, 4: -9.0}, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 2},
    {"temperature": 1.0},
]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_edits_are_those_of_the_host(vocab: int) -> None:
    """Step by step, with tokens that only the device knows: the host is told a step later."""
    rig, steps = Rig(vocab, len(EDITS)), 8
    requests = [
        make_request(slot, prompt=(3, 4, 4, 200 + slot), **{"temperature": 0.0, **sampling})
        for slot, sampling in enumerate(EDITS)
    ]
    hosts = [LogitEdits(request) for request in requests]
    rig.enter(requests)
    state = rig.sampler._edits
    assert state is not None
    slots = torch.arange(len(EDITS), device=DEVICE).int()
    for position in range(steps):
        logits = (torch.randn(len(EDITS), vocab) * 2.0).to(DEVICE)
        logits[:, :9] += 4.0  # so that tokens come again
        lengths = torch.tensor([r.num_prompt_tokens + position for r in requests]).int().to(DEVICE)
        edited = triton_edits.edit(
            logits, slots, lengths, rig.sampler._settings, state.seen, state.allowed, state.ends, state.bias_ids,
            state.biases,
        ).cpu()  # fmt: skip
        tokens = rig.draw(logits, requests)
        for index, (request, host) in enumerate(zip(requests, hosts, strict=True)):
            expected = logits[index].cpu().numpy().copy()
            if index == len(EDITS) - 1:
                assert tokens[index] >= 0
            else:
                host.apply(expected, position, request.output_ids[: max(position - 1, 0)])
                np.testing.assert_allclose(edited[index].numpy(), expected, rtol=1e-6, atol=1e-6)
                assert tokens[index] == int(edited[index].numpy().argmax())
            host.took(position, tokens[index])
            request.output_ids.append(tokens[index])


@pytest.mark.parametrize("index", range(len(EDITS)))
def test_tokens_survive_preemption_and_moving_to_another_slot(index: int) -> None:
    vocab, logits = 257, torch.randn(1, 257)

    def run(rig: Rig, request: Request, steps: int) -> list[int]:
        for _ in range(steps):
            request.output_ids.append(rig.draw(logits, [request])[0])
        return request.output_ids

    def fresh() -> Request:
        return make_request(0, prompt=(3, 4), seed=9, **{"temperature": 1.0, **EDITS[index]})

    expected = run(Rig(vocab), fresh(), 10)
    rig, request = Rig(vocab), fresh()
    other = make_request(0, prompt=(7, 8), presence_penalty=2.0, logit_bias={1: 50.0}, allowed_token_ids=(1, 2))
    run(rig, other, 2)  # leaves things behind in the slot
    run(rig, request, 4)
    rig.draw(logits, [request])  # sampled, then discarded with the preempted step
    rig._owners.clear()
    request.slot = 3
    assert run(rig, request, 6) == expected


def test_min_tokens_and_ends_outside_the_vocabulary() -> None:
    logits = torch.full((1, 257), -5.0)
    logits[0, [0, 4, 9]] = torch.tensor([5.0, 4.0, 3.0])  # EOS, a stop token, an ordinary one
    rig = Rig(257)
    request = make_request(0, temperature=0.0, min_tokens=3, stop_token_ids=(4, 4))
    request.eos_token_ids = frozenset({0, 4000})
    for _ in range(5):
        request.output_ids.append(rig.draw(logits, [request])[0])
    assert request.output_ids == [9, 9, 9, 0, 0]
    ignoring = make_request(1, temperature=0.0, min_tokens=1, ignore_eos=True)
    assert rig.draw(logits, [ignoring]) == [0]


# --- draws ------------------------------------------------------------------------------------------------------------

MIXED: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 40, "frequency_penalty": 0.7},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {5: 9.0}, "min_tokens": 4, "logprobs": 2},
    {"temperature": 30.0, "top_p": 0.97, "presence_penalty": 1.1},
    {"temperature": 0.0, "allowed_token_ids": (9, 12, 13), "logprobs": 0},
]


def test_greedy_draws_are_argmax_and_bad_rows_say_so() -> None:
    logits = torch.randn(6, 3001)
    logits[1, 5] = logits[1, 2999] = 50.0  # a tie: the lower id wins
    logits[2, 3000] = 60.0
    logits[3, 17] = NAN
    logits[4, 2500] = INF
    logits[5] = -INF
    requests = [make_request(slot, temperature=0.0) for slot in range(6)]
    assert Rig(3001).draw(logits, requests) == [int(logits[0].argmax()), 5, 3000, -1, -1, -2]


def test_random_draws_depend_on_seed_and_length_alone() -> None:
    logits = torch.randn(1, 500)
    rig = Rig(500)

    def token(slot: int, seed: int, prompt: int) -> int:
        return rig.draw(logits, [make_request(slot, prompt=[1] * prompt, seed=seed, temperature=1.5)])[0]

    expected = token(0, 123, 9)
    assert token(5, 123, 9) == expected
    assert len({token(0, 123, length) for length in range(1, 9)}) > 4

    def tokens(seed: int) -> list[int]:
        return [token(1, seed, length) for length in range(1, 6)]

    assert tokens(2**40 + 1) == tokens(2**40 + 1)
    assert len({tuple(tokens(seed)) for seed in (1, 2**40 + 1, 2**41 + 1, -1, 2**63 - 1)}) == 5


def test_tokens_do_not_depend_on_the_batch_nor_on_the_variant_of_the_step() -> None:
    vocab, steps = 1000, 3
    logits = [torch.randn(len(MIXED), vocab) * 3.0 for _ in range(steps)]

    def generate(indices: list[int], needs: Needs | None = None) -> dict[int, list[int]]:
        rig = Rig(vocab, len(MIXED) + 1)
        rig.enter([make_request(len(MIXED), logprobs=1)])  # so that the full variant can run
        requests = {i: make_request(n, seed=50 + i, **MIXED[i]) for n, i in enumerate(indices)}
        for step in range(steps):
            tokens = rig.draw(logits[step][indices], list(requests.values()), needs)
            for request, token in zip(requests.values(), tokens, strict=True):
                request.output_ids.append(token)
        return {i: request.output_ids for i, request in requests.items()}

    together = generate(list(range(len(MIXED))))
    assert generate(list(reversed(range(len(MIXED))))) == together
    for i in range(len(MIXED)):
        assert generate([i])[i] == together[i], MIXED[i]
    assert together[0] == [int(row[0].argmax()) for row in logits]
    for needs in (Needs.RANDOM, Needs.TRUNCATED, Needs.FULL):
        assert generate([1], needs)[1] == together[1]
        assert generate([0], needs)[0] == together[0]


@pytest.mark.parametrize("sampling", [{"temperature": 2.0}, {"temperature": 1.0, "top_k": 6, "top_p": 0.9}])
def test_draws_follow_the_exact_distribution(sampling: dict[str, float]) -> None:
    vocab, rows = 257, 4000 if GPU else 100
    torch.manual_seed(5)  # the same in each run: a bound that no fresh draw can break would see little
    logits = torch.full((vocab,), -INF)
    logits[torch.randperm(vocab)[:12]] = torch.randn(12)
    rig = Rig(vocab, rows)
    if not GPU:
        triton_slots.PARTS = 1
    requests = [make_request(slot, seed=slot, **sampling) for slot in range(rows)]
    tokens = rig.draw(logits.expand(rows, vocab), requests)
    expected = rows * reference_probabilities(
        logits, sampling["temperature"], 0.0, int(sampling.get("top_k", 0)), sampling.get("top_p", 1.0)
    )
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[expected < 1e-9].any()
    many = expected >= 3
    chi_square = ((counts[many] - expected[many]) ** 2 / expected[many]).sum()
    freedom = max(int(many.sum()) - 1, 1)
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5, f"{chi_square=} {freedom=}"


@pytest.mark.parametrize("sampling", MIXED[2:])
def test_bad_rows_say_so_and_leave_the_others_alone(sampling: dict[str, object]) -> None:
    logits = torch.randn(6, 257)
    clean = logits.clone()
    logits[1, 250] = NAN
    logits[2, 3] = INF
    logits[3] = NAN
    logits[4] = -INF

    def draw(rows: torch.Tensor) -> list[int]:
        return Rig(257).draw(rows, [make_request(slot, seed=slot, **sampling) for slot in range(6)])

    tokens, expected = draw(logits), draw(clean)
    assert tokens[1:5] == [-1, -1, -1, -2]
    assert [tokens[0], tokens[5]] == [expected[0], expected[5]]


def test_a_row_with_every_token_masked_says_so() -> None:
    settings: list[dict[str, object]] = [
        {"temperature": temperature, "allowed_token_ids": (0,), "min_tokens": 2} for temperature in (0.0, 1.0)
    ]
    requests = [make_request(slot, **sampling) for slot, sampling in enumerate(settings)]
    assert Rig(257).draw(torch.randn(2, 257), requests) == [-2, -2]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_a_record_has_room_for_all_alternatives() -> None:
    assert triton_logprobs.MOST.value == MAX_LOGPROBS


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logprobs_are_of_the_raw_distribution(vocab: int) -> None:
    logits = torch.randn(5, vocab) * 3.0
    logits[2, 30:60] = 20.0  # equal ones, the best
    logits[3, :] = 0.0
    logits[4, :] = -INF
    logits[4, [200, 70]] = torch.tensor([1.0, 2.0])
    settings: list[dict[str, object]] = [
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 2.0, "top_k": 9, "frequency_penalty": 1.0, "logit_bias": {77: 100.0}, "logprobs": 20},
        {"temperature": 1.0, "logprobs": 20},
        {"temperature": 5.0, "logprobs": 3},
        {"temperature": 0.0, "allowed_token_ids": (200,), "logprobs": 4},
    ]
    rig = Rig(vocab)
    tokens = rig.draw(logits, [make_request(slot, **sampling) for slot, sampling in enumerate(settings)])
    assert tokens[1] == 77
    expected = torch.log_softmax(logits.double(), -1)
    counts = [int(str(sampling["logprobs"])) for sampling in settings]
    for index, (token, count, value) in enumerate(zip(tokens, counts, rig.logprobs(counts), strict=True)):
        assert value.logprob == pytest.approx(float(expected[index, token]), abs=1e-5)
        order = torch.sort(logits[index], descending=True, stable=True).indices.tolist()
        assert value.rank == 1 + order.index(token)
        ids, values = unpack(value)
        assert ids == ([70, 200] if index == 4 else order[:count])
        assert values == pytest.approx(expected[index, ids].tolist(), abs=1e-5)


@triton.jit
def _noise(bits, out, CUDA: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, triton_draw._gumbel(tl.load(bits + at).to(tl.uint32, bitcast=True), CUDA))


def test_noise_is_right_where_draws_are_won() -> None:
    """The largest values, of uniform numbers next to 1, decide which of a hundred thousand tokens wins."""
    edges = [0, 1 << 9, 2 << 9, 1 << 20, (1 << 26) - 1, 1 << 26, 1 << 31, (1 << 32) - 1]
    values = np.array([*edges, *np.random.default_rng(3).integers(0, 1 << 32, 1016)], np.uint32)
    bits = torch.from_numpy(values.view(np.int32)).to(DEVICE)
    out = torch.empty(1024, dtype=torch.float32, device=DEVICE)
    _noise[(1,)](bits, out, GPU, 1024)
    one_minus_u = (values >> 9).astype(np.float64) / 2**23 + 2**-24
    expected = -np.log2(-np.log2(1.0 - one_minus_u))
    assert float(np.abs(out.cpu().numpy() - expected).max()) < 5e-5

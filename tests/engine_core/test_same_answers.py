"""Tokens, log-probabilities and prompt log-probabilities are the same to the last bit, whatever happens around them.

Requests with every kind of sampling run alone, and then together: in chunks, from cached prefixes, preempted, and with
one or two steps in flight.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from engine_core.engine import Engine
from engine_core.plan import ModelFacts
from engine_core.runner import ModelRunner, build_runner
from ipc.codec import pack_ids, unpack_ids, unpack_request_ids
from ipc.config import EngineConfig
from ipc.messages import FinishReason, Generate, TokenLogprobs
from ipc.sampling import SamplingParams
from tests.engine_core.tiny_models import save_model

VOCAB, BLOCK_SIZE, REQUESTS = 320, 16, 24
SMALLEST = 7  # blocks: less than what three requests need
LARGEST = 120  # and enough to keep every prompt for the second time


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    reason: FinishReason | None = None


def random_requests(seed: int) -> list[Generate]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(70)]
    requests = []
    for index in range(REQUESTS):
        length = rng.choice((1, 16, 17, 33, 64, 65, 70))
        prompt = shared[:length] if rng.random() < 0.6 else [rng.randrange(VOCAB) for _ in range(length)]
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.9)),
            top_p=rng.choice((1.0, 0.8)),
            top_k=rng.choice((0, 40)),
            min_p=rng.choice((0.0, 0.02)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            logit_bias=rng.choice(({}, {3: 5.0})),
            min_tokens=rng.choice((0, 1)),
            max_tokens=rng.choice((1, 5, 40)),
            stop_token_ids=rng.choice(((), (3, 4, 5))),
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, 0, 3)),
            seed=index,
        )
        if rng.random() < 0.1:
            sampling = SamplingParams(max_tokens=0, prompt_logprobs=1)
        requests.append(
            Generate(
                request_id=index,
                frontend=0,
                prompt_ids=pack_ids(prompt),
                sampling=sampling,
                arrival=0,
                priority=rng.choice((0, 0, 1, -1)),
            )
        )
    return requests


def answers(engine: Engine, requests: Iterable[Generate]) -> dict[int, Answer]:
    got: dict[int, Answer] = {}
    for request in requests:
        engine.add(request)
        got[request.request_id] = Answer()
    while engine.has_work:
        output = engine.step()
        ids = unpack_request_ids(output.request_ids)
        for request_id, token in zip(ids, unpack_ids(output.token_ids), strict=True):
            got[request_id].tokens.append(token)
        for row in output.logprobs:
            got[ids[row.row]].logprobs.append(row.value)
        for prompt in output.prompt_logprobs:
            got[prompt.request_id].prompt_logprobs = prompt.values
        for finished in output.finished:
            got[finished.request_id].reason = finished.reason
    return got


@pytest.fixture(scope="module", params=["qwen3", "mistral-window", "qwen3-moe"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, ModelFacts]:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder, request.param)
    return build_runner(EngineConfig(model=str(folder), kv_tokens=2048, threads=1, max_num_seqs=12))


def test_answers_do_not_depend_on_what_happens_around_them(loaded: tuple[ModelRunner, ModelFacts]) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    runner, facts = loaded
    requests = random_requests(seed)
    alone: dict[int, Answer] = {}
    for request in requests:
        alone |= answers(Engine(runner, facts, EngineConfig(model="")), [request])
    assert {answer.reason for answer in alone.values()} <= {"stop", "length"}
    preemptions = hits = 0
    for depth, blocks, budget in itertools.product((1, 2), (SMALLEST, LARGEST), (16, 2048)):
        config = EngineConfig(model="", max_num_seqs=12, max_num_batched_tokens=budget, policy="priority")
        room = blocks * BLOCK_SIZE
        engine = Engine(runner, replace(facts, num_blocks=blocks + 1, max_model_len=room), config, depth=depth)
        fitting = [r for r in requests if len(r.prompt_ids) // 4 + (r.sampling.max_tokens or 0) <= room]
        for _ in range(2):  # the second time from the prefix cache
            together = answers(engine, fitting)
            assert together == {request.request_id: alone[request.request_id] for request in fitting}
        preemptions += engine.stats().preemptions
        hits += engine.stats().prefix_hits
    assert preemptions > 0
    assert hits > 0

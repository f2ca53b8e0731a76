"""Greedy tokens equal transformers' own, whatever else is in the batch and however the work is cut.

Each model runs 30 prompts for 64 tokens: alone, as one batch, in chunks of 64, from cached prefixes, and with a KV pool
so small that requests are preempted. All runs must give the same tokens. These are compared with transformers by
teacher forcing: one forward pass over prompt and answer, whose argmax at every position must be the answer's next
token. By induction over the positions that is the sequence greedy decoding gives: the first token is the argmax after
the prompt, and each one after it is the argmax after the prompt and the tokens before it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from engine_core.engine import Engine
from engine_core.plan import ModelFacts
from engine_core.runner import ModelRunner, build_runner
from ipc.codec import pack_ids, unpack_ids, unpack_request_ids
from ipc.config import EngineConfig
from ipc.messages import ChatPrompt, Generate, TextPrompt
from ipc.sampling import SamplingParams
from tests.engine_core.greedy_prompts import CHATS, TEXTS, long_text
from tests.engine_core.tiny_models import save_model
from tokenizer_proc.encode import encode_prompt
from tokenizer_proc.load import load_text_model

TOKENS = 64
LONG = 3000
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """A model, its prompts, and the tokens it gives to each of them alone."""

    runner: ModelRunner
    facts: ModelFacts
    reference: PreTrainedModel
    prompts: list[list[int]]
    alone: list[list[int]]

    def engine(self, kv_tokens: int | None = None, **settings: Any) -> Engine:
        blocks = self.facts.num_blocks if kv_tokens is None else kv_tokens // BLOCK_SIZE + 1
        config = EngineConfig(model="", block_size=BLOCK_SIZE, max_num_seqs=30, **settings)
        return Engine(self.runner, replace(self.facts, num_blocks=blocks), config)


def generate(engine: Engine, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Each prompt's tokens, and how many of the prompt's came from the prefix cache."""
    for index, ids in enumerate(prompts):
        engine.add(Generate(request_id=index, frontend=0, prompt_ids=pack_ids(ids), sampling=GREEDY, arrival=0))
    tokens: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    while engine.has_work:
        output = engine.step()
        for index, token in zip(unpack_request_ids(output.request_ids), unpack_ids(output.token_ids), strict=True):
            tokens[index].append(token)
        for finished in output.finished:
            assert finished.reason == "length", finished
            cached[finished.request_id] = finished.num_cached_tokens
    assert [len(ids) for ids in tokens] == [TOKENS] * len(prompts)
    return tokens, cached


def make_case(model: Path, reference: PreTrainedModel, prompts: list[list[int]], threads: int | None = None) -> Case:
    config = EngineConfig(
        model=str(model), weights="none", dtype="float32", kv_tokens=8192, max_num_seqs=30, threads=threads
    )
    runner, facts = build_runner(config)
    case = Case(runner, facts, reference, prompts, [])
    engine = case.engine(enable_prefix_caching=False)
    return replace(case, alone=[generate(engine, [ids])[0][0] for ids in prompts])


def smollm2_prompts(path: Path) -> list[list[int]]:
    text = load_text_model(path)
    long = encode_prompt(text, TextPrompt(text=long_text()))[:LONG]
    assert len(long) == LONG
    chats = [encode_prompt(text, ChatPrompt(messages=[{"role": "user", "content": chat}])) for chat in CHATS]
    texts = [encode_prompt(text, TextPrompt(text=each)) for each in TEXTS]
    return [long, [504], *chats, *texts]


def random_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [LONG, 1, *(rng.choice((2, 15, 16, 17, 31, 63, 64, 65, 150)) for _ in range(28))]
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=["smollm2", "qwen2", "qwen3", "mistral-window", "qwen2-window", "qwen3-moe"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "smollm2":
        path: Path = request.getfixturevalue("smollm2_path")
        reference: LlamaForCausalLM = request.getfixturevalue("smollm2_reference")
        return make_case(path, reference, smollm2_prompts(path))
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(folder, request.param, max_position_embeddings=4096)
    return make_case(folder, model, random_prompts(seed=11), threads=1)


@torch.inference_mode()
def test_alone_equals_transformers(case: Case) -> None:
    for prompt, answer in zip(case.prompts, case.alone, strict=True):
        ids = torch.tensor([prompt + answer[:-1]])
        logits = case.reference(ids, logits_to_keep=TOKENS).logits[0]
        assert logits.argmax(-1).tolist() == answer


def test_one_batch(case: Case) -> None:
    assert generate(case.engine(enable_prefix_caching=False), case.prompts)[0] == case.alone


def test_chunks_of_64_then_prefix_hits(case: Case) -> None:
    engine = case.engine(max_num_batched_tokens=64)
    assert generate(engine, case.prompts)[0] == case.alone
    again, cached = generate(engine, case.prompts)
    assert again == case.alone
    expected = [(len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE for ids in case.prompts]
    assert cached == expected


def test_preemption(case: Case) -> None:
    engine = case.engine(kv_tokens=LONG + TOKENS + 400, enable_prefix_caching=False)
    assert generate(engine, case.prompts)[0] == case.alone
    assert engine.stats().preemptions > 0

"""One random life of an engine on a fake device, checked after every step against rules written here.

python -m tests.simulation.simulate SEED    runs one seed and says what it did
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, field

from engine_core.engine import Engine
from engine_core.plan import StepPlan
from engine_core.request import Request
from ipc.codec import pack_ids, unpack_ids, unpack_request_ids
from ipc.config import EngineConfig
from ipc.messages import Finished, Generate, Opened, PromptLogprobs, StepOutput
from ipc.sampling import SamplingParams
from tests.fakes import (
    VOCAB_SIZE,
    FakeRunner,
    Launched,
    expected_tokens,
    fingerprint,
    make_facts,
    require,
    root_fingerprint,
)

MAX_STEPS = 20_000


@dataclass(slots=True)
class CheckingRunner(FakeRunner):
    """Looks at every plan with the scheduler's state at that moment."""

    engine: Engine | None = None
    seen: dict[int, Request] = field(default_factory=dict)
    num_chunks: int = 0  # rows that are part of a longer computation

    def launch(self, plan: StepPlan) -> Launched:
        assert self.engine is not None
        scheduler = self.engine.scheduler
        self.check_unwritten()
        limits, counts = scheduler.limits, scheduler.kv.pool.ref_counts
        num_tokens, num_rows = sum(row.count for row in plan.rows), len(plan.rows)
        require(0 < plan.num_tokens == num_tokens <= limits.max_num_batched_tokens, "token budget")
        require(0 < num_rows <= limits.max_num_seqs, "number of rows")
        require(len({row.request.request_id for row in plan.rows}) == num_rows, "two rows of one request")
        require(len({row.request.slot for row in plan.rows}) == num_rows, "two rows in one slot")
        for row in plan.rows:
            request = row.request
            self.seen[request.request_id] = request
            self.num_chunks += not row.samples
            require(0 <= request.slot < limits.max_num_seqs, "slot")
            require(row.count > 0, "an empty row")
            require(row.stop < limits.max_request_tokens or not row.samples, "samples beyond the context")
            newest = row.stop == request.num_tokens - row.samples
            require(row.samples == (newest and request.sampling.max_tokens != 0), "samples at the wrong position")
            require(row.stop <= len(request.block_ids) * limits.block_size, "no block for a position")
            for block in request.block_ids[row.start // limits.block_size : (row.stop - 1) // limits.block_size + 1]:
                require(counts[block] == 1, "a shared block is written")
                require(not scheduler.kv.cache.holds(block), "a block that others can find is written")
        return FakeRunner.launch(self, plan)

    def check_unwritten(self) -> None:
        """Nobody can find a block that a step in flight has still to write to."""
        assert self.engine is not None
        size = self.facts.block_size
        for launched in self.queue:
            for row, table in zip(launched.plan.rows, launched.tables, strict=True):
                for block in table[row.start // size : (row.stop - 1) // size + 1]:
                    require(not self.engine.scheduler.kv.cache.holds(block), "a block is findable before it is written")


@dataclass(slots=True)
class Life:
    """What the outside has seen of one request."""

    message: Generate
    prompt: list[int]
    opened: Opened | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finished: Finished | None = None
    aborted: str = ""  # the reason to expect, if it was aborted before its end was seen


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.facts = make_facts(
            num_blocks=rng.randint(6, 24) if rng.random() < 0.7 else 60,
            block_size=rng.randint(1, 4),
            max_model_len=rng.randint(16, 64),
        )
        self.config = EngineConfig(
            model="fake",
            max_num_seqs=rng.randint(1, 7),
            max_num_batched_tokens=rng.choice((1, 2, 3, 5, 8, 16, 64)),
            block_size=self.facts.block_size,
            enable_prefix_caching=rng.random() < 0.85,
            policy=rng.choice(("fcfs", "priority")),
            seed=seed,
        )
        self.depth = rng.randint(1, 2)
        self.runner = CheckingRunner(self.facts)
        if rng.random() < 0.1:
            self.runner.raise_in_launch = {rng.randint(1, 20)}
        if rng.random() < 0.1:
            self.runner.raise_in_wait = {rng.randint(1, 20)}
        self.engine = Engine(self.runner, self.facts, self.config, depth=self.depth)
        self.runner.engine = self.engine
        self.limit = self.engine.scheduler.limits.max_request_tokens
        self.lives: dict[int, Life] = {}
        self.prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24))] for _ in range(3)]
        self.coming = [self._make_message(100 + i) for i in range(rng.randint(3, 14))]
        self.early = {message.request_id for message in self.coming if rng.random() < 0.04}
        self.steps = 0

    def _make_message(self, request_id: int) -> Generate:
        rng = self.random
        prompt = list(rng.choice(self.prefixes))[: rng.randint(1, 24)]
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 0, 1, 2, 7)))]
        if rng.random() < 0.03:
            prompt = rng.choice(([], [VOCAB_SIZE], [-1], [1] * 60))
        max_tokens = rng.choice((None, 0, 1, 2, 5, 12, 30))
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if max_tokens and rng.random() < 0.3 else 0,
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 1, 4)))),
            seed=rng.choice((None, rng.randrange(3))),
            logprobs=rng.choice((None, None, 0)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )
        if rng.random() < 0.03:
            self.runner.nan_at[request_id] = rng.randint(0, 6)
        return Generate(
            request_id=request_id,
            frontend=0,
            prompt_ids=pack_ids(prompt),
            sampling=sampling,
            arrival=1,
            priority=rng.randint(-1, 1),
            cache_salt=rng.choice(("", "", "tenant")),
            text=str(request_id).encode(),
        )

    def run(self) -> None:
        while self.coming or self.engine.has_work:
            self._arrive()
            self._abort_some()
            if self.engine.has_work:
                self._step()
        self._check_idle()

    def _arrive(self) -> None:
        idle = not self.engine.has_work
        while self.coming and (idle or self.random.random() < 0.35):
            idle = False
            message = self.coming.pop(0)
            life = self.lives[message.request_id] = Life(message, unpack_ids(message.prompt_ids))
            if message.request_id in self.early:
                self.engine.abort([message.request_id])
                life.aborted = "abort"
            self.engine.add(message)

    def _abort_some(self) -> None:
        if self.random.random() < 0.08:
            life = self.random.choice(list(self.lives.values()))
            stop_string = life.opened is not None and self.random.random() < 0.4
            if life.finished is None:
                life.aborted = life.aborted or ("stop" if stop_string else "abort")
            self.engine.abort([life.message.request_id], stop_string=stop_string)

    def _step(self) -> None:
        self.steps += 1
        assert self.steps < MAX_STEPS, "no end in sight"
        planned = self.engine.scheduler._planned
        had_news = bool(self.engine._finished or len(self.engine._pipeline))
        output = self.engine.step()
        assert had_news or self.engine.scheduler._planned > planned, "a step with work to do did nothing"
        self.engine.scheduler.check()
        self.runner.check_unwritten()
        pool = self.engine.scheduler.kv.pool
        stats = self.engine.stats()
        assert stats.kv_blocks_free + stats.kv_blocks_cached + pool.num_in_use == stats.kv_blocks_total
        self._take(output)

    def _take(self, output: StepOutput) -> None:
        for opened in output.opened:
            life = self.lives[opened.request_id]
            assert life.opened is None
            assert life.finished is None
            assert opened.num_prompt_tokens == len(life.prompt)
            assert opened.text == life.message.text
            life.opened = opened
        values = {entry.row: entry.value.logprob for entry in output.logprobs}
        rows = list(zip(unpack_request_ids(output.request_ids), unpack_ids(output.token_ids), strict=True))
        assert all(count == 1 for count in Counter(request_id for request_id, _ in rows).values())
        for row, (request_id, token) in enumerate(rows):
            life = self.lives[request_id]
            assert life.opened is not None
            assert life.finished is None, "a token after the end"
            assert values.get(row) == (None if life.message.sampling.logprobs is None else -float(token))
            life.tokens.append(token)
        for collected in output.prompt_logprobs:
            life = self.lives[collected.request_id]
            assert life.opened in output.opened
            life.prompt_logprobs = collected
        for finished in output.finished:
            life = self.lives[finished.request_id]
            assert life.finished is None, "a second end"
            life.finished = finished
            self._check_end(life, finished)

    def _check_end(self, life: Life, end: Finished) -> None:
        sampling = life.message.sampling
        assert end.num_output_tokens == len(life.tokens)
        assert end.num_prompt_tokens == len(life.prompt)
        valid = 0 < len(life.prompt) <= self.limit - (sampling.max_tokens != 0)
        valid = valid and all(0 <= token < VOCAB_SIZE for token in life.prompt)
        if life.aborted and end.reason == life.aborted and end.stop_token is None:
            assert self._is_start_of_expected(life, complete=False)
            return
        assert (end.reason == "rejected") == (not valid), end
        if end.reason == "rejected":
            assert end.error is not None
            assert end.error.status == 400
            return
        if end.reason == "error":
            nan = self.runner.nan_at.get(end.request_id) == len(life.tokens)
            assert nan or self.runner.raise_in_launch or self.runner.raise_in_wait
            assert end.error is not None
            assert end.error.status == 500
            assert self._is_start_of_expected(life, complete=False)
            return
        assert end.reason in ("stop", "length"), end
        assert life.opened is not None
        assert self._is_start_of_expected(life, complete=True)
        assert (end.reason == "stop") == (end.stop_token is not None)
        if end.stop_token is not None:
            assert end.stop_token == life.tokens[-1]
            assert end.stop_token_is_eos == (end.stop_token in self.facts.eos_token_ids)
        assert (life.prompt_logprobs is not None) == (sampling.prompt_logprobs is not None)
        if life.prompt_logprobs is not None:
            self._check_prompt_logprobs(life, life.prompt_logprobs)

    def _is_start_of_expected(self, life: Life, complete: bool) -> bool:
        request = self.runner.seen.get(life.message.request_id)
        if request is None:
            return not life.tokens and not complete
        expected = expected_tokens(
            life.prompt, life.message.sampling, request.seed, self.limit, life.message.cache_salt
        )
        return life.tokens == (expected if complete else expected[: len(life.tokens)])

    def _check_prompt_logprobs(self, life: Life, collected: PromptLogprobs) -> None:
        assert unpack_ids(collected.ids) == life.prompt
        context, expected = root_fingerprint(life.message.cache_salt), list[float | None]([None])
        for token in life.prompt[:-1]:
            context = fingerprint(context, token)
            expected.append(-float(context % 1000))
        assert [value and value.logprob for value in collected.values] == expected

    def _check_idle(self) -> None:
        scheduler = self.engine.scheduler
        assert all(life.finished is not None for life in self.lives.values())
        assert scheduler.kv.pool.num_in_use == 0
        assert scheduler.kv.pool.num_available == scheduler.kv.pool.total
        assert scheduler._slots.num_free == self.config.max_num_seqs
        assert not scheduler._returns
        assert scheduler.kv.idle
        assert not self.engine._requests
        assert not self.runner.queue
        if not self.config.enable_prefix_caching:
            assert scheduler.kv.pool.num_cached == 0


def simulate(seed: int) -> Simulation:
    simulation = Simulation(seed)
    try:
        simulation.run()
    except BaseException as error:
        error.add_note(f"simulation seed {seed}: python -m tests.simulation.simulate {seed}")
        raise
    return simulation


if __name__ == "__main__":
    done = simulate(int(sys.argv[1]))
    print(done.config, f"depth={done.depth}", done.engine.stats(), *done.lives.values(), sep="\n")

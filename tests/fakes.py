"""A runner without a model, that behaves like a device: it keeps KV by block, samples from what it reads there, and
runs launched steps later, in order.

The KV of a position is a fingerprint of all tokens up to it (and the salt), so a row that is shown the wrong blocks, or
blocks that somebody else has written to since, is noticed at once. A token depends on nothing but that fingerprint, the
request's seed and the position: `expected_tokens` gives the answer of a request that runs alone.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_core.plan import ModelFacts, ScheduledRow, StepPlan, StepTokens
from engine_core.request import Request
from ipc.messages import TokenLogprobs
from ipc.sampling import SamplingParams

VOCAB_SIZE = 50
EOS = 49


class WrongUseError(BaseException):
    """The engine has broken a rule of its runner. No Exception, because those it has to survive."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise WrongUseError(what)


def make_facts(
    *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 128, eos: Sequence[int] = (EOS,)
) -> ModelFacts:
    return ModelFacts(
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        num_blocks=num_blocks,
        block_size=block_size,
        eos_token_ids=frozenset(eos),
        architecture="fake",
        device="cpu",
        dtype="float32",
        weights="none",
        attention="torch",
        kv_bytes_per_token=8,
    )


def fingerprint(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token + 1) & 0x7FFF_FFFF_FFFF_FFFF


def root_fingerprint(salt: str) -> int:
    return zlib.crc32(salt.encode())  # not hash(): a seed must mean the same in every process


def sample(context: int, seed: int, position: int) -> int:
    """The token after a context: a fair draw over the vocabulary, EOS included."""
    return random.Random(context * 31 + seed * 7 + position).randrange(VOCAB_SIZE)


def expected_tokens(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    limit: int,
    salt: str = "",
    eos: Sequence[int] = (EOS,),
) -> list[int]:
    """What a request gets when it runs alone, if `limit` tokens fit beside nothing else. Independent of the engine."""
    context, output = root_fingerprint(salt), list[int]()
    for token in prompt_ids:
        context = fingerprint(context, token)
    most = limit - len(prompt_ids)
    if sampling.max_tokens is not None:
        most = min(most, sampling.max_tokens)
    while len(output) < most:
        token = sample(context, seed, len(prompt_ids) + len(output))
        output.append(token)
        context = fingerprint(context, token)
        ends = token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos)
        if ends and len(output) > sampling.min_tokens:
            break
    return output


@dataclass(slots=True, eq=False)
class Launched:
    """A step on the device: what the host handed over at launch, run when it is awaited or before."""

    runner: FakeRunner
    plan: StepPlan
    ids: list[list[int]]  # per row, without a last id that only the device knows
    tables: list[list[int]]  # per row, its block table then
    slots: list[int]
    follows_on_loss: bool
    result: StepTokens | None = None

    def wait(self) -> StepTokens:
        self.runner.run_until(self)
        assert self.result is not None
        return self.result


@dataclass(slots=True)
class FakeRunner:
    """`nan_at`: request id -> output position at which its logits are NaN. `raise_at`: launches or waits that raise."""

    facts: ModelFacts
    nan_at: dict[int, int] = field(default_factory=dict)
    raise_in_launch: set[int] = field(default_factory=set)  # steps
    raise_in_wait: set[int] = field(default_factory=set)
    kv: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> fingerprint
    last_sampled: dict[int, int] = field(default_factory=dict)  # slot -> id
    queue: deque[Launched] = field(default_factory=deque)
    plans: list[StepPlan] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)  # (request id, slot)
    max_plans: int = 0  # kept in `plans`
    put_off: int = 0  # pieces of work that can wait, and the look that finds none
    lost: set[int] = field(default_factory=set)  # requests of launches that raised: what follows on them is worthless

    def launch(self, plan: StepPlan) -> Launched:
        if plan.step in self.raise_in_launch:
            self.lost.update(row.request.request_id for row in plan.rows)
            raise RuntimeError(f"launch of step {plan.step}")
        if len(self.plans) < self.max_plans:
            self.plans.append(plan)
        rows = plan.rows
        launched = Launched(
            self,
            plan,
            [row.request.known_ids(row.start, row.stop) for row in rows],
            [list(row.request.block_ids) for row in rows],
            [row.request.slot for row in rows],
            follows_on_loss=any(row.request.request_id in self.lost for row in rows),
        )
        self._check_apart(launched)
        self.queue.append(launched)
        return launched

    def idle(self) -> bool:
        self.put_off -= self.put_off > 0
        return self.put_off > 0

    def release(self, request: Request) -> None:
        require(request.slot >= 0, "released without a slot")
        require(not any(request.slot in launched.slots for launched in self.queue), "slot released while in flight")
        self.released.append((request.request_id, request.slot))

    def run_until(self, last: Launched) -> None:
        while last.result is None and last in self.queue:
            self._run(self.queue.popleft())
        if last.plan.step in self.raise_in_wait or last.result is None:
            raise RuntimeError(f"step {last.plan.step}")

    def _check_apart(self, new: Launched) -> None:
        """Blocks and slots of a step in flight belong to the same requests still, or to nobody."""
        size = self.facts.block_size
        written = {
            block: row.request.request_id
            for row, table in zip(new.plan.rows, new.tables, strict=True)
            for block in table[row.start // size : (row.stop - 1) // size + 1]
        }
        num_written = sum((row.stop - 1) // size - row.start // size + 1 for row in new.plan.rows)
        require(len(written) == num_written, "a block is written by two requests")
        for old in self.queue:
            for row, table, slot in zip(old.plan.rows, old.tables, old.slots, strict=True):
                for block in table:
                    require(
                        written.get(block, row.request.request_id) == row.request.request_id, "written while in flight"
                    )
                for other, other_slot in zip(new.plan.rows, new.slots, strict=True):
                    require((slot == other_slot) == (row.request is other.request), "slot shared while in flight")

    def _run(self, launched: Launched) -> None:
        rows = launched.plan.rows
        if launched.follows_on_loss:
            return
        for row, ids, slot in zip(rows, launched.ids, launched.slots, strict=True):
            if len(ids) < row.count:
                ids.append(self.last_sampled[slot])
            require(len(ids) == row.count, "a token that nobody knows")
        self._write(launched)
        result = StepTokens([])
        for row, ids, table, slot in zip(rows, launched.ids, launched.tables, launched.slots, strict=True):
            request = row.request
            contexts = self._read(row, ids, table)
            if request.sampling.prompt_logprobs is not None and row.start < request.num_prompt_tokens - 1:
                stop = min(row.stop, request.num_prompt_tokens - 1)
                result.prompt_logprobs[request.request_id] = [
                    TokenLogprobs(logprob=-float(context % 1000), rank=1) for context in contexts[row.start : stop]
                ]
            if row.samples:
                index = len(result.token_ids)
                token = sample(contexts[-1], request.seed, row.stop)
                if self.nan_at.get(request.request_id) == row.stop - request.num_prompt_tokens:
                    result.failed[index] = "NaN logits"
                    token = 0
                if request.sampling.logprobs is not None:
                    result.logprobs[index] = TokenLogprobs(logprob=-float(token), rank=1)
                result.token_ids.append(token)
                self.last_sampled[slot] = token
        launched.result = result

    def _at(self, table: list[int], position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.facts.block_size)
        require(table[block] != 0, "the null block is in use")
        return table[block], offset

    def _write(self, launched: Launched) -> None:
        for row, ids, table in zip(launched.plan.rows, launched.ids, launched.tables, strict=True):
            salt = row.request.cache_salt
            value = self.kv[self._at(table, row.start - 1)] if row.start else root_fingerprint(salt)
            for position, token in enumerate(ids, row.start):
                value = fingerprint(value, token)
                self.kv[self._at(table, position)] = value

    def _read(self, row: ScheduledRow, ids: list[int], table: list[int]) -> list[int]:
        """Attention: the fingerprint at every position up to the row's end, each of which must be right."""
        before = row.request.known_ids(0, row.start)
        # Tokens of earlier steps in flight: the device knows them, the host not yet.
        unknown = row.start - len(before)
        value, contexts = root_fingerprint(row.request.cache_salt), list[int]()
        for position in range(row.stop):
            found = self.kv.get(self._at(table, position))
            if position < row.start - unknown:
                value = fingerprint(value, before[position])
            elif position >= row.start:
                value = fingerprint(value, ids[position - row.start])
            else:
                value = found if found is not None else -1
            require(found == value, f"request {row.request.request_id} reads wrong KV at {position}")
            contexts.append(value)
        return contexts

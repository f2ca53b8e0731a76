"""`AsyncLLM`: many tasks on one engine thread, cancelled at any time."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from engine_core import AsyncLLM, SamplingParams
from engine_core.outputs import EngineError
from tests.engine_core.tiny_models import save_model


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Iterator[AsyncLLM]:
    """Used by several event loops, one after the other."""
    llm = AsyncLLM(str(tiny_path), kv_tokens=1024, max_model_len=128, threads=1)
    yield llm
    asyncio.run(llm.close())


async def assert_becomes_idle(llm: AsyncLLM) -> None:
    end = time.monotonic() + 60
    while (stats := await llm.stats()).running or stats.waiting:
        assert time.monotonic() < end, stats
        await asyncio.sleep(0.01)
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
    assert not llm._mailboxes


async def until_running(llm: AsyncLLM, count: int) -> None:
    """The engine has so many requests: what a task asks for reaches it by way of two threads."""
    end = time.monotonic() + 60
    while (stats := await llm.stats()).running + stats.waiting < count:
        assert time.monotonic() < end, stats


async def test_concurrent_tasks_get_the_answers_they_get_alone(tiny: AsyncLLM) -> None:
    params = [SamplingParams(seed=i, max_tokens=5 + i, ignore_eos=True, n=1 + i % 2) for i in range(24)]
    alone = [await tiny.generate([i + 1, 2, 3], params[i]) for i in range(24)]
    steps = (await tiny.stats()).step
    together = await asyncio.gather(*(tiny.generate([i + 1, 2, 3], params[i]) for i in range(24)))
    for one, other in zip(alone, together, strict=True):
        assert [c.token_ids for c in one.choices] == [c.token_ids for c in other.choices]
    assert (await tiny.stats()).step - steps < 24 * 5, "they were not batched"
    await assert_becomes_idle(tiny)


async def test_stream_is_the_whole_answer_in_pieces(tiny: AsyncLLM) -> None:
    params = SamplingParams(seed=4, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    whole = await tiny.generate([1, 2, 3], params)
    parts = [part async for part in tiny.stream([1, 2, 3], params, text=False)]
    assert list(itertools.chain(*(part.token_ids for part in parts))) == whole.token_ids
    assert list(itertools.chain(*(part.logprobs for part in parts))) == whole.logprobs
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == 3
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


async def test_without_max_tokens_the_context_is_the_bound(tiny: AsyncLLM) -> None:
    output = await tiny.generate([1, 2, 3], SamplingParams(ignore_eos=True))
    assert len(output.token_ids) == 125


async def test_closing_or_leaving_a_stream_gives_its_kv_back(tiny: AsyncLLM) -> None:
    async with aclosing(tiny.stream([1] * 40, SamplingParams(ignore_eos=True), text=False)) as stream:  # type: ignore[type-var]
        async for _ in stream:
            break
    await assert_becomes_idle(tiny)
    unstarted = tiny.stream([1], SamplingParams(), text=False)
    await unstarted.aclose()  # type: ignore[attr-defined]
    await assert_becomes_idle(tiny)


async def test_tasks_cancelled_at_any_time_leave_nothing(tiny: AsyncLLM) -> None:
    seed = 7
    print(f"{seed=}")
    rng = random.Random(seed)
    params = SamplingParams(ignore_eos=True, n=2)
    survivor = asyncio.create_task(tiny.generate([9, 9], SamplingParams(seed=1, ignore_eos=True, max_tokens=100)))
    tasks = [asyncio.create_task(tiny.generate([rng.randrange(1, 300)] * 20, params)) for _ in range(40)]
    cancelled = set()
    for task in rng.sample(tasks, len(tasks)):
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))
        if task.cancel():  # if not, it has had its answer already
            cancelled.add(task)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(cancelled) > 10
    assert [task for task in tasks if task.cancelled()] == [task for task in tasks if task in cancelled]
    expected = await tiny.generate([9, 9], SamplingParams(seed=1, ignore_eos=True, max_tokens=100))
    assert (await survivor).token_ids == expected.token_ids
    await assert_becomes_idle(tiny)


async def test_the_event_loop_is_free_while_the_engine_works(tiny: AsyncLLM) -> None:
    task = asyncio.create_task(tiny.generate([1] * 60, SamplingParams(ignore_eos=True, n=4)))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    steps = 60  # at least so many were made for the answer
    assert turns > steps


async def test_errors_reach_the_task_that_made_them(tiny: AsyncLLM) -> None:
    good = asyncio.create_task(tiny.generate([3], SamplingParams(max_tokens=30, ignore_eos=True)))
    with pytest.raises(ValueError, match="320"):
        await tiny.generate([320])
    with pytest.raises(ValueError, match="prompt"):
        await tiny.generate(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params"):
        await tiny.generate([1], "greedy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        await tiny.generate([1], SamplingParams(stop=("x",)))
    with pytest.raises(ValueError, match="empty"):
        async for _ in tiny.stream([], text=False):
            pass
    assert len((await good).token_ids) == 30
    await assert_becomes_idle(tiny)


def test_an_event_loop_that_dies_takes_its_requests_with_it(tiny: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = tiny.stream([1, 2], SamplingParams(ignore_eos=True), text=False)
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(assert_becomes_idle(tiny))
    del stream


async def test_close_answers_those_who_wait(tiny_path: Path) -> None:
    llm = await AsyncLLM.load(str(tiny_path), kv_tokens=512, threads=1)
    stream = llm.stream([1], SamplingParams(ignore_eos=True), text=False)
    await anext(stream)
    waiting = asyncio.create_task(llm.generate([2], SamplingParams(ignore_eos=True)))
    await until_running(llm, 2)
    await llm.close()
    with pytest.raises(EngineError, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(EngineError, match="closed"):
        await waiting
    with pytest.raises(EngineError, match="closed"):
        await llm.generate([1])
    await llm.close()


async def test_an_engine_that_breaks_tells_everyone(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with await AsyncLLM.load(str(tiny_path), kv_tokens=512, threads=1) as llm:

        def explode(session: object) -> None:
            raise MemoryError("no more")

        waiting = [asyncio.create_task(llm.generate([i], SamplingParams(ignore_eos=True))) for i in (1, 2)]
        await until_running(llm, 2)
        llm._engine.post(explode)
        for task in waiting:
            with pytest.raises(EngineError, match="no more"):
                await task
        with pytest.raises(EngineError, match="closed"):
            await llm.generate([1])
    assert "the engine thread failed" in caplog.text


async def test_a_model_that_cannot_be_loaded_raises_in_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        await AsyncLLM.load(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError):
        AsyncLLM(str(tmp_path))


async def test_text_stop_strings_and_chat(smollm2_path: Path) -> None:
    async with await AsyncLLM.load(str(smollm2_path), kv_tokens=2048, threads=1) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=24, stop=(" 8",))
        began = time.monotonic()
        whole, chat, conversation = await asyncio.gather(
            llm.generate("1, 2, 3, 4,", greedy),
            llm.generate([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0.0, max_tokens=6)),
            llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)),
        )
        print(f"{time.monotonic() - began:.1f} s")
        assert whole.text.endswith("7,")
        assert (whole.finish_reason, whole.stop_reason) == ("stop", " 8")
        assert chat.text
        assert conversation.logprobs is not None
        assert "".join(item.text or "" for item in conversation.logprobs) == conversation.text
        parts = [part async for part in llm.stream("1, 2, 3, 4,", greedy)]
        assert "".join(part.text for part in parts) == whole.text
        assert parts[-1].stop_reason == " 8"
        await assert_becomes_idle(llm)

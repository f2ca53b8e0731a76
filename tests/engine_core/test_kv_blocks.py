from __future__ import annotations

import random

import pytest

from engine_core.kv_blocks import BlockPool
from engine_core.prefix_cache import PrefixCache


def make_pool(num_blocks: int) -> tuple[BlockPool, PrefixCache]:
    cache = PrefixCache()
    return BlockPool(num_blocks, cache), cache


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_in_use


def test_block_zero_is_never_given_out() -> None:
    pool, _ = make_pool(5)
    blocks = pool.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="1 KV blocks asked for, 0 available"):
        pool.allocate(1)


def test_a_refused_allocation_takes_nothing() -> None:
    pool, _ = make_pool(4)
    with pytest.raises(RuntimeError, match="4 KV blocks asked for, 3 available"):
        pool.allocate(4)
    assert counts(pool) == (3, 0, 0)


def test_a_block_is_free_after_its_last_holder() -> None:
    pool, _ = make_pool(4)
    blocks = pool.allocate(2)
    pool.acquire(blocks)
    pool.release(blocks)
    assert counts(pool) == (1, 0, 2)
    pool.release(blocks)
    assert counts(pool) == (3, 0, 0)


def test_releasing_too_often_is_an_error_and_not_a_second_free_block() -> None:
    pool, _ = make_pool(4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often than held"):
        pool.release(blocks)
    assert counts(pool) == (3, 0, 0)


def test_known_blocks_stay_cached_and_can_be_taken_up_again() -> None:
    pool, cache = make_pool(4)
    blocks = pool.allocate(2)
    cache.insert([b"one"], [blocks[0]])
    pool.release(blocks)
    assert counts(pool) == (2, 1, 0)
    assert pool.num_idle(blocks[:1]) == 1
    pool.acquire(blocks[:1])
    assert counts(pool) == (2, 0, 1)
    assert pool.num_idle(blocks[:1]) == 0
    assert cache.find(b"one") == blocks[0]


def test_free_blocks_go_first_then_the_least_recently_used_end_of_a_prefix() -> None:
    pool, cache = make_pool(6)
    old, new = pool.allocate(2), pool.allocate(2)
    for name, blocks in (("old", old), ("new", new)):
        for index, block in enumerate(blocks):
            cache.insert([f"{name}{index}".encode()], [block])
        pool.release(blocks)
    free = pool.allocate(1)
    assert free[0] not in old + new
    assert pool.allocate(1) == [old[1]]
    assert cache.find(b"old1") is None
    assert cache.find(b"old0") == old[0]
    pool.acquire([old[0]])  # used again: now the newest
    pool.release([old[0]])
    assert pool.allocate(3) == [new[1], new[0], old[0]]
    assert len(cache) == 0


def test_forgotten_blocks_are_free_at_once_or_when_released() -> None:
    pool, cache = make_pool(4)
    held, idle = pool.allocate(1), pool.allocate(1)
    cache.insert([b"held"], [held[0]])
    cache.insert([b"idle"], [idle[0]])
    pool.release(idle)
    pool.forget(held + idle)
    assert counts(pool) == (2, 0, 1)
    pool.release(held)
    assert counts(pool) == (3, 0, 0)


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one more"):
        make_pool(1)


@pytest.mark.parametrize("damage", ["leak", "double free", "null block", "unknown cached", "known free"])
def test_check_finds_every_kind_of_damage(damage: str) -> None:
    pool, cache = make_pool(6)
    table = pool.allocate(2)
    cached = pool.allocate(1)
    cache.insert([b"x"], [cached[0]])
    pool.release(cached)
    pool.check([table])
    if damage == "leak":
        pool.ref_counts[table[0]] += 1
    elif damage == "double free":
        pool._free.append(pool._free[0])
    elif damage == "null block":
        table.append(0)
    elif damage == "unknown cached":
        cache.discard([cached[0]])
    else:
        cache.insert([b"y"], [pool._free[0]])
    with pytest.raises(AssertionError):
        pool.check([table])


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    pool, cache = make_pool(rng.randint(3, 20))
    tables: list[list[int]] = []
    for turn in range(300):
        choice = rng.random()
        if choice < 0.4:
            count = rng.randint(0, 4)
            if count <= pool.num_available:
                tables.append(pool.allocate(count))
        elif choice < 0.6 and tables:
            shared = list(rng.choice(tables))
            pool.acquire(shared)
            tables.append(shared)
        elif choice < 0.75 and tables and tables[-1]:
            cache.insert([str(rng.randint(0, 30)).encode()], [rng.choice(tables[-1])])
        elif choice < 0.8:
            known = cache.find(str(rng.randint(0, 30)).encode())
            if known is not None:
                pool.forget([known])
        elif tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        try:
            pool.check(tables)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, turn {turn}") from error
        assert sum(counts(pool)) == pool.total
    for table in tables:
        pool.release(table)
    assert pool.num_in_use == 0

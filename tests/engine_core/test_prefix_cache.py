from __future__ import annotations

import random

import pytest

from engine_core.prefix_cache import BlockHasher, PrefixCache
from engine_core.request import Request
from ipc.sampling import SamplingParams

KEY = b"k" * 32


def make_request(ids: list[int], salt: str = "", output_ids: tuple[int, ...] = ()) -> Request:
    request = Request(1, ids, SamplingParams(), cache_salt=salt)
    request.output_ids += output_ids
    return request


def hashes(ids: list[int], salt: str = "", size: int = 4, key: bytes | None = KEY) -> list[bytes]:
    request = make_request(ids, salt)
    BlockHasher(size, key).extend(request, len(ids))
    return request.block_hashes


def test_one_hash_per_full_block() -> None:
    assert [len(hashes(list(range(n)))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_a_hash_covers_everything_before_its_end() -> None:
    base = hashes([1, 2, 3, 4, 5, 6, 7, 8])
    assert hashes([1, 2, 3, 4, 5, 6, 7, 9])[0] == base[0]
    assert hashes([1, 2, 3, 4, 5, 6, 7, 9])[1] != base[1]
    assert hashes([0, 2, 3, 4, 5, 6, 7, 8])[1] != base[1]  # same block, other parent
    assert len(set(hashes([5] * 40))) == 10  # same tokens, another place


def test_salts_and_keys_separate() -> None:
    ids = list(range(8))
    assert not set(hashes(ids, "a")) & set(hashes(ids, "b"))
    assert not set(hashes(ids, "a")) & set(hashes(ids))
    assert not set(hashes(ids, key=b"other")) & set(hashes(ids))


def test_the_key_is_random_per_process_object() -> None:
    assert hashes([1, 2, 3, 4], key=None) != hashes([1, 2, 3, 4], key=None)


def test_a_salt_that_is_no_valid_text_is_hashed_too() -> None:
    assert hashes([1, 2, 3, 4], "\udcff") != hashes([1, 2, 3, 4], "\udcfe")


def test_token_boundaries_cannot_be_shifted() -> None:
    seen = {
        hashes(ids, size=2)[0] for ids in ([1, 23], [12, 3], [123, 0], [0, 123], [256, 1], [1, 256], [2**31 - 1, 0])
    }
    assert len(seen) == 7


@pytest.mark.parametrize("seed", range(10))
def test_hashing_in_pieces_over_prompt_and_output_equals_hashing_at_once(seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(150_000) for _ in range(rng.randint(20, 60))]
    cut = rng.randint(1, len(ids) - 1)
    request, hasher = make_request(ids[:cut], "s", tuple(ids[cut:])), BlockHasher(4, KEY)
    for stop in sorted(rng.sample(range(len(ids)), 5)):
        hasher.extend(request, stop)
    hasher.extend(request, len(ids))
    assert request.block_hashes == hashes(ids, "s"), f"seed {seed}"


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    hasher, cache = BlockHasher(4, KEY), PrefixCache()
    cache.insert(hashes(list(range(12))), range(1, 4))
    assert cache.match(make_request(list(range(12))), hasher) == [1, 2]
    assert cache.match(make_request(list(range(13))), hasher) == [1, 2, 3]
    assert cache.match(make_request(list(range(4))), hasher) == []
    assert cache.match(make_request([0]), hasher) == []


def test_a_match_ends_at_the_first_block_that_is_not_known() -> None:
    hasher, cache = BlockHasher(4, KEY), PrefixCache()
    cache.insert(hashes(list(range(16))), range(1, 5))
    cache.discard([2])
    request = make_request(list(range(16)))
    assert cache.match(request, hasher) == [1]
    assert len(request.block_hashes) == 2  # hashed no further than needed


def test_the_first_of_two_equal_blocks_is_the_one_that_is_found() -> None:
    cache = PrefixCache()
    cache.insert([b"h", b"h"], [1, 2])
    assert cache.find(b"h") == 1
    assert not cache.holds(2)
    cache.discard([2])
    assert cache.find(b"h") == 1
    cache.discard([1])
    assert cache.find(b"h") is None

"""Which blocks hold the KV of which prefix. Knows hashes and block numbers, not who holds a block.

The hash of a full block covers all tokens up to its end: blake2b over the parent block's hash and the block's tokens,
each as four bytes, starting from a root that covers the extra keys (the cache salt). The root is keyed with bytes that,
like all hashes, never leave the process: without it no hash can be computed, so nobody can craft a prompt that hits
another's blocks, and salts keep tenants apart that must not see each other.

Only full blocks are found, and never the one with a request's last token: a shared block is therefore never written.
Two requests that compute the same block at the same time both keep their own; the first one is what others find.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from engine_core.request import Request

_HASH_BYTES = 16  # collisions below a secret root cannot be searched for, and by chance need 2**64 blocks


class BlockHasher:
    """Brings `Request.block_hashes` up to date. `key` is for tests; it is random otherwise."""

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self.block_size = block_size
        key = os.urandom(32) if key is None else key
        self._keyed_root = hashlib.blake2b(key=key, digest_size=_HASH_BYTES, person=b"root")  # never equals a block's
        self._empty = hashlib.blake2b(digest_size=_HASH_BYTES)  # with a key, each block would take twice the work

    def extend(self, request: Request, num_tokens: int) -> None:
        """Hash the full blocks among the first `num_tokens` tokens, all of which are committed."""
        hashes, size = request.block_hashes, self.block_size
        start, stop = len(hashes) * size, num_tokens // size * size
        if stop <= start:
            return
        data = request.known_array(start, stop).tobytes()
        width = 4 * size
        parent = hashes[-1] if hashes else self._root(request.cache_salt)
        new_block = self._empty.copy
        for at in range(0, len(data), width):
            block = new_block()
            block.update(parent + data[at : at + width])
            parent = block.digest()
            hashes.append(parent)

    def _root(self, salt: str) -> bytes:
        root = self._keyed_root.copy()
        root.update(salt.encode("utf-8", "surrogatepass"))
        return root.digest()


class PrefixCache:
    """Hash to block and back. Whether a known block is in use is the pool's business."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def holds(self, block: int) -> bool:
        return block in self._hash_of

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def insert(self, hashes: Iterable[bytes], blocks: Iterable[int]) -> None:
        """Each of `blocks` holds the computed KV of the prefix with its hash from now on. No effect where another block
        is known for it."""
        block_of, hash_of = self._block_of, self._hash_of
        for block_hash, block in zip(hashes, blocks, strict=True):
            if block_hash not in block_of:
                block_of[block_hash] = block
                hash_of[block] = block_hash

    def discard(self, blocks: Iterable[int]) -> None:
        block_of, hash_of = self._block_of, self._hash_of
        for block in blocks:
            block_hash = hash_of.pop(block, None)
            if block_hash is not None:
                del block_of[block_hash]

    def match(self, request: Request, hasher: BlockHasher) -> list[int]:
        """The blocks of the longest known prefix that leaves at least one token to compute.

        Hashes no further than one block past the hit, so that a long prompt's hashing is spread over its chunks.
        """
        blocks: list[int] = []
        for index in range((request.num_tokens - 1) // hasher.block_size):
            if index == len(request.block_hashes):
                hasher.extend(request, (index + 1) * hasher.block_size)
            block = self._block_of.get(request.block_hashes[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

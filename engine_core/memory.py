"""Running out of memory, in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine_core.errors import UserError

SMALLER_STEPS = "lower --max-num-batched-tokens, --max-num-seqs or the KV pool (--kv-tokens)"


@contextmanager
def out_of_memory(what: str, remedy: str) -> Iterator[None]:
    """Turns an allocation failure, on the host or on the GPU, into a plain `UserError`."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UserError(f"not enough memory for {what}; {remedy}") from error
    except RuntimeError as error:  # what torch's CPU allocator raises
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        raise UserError(f"not enough memory for {what}; {remedy}") from error

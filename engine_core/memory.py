"""Running out of memory, in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOMEM

import torch

from engine_core.errors import UserError

SMALLER_STEPS = "lower --max-num-batched-tokens, --max-num-seqs or the KV pool (--kv-tokens)"


def is_out_of_memory(error: BaseException) -> bool:
    """Of the host or the GPU, whoever noticed it: torch's allocators, the system, the driver, or a library."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):  # mmap's
        return error.errno == ENOMEM
    text = str(error).lower()
    words = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


@contextmanager
def out_of_memory(what: str, remedy: str) -> Iterator[None]:
    """Turns an allocation failure, on the host or on the GPU, into a plain `UserError`."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        refuse_if_out_of_memory(error, what, remedy)
        raise


def refuse_if_out_of_memory(error: Exception, what: str, remedy: str) -> None:
    """Raises a plain `UserError` in the place of an allocation failure, and nothing in that of another error."""
    if is_out_of_memory(error):
        raise UserError(f"not enough memory for {what}; {remedy}") from error

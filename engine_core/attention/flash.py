"""FlashAttention packages for prompts on a GPU: whichever generation can be imported, behind one interface.

They take whole prompts with K and V in one piece, and prompts whose K and V are in pages. Pages stay as small as ours:
the last page of a request may hold NaN that another has left, which must not count. Kernels that gather a page token by
token clear what lies behind a context; those that fetch pages as large as their tiles by TMA do not.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine_core.errors import UserError

SMALL_PAGE = 64  # tokens; below it no kernel uses TMA

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows with several query tokens each, one after the other, and where their K and V are. int32 on the device."""

    query_starts: torch.Tensor  # [rows + 1], from 0
    key_starts: torch.Tensor  # [rows + 1]: sums of `lengths`, from 0
    lengths: torch.Tensor  # [rows]: contexts, the step's tokens included
    tables: torch.Tensor  # [rows, blocks]
    longest_query: int
    longest: int
    scale: float  # of the scores


class FlashAttention(Protocol):
    """Causal attention. q [tokens, heads, dim]; returns the same shape. `window`: how many keys, its own the last, a
    token sees; None: all."""

    name: str

    def takes_pages(self, block_size: int) -> bool: ...

    def whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PromptRows, window: int | None = None
    ) -> torch.Tensor:
        """k and v [tokens, kv_heads, dim] hold the whole context of each row: queries and keys start alike."""
        ...

    def paged(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PromptRows, window: int | None = None
    ) -> torch.Tensor:
        """keys and values [blocks, block_size, kv_heads, dim]."""
        ...


class Flash2:
    """`flash_attn`: Ampere and newer."""

    name: str = "flash_attn 2"
    modules: tuple[str, ...] = ("flash_attn",)

    def __init__(self, module: Any) -> None:
        self._varlen: Callable[..., Any] = module.flash_attn_varlen_func

    @staticmethod
    def runs_on(capability: tuple[int, int]) -> bool:
        return capability >= (8, 0)

    def takes_pages(self, block_size: int) -> bool:
        return block_size % 256 == 0

    def whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PromptRows, window: int | None = None
    ) -> torch.Tensor:
        lengths = rows.query_starts, rows.query_starts, rows.longest_query, rows.longest_query
        return _output(self._varlen(q, k, v, *lengths, **self._mask(rows, window)))

    def paged(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PromptRows, window: int | None = None
    ) -> torch.Tensor:
        lengths = rows.query_starts, rows.key_starts, rows.longest_query, rows.longest
        return _output(self._varlen(q, keys, values, *lengths, block_table=rows.tables, **self._mask(rows, window)))

    @staticmethod
    def _mask(rows: PromptRows, window: int | None) -> dict[str, Any]:
        sides = (-1, -1) if window is None else (window - 1, 0)
        return {"softmax_scale": rows.scale, "causal": True, "window_size": sides}


class Flash3(Flash2):
    """`flash_attn_interface`, or the forward pass alone as `fa3_fwd_interface`: Hopper."""

    name = "flash_attn 3"
    modules = ("flash_attn_interface", "fa3_fwd_interface")

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._cached: Callable[..., Any] = module.flash_attn_with_kvcache

    @staticmethod
    def runs_on(capability: tuple[int, int]) -> bool:
        return capability[0] == 9

    def takes_pages(self, block_size: int) -> bool:
        return block_size < SMALL_PAGE

    def paged(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PromptRows, window: int | None = None
    ) -> torch.Tensor:
        queries = {"cu_seqlens_q": rows.query_starts, "max_seqlen_q": rows.longest_query}
        pages = {"cache_seqlens": rows.lengths, "page_table": rows.tables}
        return _output(self._cached(q, keys, values, **queries, **pages, **self._mask(rows, window)))


class Flash4(Flash2):
    """`flash_attn.cute`: Hopper and newer. Compiles a kernel at its first call."""

    name = "flash_attn 4"
    modules = ("flash_attn.cute",)

    @staticmethod
    def runs_on(capability: tuple[int, int]) -> bool:
        return capability >= (9, 0)

    def takes_pages(self, block_size: int) -> bool:
        return block_size < SMALL_PAGE

    def whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PromptRows, window: int | None = None
    ) -> torch.Tensor:
        keys = {"cu_seqlens_k": rows.query_starts, "max_seqlen_k": rows.longest_query}
        return self._attend(q, k, v, rows, window, keys)

    def paged(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PromptRows, window: int | None = None
    ) -> torch.Tensor:
        pages = {"page_table": rows.tables, "seqused_k": rows.lengths, "max_seqlen_k": rows.longest}
        return self._attend(q, keys, values, rows, window, pages)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: PromptRows,
        window: int | None,
        keys: dict[str, Any],
    ) -> torch.Tensor:
        queries = {"cu_seqlens_q": rows.query_starts, "max_seqlen_q": rows.longest_query}
        sides = (None, None) if window is None else (window - 1, 0)
        mask = {"softmax_scale": rows.scale, "causal": True, "window_size": sides}
        return _output(self._varlen(q, k, v, **queries, **keys, **mask))


def _output(result: Any) -> torch.Tensor:
    """Some return the log-sums as well."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


# The first that works is taken: 3 and 4 are equally fast, but 4 compiles at the start.
GENERATIONS: tuple[type[Flash2], ...] = (Flash3, Flash4, Flash2)


def choose_flash(name: str, device: torch.device, dtype: torch.dtype) -> FlashAttention | None:
    """The FlashAttention for `--attention NAME`, if any. "auto" takes one on Hopper and newer, where it beats cuDNN.

    Raises:
        UserError: "flash_attn" was asked for and there is none.
    """
    if device.type != "cuda" or name not in ("auto", "flash_attn"):
        return None
    capability = torch.cuda.get_device_capability(device)
    if name == "auto":
        if capability < (9, 0) or dtype == torch.float32:
            return None
        return find_flash(capability, (Flash3, Flash4), [])
    if dtype == torch.float32:
        raise UserError("--attention flash_attn computes in half precision: use --dtype bfloat16 or --attention triton")
    tried: list[str] = []
    found = find_flash(capability, GENERATIONS, tried)
    if found is None:
        raise UserError(
            f"--attention flash_attn: no FlashAttention works here ({'; '.join(tried)}); install one, for instance "
            "flash-attn-4 with pip, or use --attention triton"
        )
    return found


def find_flash(
    capability: tuple[int, int], generations: Sequence[type[Flash2]], tried: list[str]
) -> FlashAttention | None:
    """The first of `generations` that runs on such a GPU and can be imported. What was in the way goes to `tried`."""
    # 4 keeps what it compiles only if told so, and then where every user of the machine may write.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", os.path.join(cache, "gapless", "flash_attn"))
    for generation in generations:
        if not generation.runs_on(capability):
            tried.append(f"{generation.name} does not run on compute capability {capability[0]}.{capability[1]}")
            continue
        for module in generation.modules:
            try:
                return generation(importlib.import_module(module))
            except ModuleNotFoundError as error:
                tried.append(f"{generation.name}: {error}")
            except Exception as error:  # built for another torch, or another package of this name
                tried.append(f"{generation.name}: {type(error).__name__}: {error}")
                logger.warning("%s is installed but cannot be used: %s", module, error)
    return None

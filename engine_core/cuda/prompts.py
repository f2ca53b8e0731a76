"""Prompt attention by a FlashAttention package, in steps that run without a graph: as far as it works here."""

from __future__ import annotations

import itertools
import logging

import torch

from engine_core.attention.base import AttentionSpec
from engine_core.attention.flash import FlashAttention, PromptRows
from engine_core.cuda.mixed import MixedHost, MixedInputs
from engine_core.errors import UserError

TRIAL_TOKENS = 512  # as many as make a package choose the kernel that long prompts get

logger = logging.getLogger(__name__)


class FlashPrompts:
    def __init__(self, flash: FlashAttention, spec: AttentionSpec) -> None:
        self.flash, self.spec = flash, spec
        self.pages = flash.takes_pages(spec.block_size)  # if not, chunks and cached prefixes are left to our kernel

    def rows(self, host: MixedHost, device: MixedInputs, tables: torch.Tensor) -> PromptRows | None:
        """The step's prompt rows; None if there are none, or none that the package can take."""
        first, starts = host.num_decodes, host.query_starts[host.num_decodes :]
        if len(starts) < 2 or not (host.whole or self.pages):
            return None
        lengths = device.lengths[first:]
        return PromptRows(
            query_starts=device.query_starts[first:] - first,
            key_starts=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            lengths=lengths,
            tables=tables[device.row_slots[first:], : -(-host.longest_prompt // self.spec.block_size)],
            longest_query=max(stop - start for start, stop in itertools.pairwise(starts)),
            longest=host.longest_prompt,
            scale=self.spec.scale,
        )

    def attend(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        rows: PromptRows,
        host: MixedHost,
        out: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        """qkv [tokens, ...], rotated, K and V in the cache too. Returns `out` [tokens, heads * dim], its decode rows
        untouched; if there are none, what the package has made."""
        s, first = self.spec, host.num_decodes
        parts = qkv[first:].view(-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        y = self._attend(parts, cache, rows, host.whole, window).flatten(1)
        if first == 0:
            return y
        out[first:] = y
        return out

    def try_out(self, cache: torch.Tensor) -> None:
        """One call of each kind, on one layer's KV [2, blocks, block_size, kv_heads, dim]: some packages compile in it,
        and some are built without pages. Raises whatever whole prompts raise."""
        s = self.spec
        starts = torch.tensor([0, TRIAL_TOKENS], dtype=torch.int32, device=cache.device)
        tables = starts.new_zeros(1, -(-TRIAL_TOKENS // s.block_size))
        rows = PromptRows(starts, starts, starts[1:], tables, TRIAL_TOKENS, TRIAL_TOKENS, s.scale)
        qkv = cache.new_zeros(TRIAL_TOKENS, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        windows = set(s.windows) or {None}
        for window in windows:
            self._attend(qkv, cache, rows, whole=True, window=window).cpu()
        if self.pages:
            try:
                for window in windows:
                    self._attend(qkv, cache, rows, whole=False, window=window).cpu()
            except (RuntimeError, AssertionError) as error:
                logger.info("%s takes no pages of %d tokens: %s", self.flash.name, s.block_size, error)
                self.pages = False

    def _attend(
        self, qkv: torch.Tensor, cache: torch.Tensor, rows: PromptRows, whole: bool, window: int | None = None
    ) -> torch.Tensor:
        q, k, v = qkv.split((self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads), 1)
        if whole:
            return self.flash.whole(q, k, v, rows, window)
        return self.flash.paged(q, cache[0], cache[1], rows, window)


def try_flash(flash: FlashAttention, spec: AttentionSpec, cache: torch.Tensor, required: bool) -> FlashPrompts | None:
    """The package if it works here.

    Raises:
        UserError: it does not, and is `required`.
    """
    prompts = FlashPrompts(flash, spec)
    try:
        prompts.try_out(cache)
    except Exception as error:
        message = f"{flash.name} does not work here ({type(error).__name__}: {error})"
        if required:
            raise UserError(f"--attention flash_attn: {message}; use --attention triton") from error
        logger.warning("%s: prompts go to cuDNN and our kernel", message)
        return None
    return prompts

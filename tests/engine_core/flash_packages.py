"""Stand-ins for the FlashAttention packages: the signatures of the real functions, computed by plain torch."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import torch

Window = tuple[int | None, int | None]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool, window: Window
) -> torch.Tensor:
    """q [n, heads, dim] are the last n positions of k, v [length, kv_heads, dim]. float32 inside."""
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * (q.shape[2] ** -0.5 if scale is None else scale)
    at_q = torch.arange(len(k) - len(q), len(k))[:, None]
    at_k = torch.arange(len(k))[None, :]
    left, right = (None if side is None or side < 0 else side for side in window)
    if causal:
        right = 0
    keep = torch.ones(len(q), len(k), dtype=torch.bool)
    if left is not None:
        keep &= at_k >= at_q - left
    if right is not None:
        keep &= at_k <= at_q + right
    weights = scores.masked_fill(~keep, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def _by_row(
    q: torch.Tensor,
    starts: torch.Tensor,
    longest_q: int | None,
    contexts: list[tuple[torch.Tensor, torch.Tensor]],
    **more: Any,
) -> torch.Tensor:
    check_int32(starts)
    bounds = starts.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(q))
    assert longest_q == max(stop - start for start, stop in itertools.pairwise(bounds))
    out = torch.full_like(q, float("nan"))
    for start, stop, (k, v) in zip(bounds, bounds[1:], contexts, strict=False):
        out[start:stop] = attend(q[start:stop], k, v, **more)
    return out


def check_int32(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.stride(-1) == 1


def _joined(k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int | None) -> list[Any]:
    check_int32(starts)
    bounds = starts.tolist()
    assert bounds[-1] == len(k) == len(v)
    assert longest == max(stop - start for start, stop in itertools.pairwise(bounds))
    return [(k[start:stop], v[start:stop]) for start, stop in itertools.pairwise(bounds)]


def _pages(k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> list[Any]:
    check_int32(tables, lengths)
    assert len(tables) == len(lengths)
    contexts = []
    for table, length in zip(tables.long(), lengths.tolist(), strict=True):
        assert length <= len(table) * k.shape[1]
        contexts.append((k[table].flatten(0, 1)[:length], v[table].flatten(0, 1)[:length]))
    return contexts


def flash_attn_2() -> ModuleType:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        if block_table is None:
            contexts = _joined(k, v, cu_seqlens_k, max_seqlen_k)
        else:
            assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
            check_int32(cu_seqlens_k)
            contexts = _pages(k, v, block_table, cu_seqlens_k.diff())
            assert max_seqlen_k == int(cu_seqlens_k.diff().max())
        return _by_row(q, cu_seqlens_q, max_seqlen_q, contexts, scale=softmax_scale, causal=causal, window=window_size)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def flash_attn_3() -> ModuleType:
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1,
        -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
        return_attn_probs=False,
    ):  # fmt: skip
        contexts = _joined(k, v, cu_seqlens_k, max_seqlen_k)
        return _by_row(q, cu_seqlens_q, max_seqlen_q, contexts, scale=softmax_scale, causal=causal, window=window_size)

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        contexts = _pages(k_cache, v_cache, page_table, cache_seqlens)
        return _by_row(q, cu_seqlens_q, max_seqlen_q, contexts, scale=softmax_scale, causal=causal, window=window_size)

    module = ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flash_attn_4() -> ModuleType:
    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
        softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
        block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None,
        seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
        gather_bwd_token_chunk=None,
    ):  # fmt: skip
        if page_table is None:
            contexts = _joined(k, v, cu_seqlens_k, max_seqlen_k)
        else:
            assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
            contexts = _pages(k, v, page_table, seqused_k)
            assert max_seqlen_k == int(seqused_k.max())
        out = _by_row(q, cu_seqlens_q, max_seqlen_q, contexts, scale=softmax_scale, causal=causal, window=window_size)
        return out, None

    module = ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module

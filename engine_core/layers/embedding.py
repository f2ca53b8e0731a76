"""Token embeddings: rows of a matrix, dense or still in the file's quantized blocks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from engine_core.loader.weights import QuantizedWeight


class Embedding(Protocol):
    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        ...


class DenseEmbedding:
    """`weight` [vocabulary, hidden] may be of another type than the compute dtype, and a view of the file."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(token_ids, self.weight).to(self.dtype)


class QuantizedEmbedding:
    """Dequantizes only the rows of the step: the matrix stays as small as it is in the file."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self.weight.take_rows(token_ids.numpy())
        return torch.from_numpy(rows.dequantize()).to(self.dtype)

"""How many bytes a model's weights take as they are held: dense, or in blocks of integers with scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from engine_core.costs import count_parameters
from engine_core.models.llama import LlamaForCausalLM


def mean_weight_bytes(model: LlamaForCausalLM) -> float:
    """Bytes of one weight, averaged over the layers and the head: what a step reads."""
    parameters = count_parameters(model.config)
    number = parameters.total - (0 if model.config.tie_embeddings else parameters.embedding)
    tensors = _tensors([model.layers, model.lm_head], set())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()) / number


def _tensors(part: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that hang on our own objects; those that share memory may come more than once."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from _tensors(each, seen)
    elif type(part).__module__.startswith("engine_core.") and id(part) not in seen:
        seen.add(id(part))
        for name in (*getattr(part, "__dict__", ()), *getattr(type(part), "__slots__", ())):
            yield from _tensors(getattr(part, name), seen)

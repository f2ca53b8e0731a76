"""What a step has to move and to compute, from the model's config alone: bytes of weights and KV, floating-point
operations of products and attention. Needs no torch: `gapless explain` answers at once, the engine counts every step.

    bytes   each weight that the step uses once, each position of a row's context once (read or written)
    FLOPs   2 per weight and token, 4 per query head, element and position that a token attends to

This is the least any implementation needs. Left out is what stays below a percent of it: norms, activations, rotary
embedding, the rows of the embedding, and what passes between layers, which fused kernels keep on the chip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_core.models.config import ModelConfig

QK_NORMS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
MANY = 1 << 40


@dataclass(frozen=True, slots=True)
class Work:
    """What a step needs at least."""

    bytes: float
    flops: float

    def seconds(self, bandwidth: float, flops: float) -> float:
        """The time of a device that moves `bandwidth` bytes and computes `flops` operations per second, at once."""
        return max(self.bytes / bandwidth, self.flops / flops)

    def compute_bound(self, bandwidth: float, flops: float) -> bool:
        return self.flops / flops >= self.bytes / bandwidth

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights, of the whole model."""

    embedding: int
    head: int  # 0 if it is the embedding's matrix
    attention: int
    mlp: int  # dense ones
    routers: int
    experts: int  # all of them
    norms: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.attention + self.mlp + self.routers + self.experts + self.norms


def count_parameters(config: ModelConfig) -> Parameters:
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = c.hidden_size * (q + 2 * kv) + q * c.hidden_size
    attention += (q + 2 * kv if c.qkv_bias else 0) + (c.hidden_size if c.output_bias else 0)
    mlp = 3 * c.hidden_size * c.intermediate_size + (2 * c.intermediate_size + c.hidden_size if c.mlp_bias else 0)
    sparse = len(c.moe.layers) if c.moe else 0
    num_experts, expert_size = (c.moe.num_experts, c.moe.intermediate_size) if c.moe else (0, 0)
    return Parameters(
        embedding=c.vocab_size * c.hidden_size,
        head=0 if c.tie_embeddings else c.vocab_size * c.hidden_size,
        attention=c.num_layers * attention,
        mlp=(c.num_layers - sparse) * mlp,
        routers=sparse * c.hidden_size * num_experts,
        experts=sparse * num_experts * 3 * c.hidden_size * expert_size,
        norms=c.num_layers * (2 * c.hidden_size + (2 * c.head_dim if c.architecture in QK_NORMS else 0))
        + c.hidden_size,
    )


class ModelCosts:
    """`weight_bytes`: of a weight as the device holds it, a mean if they differ; `kv_bytes`: of one element of KV, its
    share of a scale included."""

    def __init__(self, config: ModelConfig, weight_bytes: float, kv_bytes: float) -> None:
        self.config, self.weight_bytes = config, weight_bytes
        self.parameters = p = count_parameters(config)
        self.kv_bytes_per_token = round(2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bytes)
        self._kv_bytes_per_layer = self.kv_bytes_per_token // config.num_layers
        self._head = config.vocab_size * config.hidden_size
        self._shared = p.attention + p.mlp + p.routers + p.norms  # used by every token
        moe = config.moe
        self._expert_share = moe.experts_per_token / moe.num_experts if moe else 0.0
        # of each window, None being none, the number of layers
        windows = config.windows or (None,) * config.num_layers
        self._windows = tuple((window, windows.count(window)) for window in dict.fromkeys(windows))
        self._token_products = self.active_parameters - self._head
        self._pair_flops = 4 * config.num_heads * config.head_dim

    @property
    def total_bytes(self) -> float:
        """Of all weights."""
        return self.parameters.total * self.weight_bytes

    @property
    def active_parameters(self) -> float:
        """Weights that one token is multiplied with, the head's included."""
        return self._shared - self.parameters.norms + self.parameters.experts * self._expert_share + self._head

    def weights_read(self, tokens: int, sampled: int) -> float:
        """Bytes of the weights that a step of `tokens` tokens uses. Of experts as many as are expected to be chosen if
        the router likes all the same; more like-minded tokens need fewer."""
        experts = self.parameters.experts * (1.0 - (1.0 - self._expert_share) ** tokens)
        return (self._shared + experts + (self._head if sampled else 0)) * self.weight_bytes

    def step(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]] = (), sampled: int | None = None) -> Work:
        """A step of one token of each of `decodes`, their contexts with that token counted in, and of the positions
        [start, stop) of each of `chunks`. `sampled`: rows that get logits, by default all."""
        tokens = len(decodes)
        sampled = tokens + len(chunks) if sampled is None else sampled
        kv = 0
        for window, layers in self._windows:
            kv += layers * (sum(decodes) if window is None else sum([min(context, window) for context in decodes]))
        pairs = kv
        for start, stop in chunks:
            tokens += stop - start
            for window, layers in self._windows:
                reach = MANY if window is None else window
                kv += layers * (stop - max(0, start + 1 - reach))
                pairs += layers * (_pairs(stop, reach) - _pairs(start, reach))
        products = self._token_products * tokens + self._head * sampled
        return Work(
            bytes=self.weights_read(tokens, sampled) + self._kv_bytes_per_layer * kv,
            flops=2.0 * products + self._pair_flops * pairs,
        )

    def decode(self, batch: int, context: int) -> Work:
        """A token of each of `batch` requests that have `context` tokens, that one counted in."""
        one = self.step((context,))
        row_bytes = one.bytes - self.weights_read(1, 1)  # all but the weights is needed for each row anew
        return Work(self.weights_read(batch, batch) + batch * row_bytes, batch * one.flops)

    def prefill(self, tokens: int, cached: int = 0) -> Work:
        """A prompt of `tokens` tokens after `cached` ones, in one step that samples one token."""
        return self.step((), ((cached, cached + tokens),))


def turning_point(work: Callable[[int], Work], bandwidth: float, flops: float, limit: int) -> int | None:
    """The least size in [1, limit] at which the work is bound by computing, None if it is bound by memory at all.

    `work` of a size must need the more operations per byte, the larger it is.
    """
    if not work(limit).compute_bound(bandwidth, flops):
        return None
    low, high = 0, limit  # `high` is bound by computing, `low` is not
    while high - low > 1:
        middle = (low + high) // 2
        if work(middle).compute_bound(bandwidth, flops):
            high = middle
        else:
            low = middle
    return high


def _pairs(stop: int, window: int) -> int:
    """Positions that the tokens [0, stop) attend to, each itself included and at most `window`."""
    if stop <= window:
        return stop * (stop + 1) // 2
    return window * (window + 1) // 2 + (stop - window) * window

"""Whether a step with prompt tokens is faster as a graph: estimates that only have to be right in proportion.

Launching a step's kernels one by one takes the host some twenty milliseconds, however few tokens there are. A graph
computes a padded step, with attention by our own kernel; without one a step computes what it must, with the fastest
attention there is. So a step takes a graph where its kernels would wait for the host: nearly always if the model is
small, seldom if it is large.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_core.costs import ModelCosts
from engine_core.plan import ScheduledRow

# Measured on an H200's host: a step of 0.6B's 28 layers took 18 to 21 ms to launch.
LAUNCHES = 11  # kernels of a layer
LAUNCH_SECONDS = 60e-6  # each, with all that Python does for it
PAGED_SHARE = 0.33  # of the rate of products, that our prompt attention reaches
# Operations per second and multiprocessor, of products in half precision as they are reached. By compute capability:
# Hopper's as measured, the others in proportion to their data sheets.
HALF_RATE = {(8, 0): 1.6e12, (9, 0): 4.2e12}
OTHER_RATE = 0.7e12
FLOAT32_SHARE = 1 / 12


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second."""
    card = torch.cuda.get_device_properties(device)
    rate = HALF_RATE.get((card.major, card.minor), HALF_RATE[9, 0] if card.major > 9 else OTHER_RATE)
    return float(card.multi_processor_count * rate * (FLOAT32_SHARE if dtype == torch.float32 else 1.0))


class StepTimes:
    def __init__(self, costs: ModelCosts, rate: float) -> None:
        """`rate`: see `product_rate`."""
        self._costs, self._rate = costs, rate
        self._products = 2.0 * (costs.active_parameters - costs.config.vocab_size * costs.config.hidden_size)
        self._launches = costs.config.num_layers * LAUNCHES * LAUNCH_SECONDS

    def graph_pays(self, rows: Sequence[ScheduledRow], tokens: int) -> bool:
        """Whether a graph of `tokens` tokens, these rows' and padding, is done before its kernels could be launched."""
        chunks = [(row.start, row.stop) for row in rows if row.count > 1]
        attention = self._costs.step((), chunks, 0).flops - self._products * sum(stop - start for start, stop in chunks)
        return self._products * tokens + attention / PAGED_SHARE <= self._launches * self._rate

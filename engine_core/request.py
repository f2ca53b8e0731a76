"""One request inside the engine: its tokens, its blocks, how far it has been computed. Knows nothing of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ipc.messages import PromptLogprobs
from ipc.sampling import SamplingParams


class Status(Enum):
    WAITING = "waiting"  # not holding KV (new, or preempted)
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Token positions of one request:

        0 ........ num_computed_tokens ........ num_tokens ......... max_tokens end
        | KV is in the pool, or will be when    | to be computed     |
        | the steps in flight are done          |                    |

    `output_ids` holds committed tokens. A step that has been launched but not committed adds one *pending* token whose
    id only the device knows; it counts in `num_tokens`, so the next step can be planned before its id arrives.
    """

    request_id: int
    ids: InitVar[Sequence[int] | NDArray[np.int32]]  # of the prompt
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    frontend: int = 0
    priority: int = 0
    arrival: int = 0  # CLOCK_MONOTONIC ns
    cache_salt: str = ""
    text: bytes = b""  # opaque, handed to the detokenizer with the first token

    prompt_ids: NDArray[np.int32] = field(init=False)  # an array: copied into a step's inputs at once
    takes_largest: bool = field(init=False)  # its tokens are the likeliest, and nothing else is asked of the logits
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_pending: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at the first admission
    block_ids: list[int] = field(default_factory=list)  # the block table
    slot: int = -1  # row of per-request device state while running, in [0, max_num_seqs)
    first_scheduled: int = 0  # CLOCK_MONOTONIC ns, 0: never
    seed: int = 0  # the request's own, or one the engine drew
    prompt_logprobs: PromptLogprobs | None = None

    # Set at admission and constant from then on.
    stop_ids: frozenset[int] = frozenset()  # tokens that end the request once `min_tokens` are out
    max_output_tokens: int = 0  # `max_tokens`, or what the context leaves
    order: int = 0  # the scheduler serves lower ones first

    # The scheduler's own.
    horizon: int = 0  # positions below it can be planned with the blocks held and the tokens allowed
    last_plan: int = 0  # step of the newest plan with a row of this request, 0: none
    last_chunk: int = 0  # step of its newest row that is no decode row
    block_hashes: list[bytes] = field(default_factory=list)  # chained hashes of the full blocks, as far as computed
    register_at: int = 0  # when this many tokens are computed, there is another full block for the prefix cache
    num_bypassed: int = 0  # how many later requests were admitted while this one did not fit

    def __post_init__(self, ids: Sequence[int] | NDArray[np.int32]) -> None:
        self.prompt_ids = np.asarray(ids, np.int32)
        sampling = self.sampling
        self.takes_largest = sampling.greedy and sampling.logprobs is None and not sampling.edits_logits

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids) + self.num_pending

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + self.num_pending

    def known_ids(self, start: int, stop: int) -> list[int]:
        """Committed token ids of positions [start, stop), prompt and output together."""
        prompt = len(self.prompt_ids)
        ids: list[int] = self.prompt_ids[start:stop].tolist() if start < prompt else []
        if stop > prompt:
            ids += self.output_ids[max(0, start - prompt) : stop - prompt]
        return ids

    def known_array(self, start: int, stop: int) -> NDArray[np.int32]:
        """The same as an array, which may be a view."""
        if stop <= len(self.prompt_ids):
            return self.prompt_ids[start:stop]
        return np.array(self.known_ids(start, stop), np.int32)

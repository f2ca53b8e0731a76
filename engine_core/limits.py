"""What bounds a step and a request, and the refusal of what can never run.

The one home of these checks in the engine: it holds for server and library, whatever was checked on the way here.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.plan import ModelFacts
from engine_core.request import Request
from ipc.config import EngineConfig
from ipc.messages import Error
from ipc.sampling import BoundError

# A GPU computes small models' prompts the faster the more of them there are; on a CPU decode rows would wait too long.
MAX_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}


def max_batched_tokens(config: EngineConfig, device: str) -> int:
    """Most tokens in one step on a device of this type."""
    return config.max_num_batched_tokens or MAX_BATCHED_TOKENS[device]


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # prompt and output together
    vocab_size: int
    block_size: int
    num_blocks: int  # block 0 included
    priority: bool = False  # serve by Request.priority, then by arrival
    prefix_caching: bool = True

    @classmethod
    def of(cls, config: EngineConfig, facts: ModelFacts) -> Limits:
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_batched_tokens(config, facts.device),
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            priority=config.policy == "priority",
            prefix_caching=config.enable_prefix_caching,
        )

    @property
    def kv_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_request_tokens(self) -> int:
        """No request grows beyond this: alone in the pool it always fits."""
        return min(self.max_model_len, self.kv_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_output_tokens(self, request: Request) -> int:
        """`max_tokens`, cut to what the context leaves; without it, all of that."""
        room = self.max_request_tokens - request.num_prompt_tokens
        wanted = request.sampling.max_tokens
        return room if wanted is None else min(wanted, room)

    def refusal_of_length(self, num_prompt_tokens: int, max_tokens: int | None) -> Error | None:
        """Why a prompt this long can never run, in words for the client; None if it can."""
        if num_prompt_tokens == 0:
            return _bad_request("the prompt is empty: it must hold at least one token", "prompt")
        bound = self.max_request_tokens
        if num_prompt_tokens + (max_tokens != 0) <= bound:
            return None
        what = f"this model's maximum context length is {bound} tokens"
        if bound < self.max_model_len:
            what = f"the KV cache holds {bound} tokens"
        room = " and no room is left for an output token" if num_prompt_tokens == bound else ""
        message = f"{what}, but the prompt has {num_prompt_tokens} tokens{room}"
        return _bad_request(message, "prompt", "context_length_exceeded")

    def refusal(self, request: Request) -> Error | None:
        """Why `request` can never run, in words for the client; None if it can."""
        too_long = self.refusal_of_length(request.num_prompt_tokens, request.sampling.max_tokens)
        if too_long is not None:
            return too_long
        low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            return _bad_request(
                f"prompt token ids must be between 0 and {self.vocab_size - 1}, got {bad}", "prompt", "invalid_value"
            )
        try:
            request.sampling.check_vocabulary(self.vocab_size)
        except BoundError as error:
            return _bad_request(str(error), error.field, "invalid_value")
        return None


def _bad_request(message: str, param: str, code: str | None = None) -> Error:
    return Error(status=400, message=message, param=param, code=code)

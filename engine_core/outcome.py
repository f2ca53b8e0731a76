"""What a step means for its requests: tokens, ends, prompt log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.plan import StepPlan, StepTokens
from engine_core.request import Request
from ipc.messages import Error, FinishReason, RowLogprobs


@dataclass(frozen=True, slots=True)
class Ending:
    """Why and with what a request ended."""

    request: Request
    reason: FinishReason
    stop_token: int | None = None
    error: Error | None = None


@dataclass(slots=True)
class Committed:
    """What one step did: row i is token `token_ids[i]` of `requests[i]`."""

    requests: list[Request] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    opened: list[Request] = field(default_factory=list)  # their first token is here, or they end without one
    ended: list[Ending] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)


def ending_after(request: Request, token: int) -> Ending | None:
    """The end of a request that `token`, its newest, brings about.

    The first `min_tokens` tokens never stop it. A stop token that is also the last one allowed counts as a stop.
    """
    count = len(request.output_ids)
    if token in request.stop_ids and count > request.sampling.min_tokens:
        return Ending(request, "stop", token)
    return Ending(request, "length") if count >= request.max_output_tokens else None


def wants_prompt_logprobs(request: Request) -> bool:
    """Whether values are still missing, so that its prompt has to be computed from the first position on."""
    collected = request.prompt_logprobs
    return collected is not None and len(collected.values) < request.num_prompt_tokens


def collect_prompt_logprobs(plan: StepPlan, tokens: StepTokens) -> None:
    """Append the step's values to their requests; what a request already had before a preemption is left alone."""
    for row in plan.rows:
        collected, values = row.request.prompt_logprobs, tokens.prompt_logprobs.get(row.request.request_id)
        if collected is not None and values:
            # The value at position p is that of the token at p + 1, and `collected.values[i]` that of token i.
            collected.values.extend(values[len(collected.values) - row.start - 1 :])


def row_logprobs(plan: StepPlan, tokens: StepTokens, requests: list[Request]) -> list[RowLogprobs]:
    """The sampled tokens' values, by their rows among `requests` (those whose token was kept)."""
    rows = {request.request_id: row for row, request in enumerate(requests)}
    sampling = [row.request.request_id for row in plan.rows if row.samples]
    placed = ((rows.get(sampling[index]), value) for index, value in sorted(tokens.logprobs.items()))
    return [RowLogprobs(row=row, value=value) for row, value in placed if row is not None]

"""Every message between processes, grouped by the process that receives it.

    frontend --Submit--> tokenizer_proc --Generate--> engine_core --StepOutput--> detokenizer_proc --Deltas--> frontend
        \\------ Abort ---------^------------------------>/    ^------- Abort (stop string found) -------/

Each process has one inbox and one union type that closes it. Token ids travel as little-endian int32 bytes and request
ids as int64 bytes: an 8k-token prompt then costs about 1 us to decode instead of 191 us as a list. A whole engine step
is one struct of arrays; what only a few rows have (log-probabilities, ends) rides in short side lists.

Request ids are made by a frontend (its index in the top 16 bits), never by a client.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ipc.sampling import SamplingParams

RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
FrontendIndex = Annotated[int, Meta(ge=0, lt=2**15)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
StepNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # steps of half a millisecond pass 2**31 within two weeks
TokenBytes = Annotated[bytes, Meta(max_length=4 * 2**24)]  # int32, little endian
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # CLOCK_MONOTONIC, shared by all processes of a host
ShortText = Annotated[str, Meta(max_length=65_536)]

FinishReason = Literal["stop", "length", "abort", "rejected", "error"]


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of all messages: immutable, tagged with its class name."""


# --- parts ----------------------------------------------------------------------------------------------------------


class Error(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request was refused or failed, in the terms of the HTTP error object."""

    status: Annotated[int, Meta(ge=400, le=599)]
    message: ShortText
    type: ShortText = "invalid_request_error"
    param: ShortText | None = None
    code: ShortText | None = None


ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # of messages, as clients may name them


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat", omit_defaults=True):
    """Messages still to be rendered with the model's chat template."""

    messages: list[dict[str, Any]]  # validated by the frontend; plain JSON values
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}


class TextPrompt(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, frozen=True, tag="ids"):
    ids: TokenBytes


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class TextSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the detokenizer needs to know of a request. The engine carries it as opaque bytes and never looks inside,
    so that the detokenizer learns of a request in the same message as its first token."""

    # The last few prompt ids: the context to decode in.
    prompt_ids: TokenBytes = b""
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    echo: str | None = None  # prompt text to send back before the first token


# --- to the tokenizer -----------------------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """One prompt, `len(request_ids)` independent answers to it (OpenAI's n).

    The prompt is an encoded `Prompt`, also in `Encode`: decoding a large one takes as long as the rest of the work, so
    whoever does that decodes it. See `ipc.codec`.
    """

    request_ids: Annotated[list[RequestId], Meta(min_length=1, max_length=128)]
    frontend: FrontendIndex
    prompt: msgspec.Raw
    sampling: SamplingParams
    arrival: Nanoseconds
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0  # lower runs first
    echo: bool = False
    cache_salt: ShortText = ""


class Encode(Message, frozen=True):
    """Tokenize and answer with `Encoded` (POST /tokenize)."""

    call_id: RequestId
    frontend: FrontendIndex
    prompt: msgspec.Raw


class Decode(Message, frozen=True):
    """Ids to text, answered with `Decoded` (POST /detokenize)."""

    call_id: RequestId
    frontend: FrontendIndex
    ids: TokenBytes
    skip_special_tokens: bool = False


# --- to the tokenizer and to the engine -----------------------------------------------------------------------------


class Abort(Message, frozen=True):
    """Stop these requests. To the engine, where it may arrive before the request itself, or after its end; both are
    normal. And to a tokenizer that may still have them, or a call, in its queue: there it comes after them."""

    request_ids: Annotated[list[RequestId], Meta(max_length=65_536)]
    # True when the detokenizer found a stop string: it has already sent the request's last event.
    stop_string: bool = False


# --- to the engine --------------------------------------------------------------------------------------------------


class Generate(Message, frozen=True):
    request_id: RequestId
    frontend: FrontendIndex
    prompt_ids: TokenBytes
    sampling: SamplingParams
    arrival: Nanoseconds
    eos_token_ids: tuple[int, ...] = ()  # the tokenizer's; the engine adds those of the model's own configs
    priority: int = 0
    cache_salt: ShortText = ""
    text: bytes = b""  # an encoded TextSpec, opaque to the engine


class Profile(Message, frozen=True):
    """Start or stop the capture of a profiler (cudaProfilerStart, cudaProfilerStop); answered with `Profiled`."""

    call_id: RequestId
    frontend: FrontendIndex
    on: bool


class ListRequests(Message, frozen=True):
    """Answered with `RequestList`."""

    question: Count  # repeated in the answer
    frontend: FrontendIndex


# --- to the detokenizer ---------------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True):
    """A request's first token is in this step."""

    request_id: RequestId
    frontend: FrontendIndex
    num_prompt_tokens: Count
    num_cached_tokens: Count
    queued: Nanoseconds  # duration from arrival to the first time it was scheduled
    text: bytes


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log, of the raw model distribution) at one position."""

    logprob: float
    rank: Count  # 1: the most probable token
    top_ids: TokenBytes = b""  # int32, most probable first
    top_logprobs: bytes = b""  # float32, same order


class RowLogprobs(msgspec.Struct, frozen=True):
    row: Count  # index into StepOutput.token_ids
    value: TokenLogprobs


class PromptLogprobs(msgspec.Struct, frozen=True):
    """One entry per prompt token; the first is None because nothing predicts it."""

    request_id: RequestId
    ids: TokenBytes
    values: list[TokenLogprobs | None]


class Finished(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's end, as the engine sees it. Sent exactly once per request that reached the engine."""

    request_id: RequestId
    frontend: FrontendIndex
    reason: FinishReason
    num_prompt_tokens: Count
    num_output_tokens: Count
    num_cached_tokens: Count = 0
    stop_token: int | None = None  # the EOS or stop token that ended it; it is the last token of the row data
    stop_token_is_eos: bool = False
    error: Error | None = None


class StepOutput(Message, frozen=True):
    """All that one engine step produced. Row i: request `request_ids[i]` got token `token_ids[i]`."""

    step: StepNumber
    request_ids: bytes = b""  # int64 per row
    token_ids: TokenBytes = b""  # int32 per row
    opened: list[Opened] = []
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []
    finished: list[Finished] = []


# --- to a frontend --------------------------------------------------------------------------------------------------


class TextLogprob(msgspec.Struct, frozen=True):
    """One token of a logprobs answer, with its text. `data` is the token's exact bytes (may be part of a character)."""

    token_id: int
    text: str
    data: bytes
    logprob: float | None  # None: the first token of a prompt, which nothing predicts
    top: list[tuple[int, str, bytes, float]] = []  # (id, text, data, logprob), most probable first
    rank: Count = 0  # 1: the most probable token


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one terminal event of a request."""

    reason: FinishReason
    usage: Usage
    stop_reason: int | str | None = None  # the stop string, or the stop token id that is not an EOS
    error: Error | None = None


class Detail(msgspec.Struct, frozen=True, omit_defaults=True):
    """What only some rows of a `Deltas` have."""

    row: Count
    opened: Opened | None = None  # without its `text`
    logprobs: list[TextLogprob] = []
    # One entry per prompt token. The first carries its text with no logprob, so that echo can show every token.
    prompt_logprobs: list[TextLogprob | None] = []
    ended: Ended | None = None


class Deltas(Message, frozen=True):
    """New text of one step for the requests of one frontend. Row i belongs to request `request_ids[i]`.

    A row's text may be empty: the token completed no character, or may belong to a stop string.
    """

    request_ids: bytes  # int64 per row
    num_tokens: list[Count]  # tokens behind each row
    texts: list[str]
    details: list[Detail] = []


class Rejected(Message, frozen=True):
    """The tokenizer could not turn a Submit into a Generate: the terminal event of these requests."""

    request_ids: list[RequestId]
    error: Error


class Encoded(Message, frozen=True):
    call_id: RequestId
    ids: TokenBytes = b""
    tokens: list[str] = []
    error: Error | None = None


class Decoded(Message, frozen=True):
    call_id: RequestId
    text: str = ""
    error: Error | None = None


class Profiled(Message, frozen=True):
    call_id: RequestId
    error: Error | None = None


class DeviceUsage(msgspec.Struct, frozen=True):
    """Totals since the engine's start. Buckets are those of `ipc.buckets`, each with its own steps alone."""

    busy_seconds: float
    idle_seconds: dict[str, float]  # by what the host was at meanwhile, see `engine_core.usage`
    bytes: float  # the least that the steps had to move
    flops: float  # and to compute
    step_seconds: float
    step_tokens: int
    steps_by_seconds: list[int]
    steps_by_tokens: list[int]


class EngineStats(Message, frozen=True):
    """Sent by the engine a few times a second while busy and once a second while idle: the heartbeat."""

    step: StepNumber
    running: Count
    waiting: Count
    kv_blocks_total: Count
    kv_blocks_free: Count  # neither cached nor in use
    kv_blocks_cached: Count  # free but still holding a reusable prefix
    prompt_tokens: int  # the rest are totals since start
    output_tokens: int
    prefix_queries: int  # tokens looked up in the prefix cache
    prefix_hits: int  # tokens found there
    preemptions: int
    aborts: int
    step_seconds: float  # of the last step; 0.0 when idle
    usage: DeviceUsage | None = None


class RequestState(msgspec.Struct, frozen=True):
    """A request in the engine. Nothing of what it says."""

    request_id: RequestId
    state: Literal["waiting", "prefill", "decode"]
    age: Nanoseconds  # since the frontend had it
    prompt_tokens: Count
    computed_tokens: Count  # of prompt and answer, cached ones included
    output_tokens: Count


class RequestList(Message, frozen=True):
    """Answers `ListRequests`."""

    question: Count
    total: Count
    requests: list[RequestState]  # the oldest ones


class AskMetrics(Message, frozen=True):
    """From another frontend that was asked for /metrics: answer with `MetricsText`."""

    question: Count  # repeated in the answer
    frontend: FrontendIndex


class MetricsText(Message, frozen=True):
    """What that frontend counts, in Prometheus' text format."""

    question: Count
    frontend: FrontendIndex
    text: bytes


class ModelReady(Message, frozen=True):
    """The supervisor has heard Ready from every process: requests are accepted from now on."""

    max_model_len: Count
    vocab_size: Count
    facts: dict[str, Any] = {}  # all other facts of all processes, for the log, /metrics and /v1/models


class ProcessLost(Message, frozen=True):
    """The supervisor saw a process die. Every request in flight fails with `detail`."""

    name: ShortText
    detail: ShortText


# --- to the supervisor ----------------------------------------------------------------------------------------------


class Progress(Message, frozen=True):
    """One line of start-up news. `fraction` is None for steps that cannot be measured."""

    name: ShortText  # process
    phase: ShortText  # "loading weights", "measuring memory", ...
    fraction: float | None = None


class Ready(Message, frozen=True):
    """The process serves from now on. `facts` are plain JSON values the others or the user need to know."""

    name: ShortText
    pid: Count
    facts: dict[str, Any]
    seconds: dict[str, float] = {}  # start-up phase -> seconds
    sent: Nanoseconds = 0  # when, by the process's own clock


class Serving(Message, frozen=True):
    """A frontend has heard `ModelReady`: from now on it accepts requests."""

    name: ShortText


class StartFailed(Message, frozen=True):
    """The process cannot start, for a reason the user can act on. No traceback."""

    name: ShortText
    message: ShortText


# --- to everyone ----------------------------------------------------------------------------------------------------


class Shutdown(Message, frozen=True):
    """Finish what is in hand, release everything, exit 0."""


TokenizerMessage = Submit | Encode | Decode | Abort | Shutdown
EngineMessage = Generate | Abort | Profile | ListRequests | Shutdown
DetokenizerMessage = StepOutput | Shutdown
FrontendMessage = (
    Deltas
    | Rejected
    | Encoded
    | Decoded
    | Profiled
    | EngineStats
    | RequestList
    | AskMetrics
    | MetricsText
    | ModelReady
    | ProcessLost
    | Shutdown
)
SupervisorMessage = Progress | Ready | Serving | StartFailed

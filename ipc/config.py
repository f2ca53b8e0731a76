"""Start-up settings of each process: frozen, made once by the launcher, read once by the process.

A process is started as `python -m <module> <path>`, where the file holds its struct as JSON (see `ipc.runtime`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
ProcessCount = Annotated[int, Meta(ge=1, le=1024)]
Limit = Annotated[float, Meta(gt=0.0, le=1e9)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]


def option(group: str, text: str) -> Meta:
    """Mark a field as the user's to set: flags, environment variables, TOML keys and their help are made from it."""
    return Meta(description=text, extra={"group": group})


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: immutable, unknown keys are errors."""


class Endpoints(Config, frozen=True):
    """Inbox addresses (ipc:// paths in the run directory)."""

    supervisor: str
    tokenizers: tuple[str, ...]
    engine: str
    detokenizers: tuple[str, ...]  # the one of a request: its id modulo their number
    frontends: tuple[str, ...]

    @classmethod
    def make(
        cls, address: Callable[[str], str], *, frontends: int = 1, tokenizers: int = 1, detokenizers: int = 1
    ) -> Endpoints:
        """`address` turns a name into an address, such as `RunDirectory.address`. Names are short, as socket paths must
        be."""
        return cls(
            supervisor=address("supervisor"),
            tokenizers=tuple(address(f"tok.{i}") for i in range(tokenizers)),
            engine=address("engine"),
            detokenizers=tuple(address(f"detok.{i}") for i in range(detokenizers)),
            frontends=tuple(address(f"front.{i}") for i in range(frontends)),
        )


class EngineOptions(Config, frozen=True):
    """The settings of the engine that do not depend on which model it runs."""

    device: Annotated[Literal["auto", "cpu", "cuda"], option("Model", "where to run")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], option("Model", "precision")] = "auto"
    # "auto" keeps a GGUF's own precision in int8 blocks; "none" is exact in `dtype`.
    weights: Annotated[Literal["auto", "none", "int8"], option("Model", "weights on the CPU")] = "auto"
    attention: Annotated[
        Literal["auto", "torch", "cpu", "triton", "flash_attn"], option("Model", "attention kernels")
    ] = "auto"
    load_format: Annotated[Literal["auto", "dummy"], option("Model", "random weights if dummy")] = "auto"
    overlap: Annotated[bool, option("Memory & scheduling", "launch the next step while this one runs")] = True
    cuda_graphs: Annotated[bool, option("Memory & scheduling", "replay GPU steps as CUDA graphs")] = True
    max_model_len: Annotated[Positive | None, option("Model", "longest prompt + answer [the model's]")] = None
    max_num_seqs: Annotated[Positive, option("Memory & scheduling", "most requests in one step")] = 256
    max_num_batched_tokens: Annotated[
        Positive | None, option("Memory & scheduling", "most tokens in one step [8192 on a GPU, else 2048]")
    ] = None
    block_size: Annotated[
        int, Meta(ge=1, le=1024), option("Memory & scheduling", "tokens in one block of the KV cache")
    ] = 16
    kv_tokens: Annotated[
        Positive | None, option("Memory & scheduling", "KV cache size in tokens [from free memory]")
    ] = None
    kv_bytes: Annotated[
        Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?([KMGT]i?B)?$")] | None,
        option("Memory & scheduling", "KV cache size, such as 20GiB [from free memory]"),
    ] = None
    # "auto" is that of computation, or int8 on the CPU where weights are (float16 where K has a bias).
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "int8"], option("Memory & scheduling", "KV on CPUs")
    ] = "auto"
    gpu_memory_utilization: Annotated[Fraction, option("Memory & scheduling", "share of the GPU's memory to use")] = 0.9
    cpu_memory_utilization: Annotated[
        Fraction, option("Memory & scheduling", "share of free memory for KV on the CPU")
    ] = 0.25
    enable_prefix_caching: Annotated[bool, option("Memory & scheduling", "reuse the KV of shared prefixes")] = True
    policy: Annotated[Literal["fcfs", "priority"], option("Memory & scheduling", "who runs first")] = "fcfs"
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None, option("Memory & scheduling", "CPU threads [physical cores]")
    ] = None
    profile_steps: Annotated[str | None, option("Memory & scheduling", "A:B: capture steps A to B [none]")] = None
    # The device's limits, of which /metrics tells the share that steps reach.
    peak_bandwidth: Annotated[Limit | None, option("Memory & scheduling", "device's GB/s [found]")] = None
    peak_tflops: Annotated[Limit | None, option("Memory & scheduling", "device's TFLOP/s [found]")] = None
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1), option("Memory & scheduling", "seed of requests that bring none")
    ] = 0


class EngineConfig(EngineOptions, frozen=True, kw_only=True):
    """What `engine_core` needs to load a model and run steps; also the settings of the library's `LLM`."""

    model: str  # a .gguf file or a directory with config.json and safetensors


class EngineProcessConfig(Config, frozen=True):
    engine: EngineConfig
    endpoints: Endpoints


class TextOptions(Config, frozen=True):
    """The settings of the text side."""

    chat_template: Annotated[str | None, option("Model", "Jinja file [the model's template]")] = None


class TokenizerProcessConfig(TextOptions, frozen=True, kw_only=True):
    index: int = 0
    model: str
    endpoints: Endpoints
    run_dir: str  # where the first one leaves tokenizer.json for the detokenizers and the renderers


class DetokenizerProcessConfig(Config, frozen=True, kw_only=True):
    index: int = 0
    tokenizer_json: str
    endpoints: Endpoints


class ServerOptions(Config, frozen=True):
    """The settings of the HTTP server."""

    host: Annotated[str, option("Server", "address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), option("Server", "port to listen on; 0: any free one")] = 8000
    served_model_name: Annotated[str, option("Server", "name in /v1/models [the model's]")] = ""
    api_key: Annotated[str | None, option("Server", "key that clients must send [none]")] = None
    # Above it: 503 with Retry-After.
    max_queued_requests: Annotated[Positive, option("Server", "most unfinished requests; then 503")] = 4096
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1), option("Server", "largest request body; then 413")] = (
        32 * 2**20
    )
    frontend_procs: Annotated[
        ProcessCount | None, option("Server", "HTTP processes on one port [cores / 4, at most 8]")
    ] = None
    tokenizer_procs: Annotated[
        ProcessCount | None, option("Server", "processes for text to ids [cores / 5, at most 6]")
    ] = None
    detokenizer_procs: Annotated[
        ProcessCount | None, option("Server", "processes for ids to text [cores / 8, at most 4]")
    ] = None
    stream_buffer_bytes: Annotated[
        int, Meta(ge=1024, le=2**31 - 1), option("Server", "unread bytes that drop a slow client")
    ] = 1 << 20


class FrontendProcessConfig(ServerOptions, frozen=True, kw_only=True):
    index: int
    endpoints: Endpoints
    model_aliases: tuple[str, ...] = ()  # other names that clients may use for the served model
    stall_seconds: float = 30.0  # /ready turns 503 when the engine has made no progress for this long
    grace_seconds: float = 5.0  # how long answers in flight may go on after Shutdown

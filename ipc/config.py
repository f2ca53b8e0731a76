"""Start-up settings of each process: frozen, made once by the launcher, read once by the process.

A process is started as `python -m <module> <path>`, where the file holds its struct as JSON (see `ipc.runtime`).
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: immutable, unknown keys are errors."""


class Endpoints(Config, frozen=True):
    """Inbox addresses (ipc:// paths in the run directory)."""

    supervisor: str
    tokenizer: str
    engine: str
    detokenizer: str
    frontends: tuple[str, ...]


class EngineConfig(Config, frozen=True):
    """What `engine_core` needs to load a model and run steps; also the settings of the library's `LLM`."""

    model: str  # a .gguf file or a directory with config.json and safetensors
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # How weights are held on the CPU. "auto" keeps a GGUF's own precision in int8 blocks; "none" is exact in `dtype`.
    weights: Literal["auto", "none", "int8"] = "auto"
    attention: Literal["auto", "torch", "cpu", "triton", "flash_attn"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None  # tokens; None: the model's own
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16  # tokens per KV block
    kv_tokens: int | None = None  # size of the KV pool; None: from free memory
    gpu_memory_utilization: float = 0.9
    cpu_memory_utilization: float = 0.25  # of available memory, for the KV pool when kv_tokens is None
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    threads: int | None = None  # CPU threads; None: one per physical core
    seed: int = 0


class EngineProcessConfig(Config, frozen=True):
    engine: EngineConfig
    endpoints: Endpoints


class TokenizerProcessConfig(Config, frozen=True):
    model: str
    endpoints: Endpoints
    run_dir: str  # where tokenizer.json is left for the detokenizer
    chat_template: str | None = None  # path of a Jinja file that replaces the model's own


class DetokenizerProcessConfig(Config, frozen=True):
    tokenizer_json: str
    endpoints: Endpoints


class FrontendProcessConfig(Config, frozen=True):
    index: int
    endpoints: Endpoints
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    api_key: str | None = None
    max_queued_requests: int = 4096  # admitted and unfinished; above it: 503 with Retry-After
    max_body_bytes: int = 32 * 2**20
    stream_buffer_bytes: int = 1 << 20  # what one slow client may leave unread before it is dropped

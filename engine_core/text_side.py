"""The library's way to text. The tokenizer, the chat template and the detokenizer belong to other processes' packages,
which engine_core may not import: they are looked up by module string when first needed, as the launcher does, so the
library runs the same code as the server and a program that only deals in ids never loads it.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ipc.errors import UserError
from ipc.messages import Abort, ChatPrompt, Deltas, StepOutput, TextPrompt
from ipc.sampling import SamplingParams

LOAD_TEXT_MODEL = "tokenizer_proc.load:load_text_model"
ENCODE_PROMPT = "tokenizer_proc.encode:encode_prompt"
TEXT_SPEC = "tokenizer_proc.encode:text_spec"
DETOKENIZER = "detokenizer_proc.core:Detokenizer"
TEXT_DECODER = "detokenizer_proc.incremental:TextDecoder"
RESOLVE_MODEL = "frontend.cli.models:resolve_model"


class TextModel(Protocol):
    """What `LOAD_TEXT_MODEL` makes of a model's path."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def tokenizer(self) -> Any: ...


class TextOutcome(Protocol):
    @property
    def deltas(self) -> Mapping[int, Deltas]: ...

    @property
    def abort(self) -> Abort | None: ...


class Detokenizer(Protocol):
    """The detokenizer process's state machine, fed with every step of an engine."""

    def handle(self, output: StepOutput) -> TextOutcome: ...


def lookup(name: str) -> Any:
    """The object `module:attribute` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class TextSide:
    """Loads the text model of `path` when something first asks for it. Safe to use from several threads.

    Raises `UserError` at once if there is no such `chat_template`.
    """

    def __init__(self, path: str, chat_template: str | None = None) -> None:
        if chat_template is not None and not Path(chat_template).is_file():
            raise UserError(f"chat_template must be a Jinja file, got {str(chat_template)!r}")
        self._path, self._chat_template = path, chat_template
        self._lock = threading.Lock()
        self._model: TextModel | None = None
        self._decoder: Any = None

    @property
    def model(self) -> TextModel:
        with self._lock:
            if self._model is None:
                self._model = lookup(LOAD_TEXT_MODEL)(self._path, self._chat_template)
            return self._model

    def encode(self, prompt: TextPrompt | ChatPrompt) -> list[int]:
        """Raises ValueError naming the field that cannot be used."""
        ids: list[int] = lookup(ENCODE_PROMPT)(self.model, prompt)
        return ids

    def spec(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> bytes:
        """What the detokenizer needs to know of a request, encoded."""
        spec: bytes = lookup(TEXT_SPEC)(self.model, prompt_ids, sampling)
        return spec

    def detokenizer(self) -> Detokenizer:
        detokenizer: Detokenizer = lookup(DETOKENIZER)(self.model.tokenizer)
        return detokenizer

    def decode(self, ids: Sequence[int], prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> str:
        """The text of `ids`, as what follows `prompt_ids`."""
        model = self.model
        with self._lock:
            if self._decoder is None:
                self._decoder = lookup(TEXT_DECODER)(model.tokenizer)
        stream = self._decoder.stream(prompt_ids, skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.flush()])

"""The detokenizer as an actor: engine steps in, one `Deltas` per frontend and aborts for the engine out."""

from __future__ import annotations

from tokenizers import Tokenizer

from detokenizer_proc.core import Detokenizer
from ipc.actor import Envelope
from ipc.channel import frontend_key
from ipc.messages import StepOutput
from ipc.recorder.events import DECODE
from ipc.recorder.ring import Recorder


class DetokenizerActor:
    def __init__(self, tokenizer: Tokenizer, recorder: Recorder | None = None) -> None:
        self._core = Detokenizer(tokenizer)
        self._recorder = recorder or Recorder()

    def handle(self, batch: list[StepOutput]) -> list[Envelope]:
        """An output that is not well formed raises: tokens of all requests would be missing from then on."""
        envelopes: list[Envelope] = []
        for output in batch:
            began = self._recorder.begin(DECODE)
            deltas, abort = self._core.handle(output)
            self._recorder.end(DECODE, began, output.step, len(output.token_ids) // 4)
            envelopes.extend((frontend_key(index), message) for index, message in deltas.items())
            if abort is not None:
                envelopes.append(("engine", abort))
        return envelopes

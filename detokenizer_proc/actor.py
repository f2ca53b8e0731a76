"""The detokenizer as an actor: engine steps in, one `Deltas` per frontend and aborts for the engine out."""

from __future__ import annotations

from tokenizers import Tokenizer

from detokenizer_proc.core import Detokenizer
from ipc.actor import Envelope
from ipc.channel import frontend_key
from ipc.messages import StepOutput


class DetokenizerActor:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._core = Detokenizer(tokenizer)

    def handle(self, batch: list[StepOutput]) -> list[Envelope]:
        """An output that is not well formed raises: tokens of all requests would be missing from then on."""
        envelopes: list[Envelope] = []
        for output in batch:
            deltas, abort = self._core.handle(output)
            envelopes.extend((frontend_key(index), message) for index, message in deltas.items())
            if abort is not None:
                envelopes.append(("engine", abort))
        return envelopes

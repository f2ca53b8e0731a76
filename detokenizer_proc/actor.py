"""The detokenizer as an actor: engine steps in, one `Deltas` per frontend and aborts for the engine out.

Steps that have queued up become one `Deltas`: the further it is behind, the less each of them costs it and a frontend.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer

from detokenizer_proc.core import Detokenizer
from ipc.actor import Envelope
from ipc.channel import frontend_key
from ipc.messages import StepOutput
from ipc.recorder.events import DECODE
from ipc.recorder.ring import Recorder

MAX_MERGED = 64  # steps; keeps a message small


class DetokenizerActor:
    """One of `count`, each of which gets all steps; this one answers for the request ids that are `index` modulo
    `count`."""

    def __init__(
        self, tokenizer: Tokenizer, index: int = 0, count: int = 1, *, recorder: Recorder | None = None
    ) -> None:
        self._core = Detokenizer(tokenizer, index, count)
        self._recorder = recorder or Recorder()

    def handle(self, batch: list[StepOutput]) -> list[Envelope]:
        """An output that is not well formed raises: tokens of all requests would be missing from then on."""
        envelopes: list[Envelope] = []
        for outputs in mergeable(batch):
            deltas, abort = self._core.handle_all(self._recorded(outputs))
            envelopes.extend((frontend_key(index), message) for index, message in deltas.items())
            if abort is not None:
                envelopes.append(("engine", abort))
        return envelopes

    def _recorded(self, outputs: list[StepOutput]) -> Iterator[StepOutput]:
        """`outputs`, and the time until the next one is asked for as a span of each."""
        for output in outputs:
            began = self._recorder.begin(DECODE)
            yield output
            self._recorder.end(DECODE, began, output.step, len(output.token_ids) // 4)


def mergeable(batch: list[StepOutput]) -> Iterator[list[StepOutput]]:
    """Runs of steps whose text fits into one message; log-probabilities are large and go alone."""
    run: list[StepOutput] = []
    for output in batch:
        large = bool(output.logprobs or output.prompt_logprobs)
        if run and (large or len(run) == MAX_MERGED):
            yield run
            run = []
        run.append(output)
        if large:
            yield run
            run = []
    if run:
        yield run

"""`python -m detokenizer_proc CONFIG.json`"""

from __future__ import annotations

import gc

from tokenizers import Tokenizer

from detokenizer_proc.actor import DetokenizerActor
from ipc.actor import run
from ipc.channel import Receiver, connect
from ipc.config import DetokenizerProcessConfig
from ipc.messages import DetokenizerMessage
from ipc.runtime import Child, child_main


def main(config: DetokenizerProcessConfig, child: Child) -> None:
    with child.phase("loading the vocabulary"):
        tokenizer, count = Tokenizer.from_file(config.tokenizer_json), len(config.endpoints.detokenizers)
        actor = DetokenizerActor(tokenizer, config.index, count, recorder=child.recorder)
    outboxes = connect(config.endpoints, "engine", "frontends")
    gc.collect()
    gc.freeze()  # the vocabulary's tables live as long as the process
    with Receiver[DetokenizerMessage](config.endpoints.detokenizers[config.index], DetokenizerMessage) as inbox:
        child.ready({})
        run(actor, inbox, outboxes, recorder=child.recorder)


if __name__ == "__main__":
    child_main("detokenizer_proc", DetokenizerProcessConfig, main)

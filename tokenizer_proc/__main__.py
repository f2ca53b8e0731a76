"""`python -m tokenizer_proc CONFIG.json`"""

from __future__ import annotations

import gc
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from ipc.actor import run
from ipc.channel import Receiver, connect
from ipc.config import TokenizerProcessConfig
from ipc.messages import TokenizerMessage
from ipc.runtime import Child, child_main
from tokenizer_proc.actor import TokenizerActor
from tokenizer_proc.lanes import Lanes
from tokenizer_proc.load import load_text_model
from tokenizer_proc.model import TextModel
from tokenizer_proc.renderer.client import Renderer
from tokenizer_proc.renderer.handover import pack_model


def main(config: TokenizerProcessConfig, child: Child) -> None:
    with child.phase("loading the tokenizer"):
        model = load_text_model(config.model, config.chat_template).warm_up()
        other = model.for_another_thread().warm_up()
        tokenizer_json = Path(config.run_dir) / "tokenizer.json"
        if config.index == 0:
            model.tokenizer.save(str(tokenizer_json), pretty=False)
    outboxes = connect(config.endpoints, "engine", "frontends")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no pool of threads for one text at a time
    gc.collect()
    gc.freeze()  # the vocabulary lives as long as the process
    with Receiver[Any](config.endpoints.tokenizers[config.index], TokenizerMessage) as inbox:
        renderer = Renderer(pack_model(model, str(tokenizer_json)))
        lanes = Lanes(
            TokenizerActor(model, child.recorder),
            TokenizerActor(other, child.recorder),
            TokenizerActor(model, child.recorder, renderer.encode),
            renderer,
            inbox.post,
        )
        with closing(lanes):
            child.ready({"tokenizer_json": str(tokenizer_json), **facts(model)})
            run(lanes, inbox, outboxes, recorder=child.recorder)


def facts(model: TextModel) -> dict[str, Any]:
    """What the others and the user may want to know, as plain JSON values."""
    return {
        "eos_token_ids": list(model.eos_token_ids),
        "tokenizer_vocab_size": model.vocab_size,
        "chat_template": model.template is not None,
        "chat_template_engine": model.template.engine if model.template else None,
    }


if __name__ == "__main__":
    child_main("tokenizer_proc", TokenizerProcessConfig, main)

"""`python -m tokenizer_proc.renderer MODEL [CHAT_TEMPLATE]`: prompts on standard input to ids on standard output.

Started by a tokenizer when it needs it, ended by it when it does not. Its death costs the prompt that it works on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import msgspec
from setproctitle import setproctitle

from ipc.codec import pack_ids, unpack_prompt
from ipc.errors import UserError
from ipc.frames import read_frame, write_frame
from tokenizer_proc.encode import encode_prompt
from tokenizer_proc.errors import explained
from tokenizer_proc.load import load_text_model
from tokenizer_proc.model import TextModel
from tokenizer_proc.renderer.client import Reply

_NICE = 10  # as the lanes


def main(model_path: str, chat_template: str | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle("gapless: renderer")
    os.nice(_NICE)
    with os.fdopen(0, "rb", 0) as source, os.fdopen(os.dup(1), "wb", 0) as sink:
        os.dup2(2, 1)  # nothing that a library prints may get between the frames
        model = load_text_model(model_path, chat_template).warm_up()
        while (prompt := read_frame(source)) is not None:
            write_frame(sink, msgspec.msgpack.encode(answer(model, prompt)))


def answer(model: TextModel, prompt: bytes | bytearray) -> Reply:
    try:
        return Reply(ids=pack_ids(encode_prompt(model, unpack_prompt(prompt))))
    except Exception as error:
        return Reply(error=explained(error))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the tokenizer is gone
        try:
            main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
        except UserError as error:  # the model was there when the tokenizer started
            sys.exit(str(error))

"""`python -m tokenizer_proc.renderer`: prompts on standard input to ids on standard output.

    model ─▶ an empty reply, or why it cannot be loaded · prompt ─▶ reply · prompt ─▶ reply · ...

Started by a tokenizer when it needs it, ended by it when it does not. Its death costs the prompt that it works on.
"""

from __future__ import annotations

import contextlib
import os
import signal

import msgspec
from setproctitle import setproctitle

from ipc.codec import pack_ids, unpack_prompt
from ipc.frames import read_frame, write_frame
from ipc.messages import Error
from tokenizer_proc.encode import encode_prompt
from tokenizer_proc.errors import explained
from tokenizer_proc.model import TextModel
from tokenizer_proc.renderer.client import Reply
from tokenizer_proc.renderer.handover import unpack_model

_NICE = 10  # as the lanes


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle("gapless: renderer")
    os.nice(_NICE)
    with os.fdopen(0, "rb", 0) as source, os.fdopen(os.dup(1), "wb", 0) as sink:
        os.dup2(2, 1)  # nothing that a library prints may get between the frames
        if (handed := read_frame(source)) is None:
            return
        try:
            model = unpack_model(handed).warm_up()
        except Exception as error:  # bare ones of libraries among them
            write_frame(sink, msgspec.msgpack.encode(Reply(error=Error(500, str(error)))))
            return
        write_frame(sink, msgspec.msgpack.encode(Reply()))
        while (prompt := read_frame(source)) is not None:
            write_frame(sink, msgspec.msgpack.encode(answer(model, prompt)))


def answer(model: TextModel, prompt: bytes | bytearray) -> Reply:
    try:
        return Reply(ids=pack_ids(encode_prompt(model, unpack_prompt(prompt))))
    except Exception as error:
        return Reply(error=explained(error))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the tokenizer is gone
        main()

"""`python -m frontend.parser`: parses bodies that come on standard input until that ends, or nothing comes for a while.

Started by a frontend when it needs it. Its death costs the request that it works on and nothing else.
"""

from __future__ import annotations

import os
import select
import signal
import sys

import msgspec
from setproctitle import setproctitle

from frontend.errors import ApiError
from frontend.openai.parse import DETOKENIZE, TOKENIZE, Parser
from frontend.parser.wire import IDLE_S, Ask, Refusal, Reply
from ipc.frames import read_frame, write_frame

_NICE = 10  # where cores are few, the engine's steps and small requests come first


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle("gapless: parser")
    os.nice(_NICE)
    parser = Parser()
    ask_decoder = msgspec.msgpack.Decoder(Ask)
    # Unbuffered: `select` must not miss what a buffer holds.
    with os.fdopen(0, "rb", 0) as source, os.fdopen(1, "wb", 0) as sink:
        while select.select([source], [], [], IDLE_S)[0]:
            if (head := read_frame(source)) is None or (body := read_frame(source)) is None:
                return
            write_frame(sink, msgspec.msgpack.encode(parse(parser, ask_decoder.decode(head), body)))


def parse(parser: Parser, ask: Ask, body: bytes | bytearray) -> Reply:
    try:
        if ask.path == TOKENIZE:
            return Reply(tokenize=parser.tokenize(body, ask.limits))
        if ask.path == DETOKENIZE:
            return Reply(detokenize=parser.detokenize(body, ask.limits))
        return Reply(job=parser.job(ask.path, body, ask.limits))
    except ApiError as error:
        # A message may repeat a lone surrogate of the body's, which msgpack cannot carry.
        message = error.message.encode("utf-8", "backslashreplace").decode()
        return Reply(refusal=Refusal(error.status, message, error.param, error.code))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the frontend is gone
        sys.exit(0)

"""Cost of detokenization per token, for many streams at once.

    python -m bench.detokenizer [--model FILE.gguf] [--streams 256] [--steps 400]

Compares, on the same random and realistic ids, the whole detokenizer core (streams, stop strings, messages) with the
`tokenizers` library's own DecodeStream in a bare loop, which does neither stop strings nor messages.
CPU time, best of 5 rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from detokenizer_proc.core import Detokenizer
from frontend.cli.models import resolve_model
from ipc.messages import Opened, StepOutput, TextSpec
from tokenizer_proc.load import load_text_model

TEXT = "The quick brown fox jumps over the lazy dog. 你好，世界 🙂 def f(x):\n    return x + 1\n\n" * 40


def steps(ids: list[list[int]], stops: tuple[str, ...]) -> list[StepOutput]:
    streams = len(ids[0])
    request_ids = array("q", range(streams)).tobytes()
    text = msgspec.msgpack.encode(TextSpec(stop=stops))
    opened = [Opened(request, 0, 1, 0, 0, text) for request in range(streams)]
    return [
        StepOutput(
            step=n,
            request_ids=request_ids,
            token_ids=array("i", row).tobytes(),
            opened=opened if n == 0 else [],
        )
        for n, row in enumerate(ids)
    ]


def core(tokenizer: Tokenizer, outputs: list[StepOutput]) -> Callable[[], None]:
    detokenizer = Detokenizer(tokenizer)
    detokenizer.handle(outputs[0])

    def run() -> None:
        for output in outputs[1:]:
            msgspec.msgpack.encode(detokenizer.handle(output).deltas[0])

    return run


def bare(tokenizer: Tokenizer, ids: list[list[int]]) -> Callable[[], None]:
    def run() -> None:
        streams = [DecodeStream(skip_special_tokens=True) for _ in ids[0]]
        for row in ids[1:]:
            for stream, token in zip(streams, row, strict=True):
                stream.step(tokenizer, token)

    return run


def best(make: Callable[[], Callable[[], None]], tokens: int) -> float:
    """Microseconds of CPU time per token."""
    times = []
    for _ in range(5):
        run = make()
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times) / tokens * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    begin = time.perf_counter()
    tokenizer = load_text_model(options.model or resolve_model("smollm2").path).tokenizer
    print(f"load {time.perf_counter() - begin:.2f} s", end="  ")
    begin = time.perf_counter()
    Detokenizer(tokenizer)
    print(f"tables {time.perf_counter() - begin:.2f} s  {options.streams} streams  µs per token:")
    text_ids = tokenizer.encode(TEXT).ids
    real = [[text_ids[(n + 7 * s) % len(text_ids)] for s in range(options.streams)] for n in range(options.steps)]
    rng = random.Random(0)
    size = tokenizer.get_vocab_size()
    noise = [[rng.randrange(size) for _ in range(options.streams)] for _ in range(options.steps)]
    tokens = options.streams * (options.steps - 1)
    for name, ids in (("text", real), ("random ids", noise)):
        for stops in ((), ("</answer>", "\n\n\n")):
            outputs = steps(ids, stops)
            cost = best(lambda outputs=outputs: core(tokenizer, outputs), tokens)  # type: ignore[misc]
            print(f"  {name:10}  core, {len(stops)} stop strings  {cost:6.2f}")
        try:
            cost = best(lambda ids=ids: bare(tokenizer, ids), tokens)  # type: ignore[misc]
            print(f"  {name:10}  bare DecodeStream     {cost:6.2f}")
        except Exception as error:  # what makes it unfit on its own
            print(f"  {name:10}  bare DecodeStream     fails: {error}")


if __name__ == "__main__":
    main()

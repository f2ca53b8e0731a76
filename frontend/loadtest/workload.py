"""What is asked, how much is wanted, and when: made once, from a seed, before the first request."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

# Each is one token of most vocabularies when a space comes before it, so a prompt of n words has about n tokens.
_WORDS = (
    "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about out "
    "many then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)
WORDS = _WORDS.split()
# Of the conversations in ShareGPT that others measure with: about 210 tokens in and 200 out on average, long tails.
_SHAREGPT_IN, _SHAREGPT_OUT = (math.log(90), 1.3), (math.log(110), 1.1)
_SHAREGPT_BOUNDS = (4, 1024)
_SHAREGPT_FORM = '[{"conversations": [{"value": TEXT}, {"value": TEXT}]}, ...]'
_CHARS_PER_TOKEN = 4


class Request(msgspec.Struct, frozen=True):
    prompt: str
    output_len: int  # tokens wanted
    at: float  # seconds after the start, 0 for as soon as possible


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn]


def random_lengths(rng: random.Random, count: int, length: int, ratio: float) -> list[int]:
    """`count` lengths, evenly spread between length·(1 - ratio) and length·(1 + ratio)."""
    low, high = max(1, math.floor(length * (1 - ratio))), max(1, math.ceil(length * (1 + ratio)))
    return [rng.randint(low, high) for _ in range(count)]


def random_pairs(
    rng: random.Random, count: int, input_len: int, output_len: int, ratio: float
) -> list[tuple[str, int]]:
    """Prompts of random words, and how long an answer each should get."""
    inputs = random_lengths(rng, count, input_len, ratio)
    outputs = random_lengths(rng, count, output_len, ratio)
    return [(_text(rng, size), wanted) for size, wanted in zip(inputs, outputs, strict=True)]


def sharegpt_like_pairs(rng: random.Random, count: int) -> list[tuple[str, int]]:
    """Random words, with lengths distributed like those of ShareGPT."""

    def draw(mu: float, sigma: float) -> int:
        low, high = _SHAREGPT_BOUNDS
        return min(high, max(low, round(rng.lognormvariate(mu, sigma))))

    return [(_text(rng, draw(*_SHAREGPT_IN)), draw(*_SHAREGPT_OUT)) for _ in range(count)]


def sharegpt_pairs(rng: random.Random, count: int, path: Path) -> list[tuple[str, int]]:
    """First turns of conversations in ShareGPT's file; answers as long as the second turns, at four characters a token.

    Raises ValueError if the file holds none that can be used, OSError if it cannot be read.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be JSON of the form {_SHAREGPT_FORM}: {error}") from None
    turns = [[turn.value for turn in item.conversations[:2]] for item in found]
    pairs = [(two[0], max(1, len(two[1]) // _CHARS_PER_TOKEN)) for two in turns if len(two) == 2 and all(two)]
    if not pairs:
        raise ValueError(f"{path} holds no conversation of two turns")
    rng.shuffle(pairs)
    return [pairs[i % len(pairs)] for i in range(count)]


def arrivals(rng: random.Random, rate: float, burstiness: float) -> Iterator[float]:
    """Seconds after the start. Intervals follow a gamma distribution: burstiness 1 is a Poisson process, less comes in
    bursts, more is more even. An infinite rate: all at once."""
    at = 0.0
    while True:
        yield at
        if math.isfinite(rate):
            at += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))


def schedule(
    rng: random.Random, pairs: Sequence[tuple[str, int]], rate: float = math.inf, burstiness: float = 1.0
) -> list[Request]:
    times = arrivals(rng, rate, burstiness)
    return [Request(prompt, wanted, at) for (prompt, wanted), at in zip(pairs, times, strict=False)]


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))

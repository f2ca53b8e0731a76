"""How one request wants its tokens chosen: the same struct in HTTP handlers, messages, the engine and the library.

Bounds live here and nowhere else. They are checked whenever a `SamplingParams` is built or decoded, so a value that
has reached the engine is a value the engine can run.
"""

from __future__ import annotations

import math

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_TOKEN_LIST = 4096
MAX_N = 128
# Larger than any vocabulary or context, small enough for int32 arithmetic everywhere.
MAX_INT = 2**31 - 1


class BoundError(ValueError):
    """A field is outside its bounds. `field`, `value`, `bound` are for error objects; the message holds all three."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(f"{field} must be {bound}, got {value!r}")
        self.field, self.value, self.bound = field, value, bound


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling, stopping and log-probability settings of one request.

    Tokens are chosen in this order: logit_bias, allowed_token_ids and min_tokens; repetition, presence and frequency
    penalties; temperature; min_p; top_k; top_p; sample. A temperature below 1e-5 is greedy.

    Raises `BoundError` (a ValueError) that names the field, the value and the bound.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = {}  # token id -> added to its logit
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0  # before this many output tokens no EOS, stop token or stop string ends the request
    max_tokens: int | None = None  # None: up to the context length
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None  # alternatives beside the sampled token's own; 0: only its own; None: off
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("top_k", self.top_k, 0, MAX_INT)
        _integer("min_tokens", self.min_tokens, 0, MAX_INT)
        _integer("n", self.n, 1, MAX_N)
        for field, high in (("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            if getattr(self, field) is not None:
                _integer(field, getattr(self, field), 0, high)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, MAX_INT)
            if self.min_tokens > self.max_tokens:
                raise BoundError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if len(self.logit_bias) > MAX_TOKEN_LIST:
            raise BoundError("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_TOKEN_LIST} entries")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, MAX_INT)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        _token_list("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _token_list("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise BoundError("allowed_token_ids", [], "a non-empty list")
        stop: object = self.stop
        if isinstance(stop, str):  # its characters would pass for a list of strings
            raise BoundError("stop", stop, "a list of strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BoundError("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH or not _is_unicode(text):
                raise BoundError("stop", text, f"a string of 1 to {MAX_STOP_LENGTH} Unicode characters")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def penalises(self) -> bool:
        """Whether tokens seen count against themselves."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before a token is sampled."""
        allows = self.allowed_token_ids is not None
        return bool(self.logit_bias or allows or self.min_tokens > 0 or self.penalises)

    def for_choice(self, index: int) -> SamplingParams:
        """The settings of one of the `n` answers: n is 1, and each has a seed of its own if a seed is given."""
        if self.n == 1 and index == 0:
            return self
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(self, n=1, seed=seed)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `BoundError` if any token id named here is not below `vocab_size`."""
        for field, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise BoundError(field, token, f"below the vocabulary size ({vocab_size})")


def _number(field: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (good and (low < value if open_low else low <= value) and value <= high):  # type: ignore[operator]
        bound = f"above {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"
        raise BoundError(field, value, f"a number {bound}")


def _integer(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BoundError(field, value, f"an integer between {low} and {high}")


def _is_unicode(text: str) -> bool:
    """False if it holds a lone surrogate, which no message can carry and no answer can contain."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _token_list(field: str, ids: tuple[int, ...]) -> None:
    if len(ids) > MAX_TOKEN_LIST:
        raise BoundError(field, f"{len(ids)} ids", f"at most {MAX_TOKEN_LIST} ids")
    for token in ids:
        _integer(field, token, 0, MAX_INT)

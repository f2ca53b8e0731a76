"""How much a chat template may do: time, loop rounds, and the size of every text it makes.

The checks run before an operation whose result could be too large, since an allocation that fails may end the process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

MAX_TEXT_CHARS = 1 << 24  # of any text a template makes
MAX_PRODUCT = 1 << 29  # of the sizes of what a replacing or joining operation works on
MAX_NUMBER = 1 << 20  # as an argument of a filter or method: widths, counts
MAX_TICKS = 1_000_000  # jinja2 loop rounds and calls
MAX_SECONDS = 2.0
LARGE_WIDTH = re.compile(r"\*|[0-9]{5}")  # in a %-format
LARGE_FORMAT = re.compile(r"[0-9]{5}|:[^}]*\{")  # in a str.format


class TemplateError(ValueError):
    """The template cannot be compiled or rendered; the message is fit for a client."""


class LimitError(TemplateError):
    """The template takes too long or makes too much text."""


class RaisedByTemplate(TemplateError):
    """The template called raise_exception: it does not accept these messages."""


class Budget:
    def __init__(self) -> None:
        self._ticks = MAX_TICKS
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        self._ticks -= 1
        if self._ticks < 0 or time.monotonic() > self._deadline:
            raise LimitError("the chat template runs for too long")


def limited(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_TEXT_CHARS:
        raise LimitError("the chat template makes too long a text")
    return value


def writable(value: Any) -> Any:
    """Raises if `value` would be too long a text."""
    if weight(value, MAX_TEXT_CHARS) > MAX_TEXT_CHARS:
        raise LimitError("the chat template makes too long a text")
    return value


def weight(value: Any, limit: int) -> int:
    """At least the number of characters `value` has as text; stops counting above `limit`. Never takes long: each
    value visited counts, and those of containers much."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        items: Iterable[Any] = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple):
        items = value
    else:
        return 16
    total = 16
    for item in items:
        total += 16 + weight(item, limit - total)
        if total > limit:
            break
    return total


def size(value: Any) -> int:
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def concat(parts: list[Any]) -> str:
    writable(parts)
    return "".join(map(str, parts))


def check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise LimitError("the chat template uses too large a number")


def check_growth(value: Any, *args: Any) -> None:
    """Raises if a result as long as the product of both sides would be too much to even try."""
    widest = max((arg if isinstance(arg, int) else weight(arg, MAX_PRODUCT) for arg in args), default=0)
    if max(1, weight(value, MAX_PRODUCT)) * max(1, widest) > MAX_PRODUCT:
        raise LimitError("the chat template makes too long a text")


def check_percent(text: str, values: Any) -> None:
    if LARGE_WIDTH.search(text):
        raise LimitError("the chat template formats with too large a width")
    check_growth(text, values)

"""Two implementations of the Jinja that chat templates are written in, with the same interface and hard limits.

`MiniJinja` (Rust) is some ten times faster; `Jinja` is the original. A template comes with a model and may be hostile:
both are sandboxed, neither reaches files or Python objects, and neither runs for ever. MiniJinja counts instructions.
For jinja2, which has no such thing, each loop round and each call takes from a budget and a clock, and what can make a
text long (`*`, `~`, filters, calls) checks its size.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import minijinja

MAX_TEMPLATE_CHARS = 1 << 20
MAX_TEXT_CHARS = 1 << 24  # of any text a template makes
MAX_NUMBER = 1 << 20  # as an argument of a filter or method: widths, counts
FUEL = 5_000_000  # MiniJinja instructions, about half a second
MAX_TICKS = 1_000_000  # jinja2 loop rounds and calls
MAX_SECONDS = 2.0
_LARGE_WIDTH = re.compile(r"\*|[0-9]{5}")  # in a %-format


class TemplateError(ValueError):
    """The template cannot be compiled or rendered; the message is fit for a client."""


class RaisedByTemplate(TemplateError):
    """The template called raise_exception: it does not accept these messages."""


class TemplateEngine(Protocol):
    def render(self, variables: dict[str, Any]) -> str:
        """Raises `TemplateError`."""
        ...


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Templates expect plain JSON here, not the HTML-safe one of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def raise_exception(message: str) -> None:
    raise RaisedByTemplate(str(message))


class MiniJinja:
    def __init__(self, source: str) -> None:
        _check_source(source)
        self._environment = minijinja.Environment(
            templates={"chat": source},
            filters={"tojson": to_json},
            globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
            trim_blocks=True,
            lstrip_blocks=True,
            fuel=FUEL,
        )

    def render(self, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render_template("chat", **variables)
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(_first_line(error)) from error


class Jinja:
    def __init__(self, source: str) -> None:
        _check_source(source)
        self._lock = threading.Lock()  # the budget belongs to one rendering at a time
        self._environment = _LimitedEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:
            raise TemplateError(_first_line(error)) from error

    def render(self, variables: dict[str, Any]) -> str:
        with self._lock:
            self._environment.budget = _Budget()
            try:
                return _joined(self._template.generate(**variables))
            except TemplateError:
                raise
            except Exception as error:
                raise TemplateError(_first_line(error)) from error


class _Budget:
    def __init__(self) -> None:
        self._ticks = MAX_TICKS
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        self._ticks -= 1
        if self._ticks < 0 or time.monotonic() > self._deadline:
            raise TemplateError("the chat template runs for too long")


class _LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "+", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
            finalize=_limited,
        )
        self.budget = _Budget()
        del self.globals["lipsum"], self.filters["urlize"]  # slow, and of no use in a prompt
        self.filters = {name: self._limited_filter(function) for name, function in self.filters.items()}
        self.filters |= {"tojson": to_json, "gapless_loop": self._loop, "gapless_concat": _concat}
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.tick()
        _check_numbers(args, kwargs)
        return _limited(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and _size(left) * _size(right) > MAX_TEXT_CHARS:
            raise TemplateError("the chat template makes too long a text")
        if operator == "**" and not -1000 <= right <= 1000:
            raise TemplateError("the chat template makes too large a number")
        if operator == "%" and isinstance(left, str) and _LARGE_WIDTH.search(left):
            raise TemplateError("the chat template formats with too large a width")
        return _limited(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = _filtered("gapless_loop", loop.iter)
        _replace_concats(tree)
        return tree

    def _limited_filter(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # carries the attributes that say which context the filter wants
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            _check_numbers(args, kwargs)
            return _limited(function(*args, **kwargs))

        return limited

    def _loop(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.tick()
            yield item


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; for rendering it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _filtered(name: str, value: jinja2.nodes.Node) -> jinja2.nodes.Filter:
    where = {"lineno": value.lineno, "environment": value.environment}
    return jinja2.nodes.Filter(value, name, [], [], None, None, **where)


def _replace_concats(node: jinja2.nodes.Node) -> None:
    """`a ~ b` becomes `[a, b] | gapless_concat`: the original has no hook to check the size."""
    for field, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if not isinstance(child, jinja2.nodes.Node):
                continue
            _replace_concats(child)
            if isinstance(child, jinja2.nodes.Concat):
                parts = jinja2.nodes.List(child.nodes, lineno=child.lineno, environment=child.environment)
                if isinstance(value, list):
                    value[i] = _filtered("gapless_concat", parts)
                else:
                    setattr(node, field, _filtered("gapless_concat", parts))


def _concat(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MAX_TEXT_CHARS:
        raise TemplateError("the chat template makes too long a text")
    return "".join(texts)


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateError("the chat template uses too large a number")


def _limited(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_TEXT_CHARS:
        raise TemplateError("the chat template makes too long a text")
    return value


def _size(value: Any) -> int:
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def _joined(pieces: Iterable[str]) -> str:
    texts: list[str] = []
    length = 0
    for piece in pieces:
        texts.append(piece)
        length += len(piece)
        if length > MAX_TEXT_CHARS:
            raise TemplateError("the chat template makes too long a text")
    return "".join(texts)


def _check_source(source: str) -> None:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"the chat template has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:500]

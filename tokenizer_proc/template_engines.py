"""Two implementations of the Jinja that chat templates are written in, with the same interface and hard limits.

`MiniJinja` (Rust) is some seven times faster; `Jinja` is the original. A template comes with a model and may be
hostile: both are sandboxed, neither reaches files or Python's internals, and neither runs for ever. MiniJinja counts
instructions and the length of most texts, but not of repeated lists and of widths in formats: a template that uses
such things (`Jinja.needs_strict`) is for jinja2 only. There each loop round and call takes from a budget and a clock,
and whatever can make a text long checks its size before it does.
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
MAX_PRODUCT = 1 << 29  # of the sizes of what a replacing or joining operation works on
MAX_NUMBER = 1 << 20  # as an argument of a filter or method: widths, counts
FUEL = 5_000_000  # MiniJinja instructions, about half a second
MAX_TICKS = 1_000_000  # jinja2 loop rounds and calls
MAX_SECONDS = 2.0
_LARGE_WIDTH = re.compile(r"\*|[0-9]{5}")  # in a %-format
_LARGE_FORMAT = re.compile(r"[0-9]{5}|:[^}]*\{")  # in a str.format


class TemplateError(ValueError):
    """The template cannot be compiled or rendered; the message is fit for a client."""


class LimitError(TemplateError):
    """The template takes too long or makes too much text."""


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
            self.needs_strict = any(map(_grows_unmetered, self._environment.parse(source).find_all(jinja2.nodes.Expr)))
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
            raise LimitError("the chat template runs for too long")


# Methods and filters whose result can be longer than all that goes in; the last ones turn containers into text.
_GROWING = frozenset(("replace", "join", "format", "format_map", "expandtabs", "translate", "indent", "wordwrap"))
_WRITING = frozenset(("string", "tojson", "upper", "lower", "trim", "e", "escape", "forceescape", "title", "safe"))


class _LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "+", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
            finalize=_writable,
        )
        self.budget = _Budget()
        for name in ("urlize", "pprint", "xmlattr", "urlencode"):  # slow, and of no use in a prompt
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= {"tojson": to_json}
        self.filters = {name: self._limited_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {"gapless_loop": self._loop, "gapless_concat": _concat}
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.tick()
        _check_numbers(args, kwargs)
        if getattr(function, "__name__", None) in _GROWING:
            _check_growth(getattr(function, "__self__", None), *args, *kwargs.values())
        return _limited(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            if _LARGE_FORMAT.search(value.__self__):
                raise LimitError("the chat template formats with too large a width")
            _check_growth(value.__self__, *args, *kwargs.values())
            return wrapped(*args, **kwargs)

        return limited

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and _size(left) * _size(right) > MAX_TEXT_CHARS:
            raise LimitError("the chat template makes too long a text")
        if operator == "**" and not -1000 <= right <= 1000:
            raise LimitError("the chat template makes too large a number")
        if operator == "%" and isinstance(left, str):
            _check_percent(left, right)
        return _limited(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = _filtered("gapless_loop", loop.iter)
        _replace_concats(tree)
        return tree

    def _limited_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        position = 1 if getattr(function, "jinja_pass_arg", None) else 0  # of the value, after a context

        @functools.wraps(function)  # carries the attributes that say which context the filter wants
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            _check_numbers(args, kwargs)
            if name in _GROWING or name in _WRITING:
                value = args[position]
                if isinstance(value, Iterator):
                    value = list(value)
                    args = (*args[:position], value, *args[position + 1 :])
                _writable(value)
                if name in _GROWING:
                    _check_growth(value, *args[position + 1 :], *kwargs.values())
                if name == "format":
                    _check_percent(str(value), args[position + 1 :])
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


def _grows_unmetered(node: jinja2.nodes.Node) -> bool:
    match node:
        case jinja2.nodes.Mul() | jinja2.nodes.Pow():  # MiniJinja's % does not format
            return True
        case jinja2.nodes.Getattr(attr=name) | jinja2.nodes.Filter(name=name):
            return name in ("format", "format_map") or (name == "join" and isinstance(node, jinja2.nodes.Getattr))
    return False


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
    _writable(parts)
    return "".join(map(str, parts))


def _weight(value: Any, limit: int) -> int:
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
        total += 16 + _weight(item, limit - total)
        if total > limit:
            break
    return total


def _writable(value: Any) -> Any:
    """Raises if `value` would be too long a text."""
    if _weight(value, MAX_TEXT_CHARS) > MAX_TEXT_CHARS:
        raise LimitError("the chat template makes too long a text")
    return value


def _check_growth(value: Any, *args: Any) -> None:
    """Raises if a result as long as the product of both sides would be too much to even try."""
    widest = max((arg if isinstance(arg, int) else _weight(arg, MAX_PRODUCT) for arg in args), default=0)
    if max(1, _weight(value, MAX_PRODUCT)) * max(1, widest) > MAX_PRODUCT:
        raise LimitError("the chat template makes too long a text")


def _check_percent(text: str, values: Any) -> None:
    if _LARGE_WIDTH.search(text):
        raise LimitError("the chat template formats with too large a width")
    _check_growth(text, values)


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise LimitError("the chat template uses too large a number")


def _limited(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_TEXT_CHARS:
        raise LimitError("the chat template makes too long a text")
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
            raise LimitError("the chat template makes too long a text")
    return "".join(texts)


def _check_source(source: str) -> None:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"the chat template has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:500]

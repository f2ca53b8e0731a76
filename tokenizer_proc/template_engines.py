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
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import minijinja

from tokenizer_proc.template_limits import (
    LARGE_FORMAT,
    MAX_TEXT_CHARS,
    Budget,
    LimitError,
    RaisedByTemplate,
    TemplateError,
    check_growth,
    check_numbers,
    check_percent,
    concat,
    limited,
    size,
    writable,
)

MAX_TEMPLATE_CHARS = 1 << 20
FUEL = 5_000_000  # MiniJinja instructions, about half a second


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
            self._environment.budget = Budget()
            try:
                return _joined(self._template.generate(**variables))
            except TemplateError:
                raise
            except Exception as error:
                raise TemplateError(_first_line(error)) from error


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
            finalize=writable,
        )
        self.budget = Budget()
        for name in ("urlize", "pprint", "xmlattr", "urlencode"):  # slow, and of no use in a prompt
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= {"tojson": to_json}
        self.filters = {name: self._limited_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {"gapless_loop": self._loop, "gapless_concat": concat}
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.tick()
        check_numbers(args, kwargs)
        if getattr(function, "__name__", None) in _GROWING:
            check_growth(getattr(function, "__self__", None), *args, *kwargs.values())
        return limited(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            if LARGE_FORMAT.search(value.__self__):
                raise LimitError("the chat template formats with too large a width")
            check_growth(value.__self__, *args, *kwargs.values())
            return wrapped(*args, **kwargs)

        return guarded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and size(left) * size(right) > MAX_TEXT_CHARS:
            raise LimitError("the chat template makes too long a text")
        if operator == "**" and not -1000 <= right <= 1000:
            raise LimitError("the chat template makes too large a number")
        if operator == "%" and isinstance(left, str):
            check_percent(left, right)
        return limited(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = _filtered("gapless_loop", loop.iter)
        _replace_concats(tree)
        return tree

    def _limited_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        position = 1 if getattr(function, "jinja_pass_arg", None) else 0  # of the value, after a context

        @functools.wraps(function)  # carries the attributes that say which context the filter wants
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            check_numbers(args, kwargs)
            if name in _GROWING or name in _WRITING:
                value = args[position]
                if isinstance(value, Iterator):
                    value = list(value)
                    args = (*args[:position], value, *args[position + 1 :])
                writable(value)
                if name in _GROWING:
                    check_growth(value, *args[position + 1 :], *kwargs.values())
                if name == "format":
                    check_percent(str(value), args[position + 1 :])
            return limited(function(*args, **kwargs))

        return guarded

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

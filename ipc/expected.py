"""What a setting may be, in words: the same for flags and for the library's options."""

from __future__ import annotations

from msgspec import inspect


def describe(kind: inspect.Type) -> tuple[str, str]:
    """(what is expected, in words; metavar) of a type."""
    match kind:
        case inspect.Metadata():
            return describe(kind.type)
        case inspect.UnionType():
            return describe(next(member for member in kind.types if not isinstance(member, inspect.NoneType)))
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, kind.values)), "NAME"
        case inspect.BoolType():
            return "true or false", ""
        case inspect.IntType():
            return f"an integer between {kind.ge} and {kind.le}", "N"
        case inspect.FloatType():
            low = f"above {kind.gt:g} and at most" if kind.gt is not None else f"between {kind.ge:g} and"
            return f"a number {low} {kind.le:g}", "X"
        case inspect.StrType(pattern=None):
            return "text", "TEXT"
        case inspect.StrType():  # the one pattern there is
            return "a size such as 20GiB", "SIZE"
    raise TypeError(f"a setting cannot be of type {kind}")

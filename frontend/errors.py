"""Errors as clients see them: `{"error": {"message", "type", "param", "code"}}` with a real HTTP status."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from ipc.messages import Error
from ipc.sampling import BoundError

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `[^`]*`$")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "array": "an array",
    "object": "an object",
}  # fmt: skip
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(Exception):
    """Raised anywhere below a route; becomes the response. `retry_after` is in seconds. `close`: the rest of
    the body may still be coming, so the connection is of no use any more."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.allow, self.close = retry_after, allow, close

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json")]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.close:
            headers.append((b"connection", b"close"))
        return headers

    def body(self) -> bytes:
        return error_body(self.message, self.type, self.param, self.code)


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def from_error(error: Error) -> ApiError:
    """An error that another process reported."""
    return ApiError(
        error.status, error.message, error.param, error.code, retry_after=1 if error.status == 503 else None
    )


def from_bound(error: BoundError, names: dict[str, str] | None = None) -> ApiError:
    """A field outside its bounds. `names` maps our field names to those of the API that was called."""
    field = error.field.partition("[")[0]
    name = (names or {}).get(field, field)
    where = name + error.field[len(field) :]
    return ApiError(400, f"{where} must be {error.bound}, got {shown(error.value)}", param=name, code="invalid_value")


def from_decoding(error: Exception, body: bytes | bytearray) -> ApiError:
    """A body that is not JSON, or JSON of the wrong shape; says which field, what it should be and what it was."""
    if isinstance(error, RecursionError):
        return ApiError(400, "the request body is nested too deeply", code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json")
    text = str(error)
    found = _PATH.search(text)
    path = found["path"] if found else ""
    what, value = _demand(text[: found.start()] if found else text), _value_at(body, path)
    where = f"a key of {path}" if "`key` in" in text else path or "the request body"
    param = path.partition("[")[0].partition(".")[0] or None
    return ApiError(400, f"{where} {what}{value}", param=param, code="invalid_type")


def _demand(message: str) -> str:
    """msgspec's words for a wrong type in those of JSON: "must be an integer or null"."""
    if (missing := _MISSING.fullmatch(message)) is not None:
        return f"must have the field {missing[1]}"
    if (expected := _EXPECTED.match(message)) is None:
        return f"cannot be used: {message}"
    *others, last = [_WORDS.get(kind, kind) for kind in expected[1].replace("bool", "true | false").split(" | ")]
    return f"must be {', '.join(others)} or {last}" if others else f"must be {last}"


def _value_at(body: bytes | bytearray, path: str) -> str:
    try:
        value: Any = msgspec.json.decode(body)
        for index, key in _PART.findall(path):
            value = value[int(index)] if index else value[key]
        return f", got {shown(value)}"
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError):
        return ""


def shown(value: object) -> str:
    """A value as an error message may repeat it: as its JSON, short, and safe in a log line."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value, ensure_ascii=False)
        if not text.isprintable():
            text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # not of JSON
        text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text)} characters)"

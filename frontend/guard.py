"""Who may talk to this server: the API key, and the checks that keep other web pages away from a local server."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from frontend.errors import ApiError

Headers = Iterable[tuple[bytes, bytes]]

# Probes carry no keys, and the page holds nothing but the form in which to type one. Everything else needs the key.
OPEN_PATHS = frozenset({"/", "/health", "/ready"})


class Guard:
    """Raises `ApiError` 401 or 403 for requests that must not get further."""

    def __init__(self, host: str, api_key: str | None) -> None:
        self._local_only = is_loopback(host)
        self._key = api_key.encode() if api_key else None

    def check(self, path: str, headers: Headers) -> None:
        keys: list[bytes] = []
        for name, value in headers:
            if name == b"host" and self._local_only and not is_loopback(_hostname(value)):
                # A page of another site that points its own name at 127.0.0.1 (DNS rebinding) still sends that name.
                raise ApiError(
                    403,
                    f"this server answers to localhost only, not to {value.decode('latin-1')[:100]!r}; started with "
                    "--host 0.0.0.0 it answers to every name (then give it an --api-key, too)",
                )
            if name == b"origin" and self._local_only and not _local_origin(value):
                raise ApiError(403, "this server does not answer to pages of other sites")
            if name == b"authorization":
                keys.append(value[7:] if value[:7].lower() == b"bearer " else b"")
            elif name == b"x-api-key":
                keys.append(value)
        if self._key is None or path in OPEN_PATHS:
            return
        # No short cut over the keys, and each compared in constant time.
        if not sum(hmac.compare_digest(key.strip(), self._key) for key in keys):
            message = "the API key is wrong" if keys else "an API key is required: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")


def is_loopback(host: str) -> bool:
    """localhost, names under it, and every loopback address."""
    host = host.strip().rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _hostname(value: bytes) -> str:
    text = value.decode("latin-1").strip()
    if text.startswith("["):
        return text[: text.find("]") + 1]
    return text.partition(":")[0]


def _local_origin(value: bytes) -> bool:
    """Pages from the web are refused; editors and apps with schemes of their own are not pages from the web."""
    text = value.decode("latin-1").strip()
    if text == "null":
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme not in ("http", "https") or is_loopback(parts.hostname or "")
    except ValueError:
        return False

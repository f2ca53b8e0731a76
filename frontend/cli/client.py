"""The HTTP client behind `run` and `chat`: one streamed chat completion at a time, standard library only."""

from __future__ import annotations

import http.client
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from frontend.cli.errors import CliError
from frontend.cli.settings import AnswerOptions
from frontend.unreachable import explained

CONNECT_TIMEOUT_S = 10.0
GET_TIMEOUT_S = 5.0


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class ServerError(CliError):
    """The server refused a request or broke off an answer."""


class Client:
    """Talks to `url`, the root of a server (a trailing /v1 is dropped). `model`: the name to ask for, by default
    whatever is served."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        wrong = CliError(f"url must be http://HOST[:PORT] or https://HOST[:PORT], got {url!r}")
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._model = model
        self._host, self._port = parts.hostname, port
        self.cut_off = False  # the last answer ended because it may be no longer
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def stream_chat(self, messages: Sequence[ChatMessage], options: AnswerOptions) -> Iterator[str]:
        """Yield the answer piece by piece. Closing the iterator closes the connection, which aborts the request.

        Raises `ServerError` with the server's own words, or if it cannot be reached or breaks off.
        """
        self.cut_off = False
        body: dict[str, Any] = {"messages": messages, "stream": True}
        if self._model is not None:
            body["model"] = self._model
        for field in ("max_tokens", "temperature", "top_p"):
            if (value := getattr(options, field)) is not None:
                body[field] = value
        connection = self._connection(CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a long prompt may take its time before the first token
            connection.request("POST", f"{self._root}/v1/chat/completions", msgspec.json.encode(body), self._headers)
            yield from self._pieces(connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"no answer from {self.url}: {explained(error)}") from None
        except UnicodeEncodeError as error:  # a terminal or a shell passes bytes on that are no text
            raise ServerError(f"cannot send this: {error}") from None
        finally:
            connection.close()

    def get(self, path: str) -> bytes:
        """The body of GET `path`, for `gapless top`. Raises `ServerError`."""
        connection = self._connection(GET_TIMEOUT_S)
        try:
            connection.request("GET", self._root + path, headers=self._headers | {"Accept": "*/*"})
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"no answer from {self.url}: {explained(error, '`gapless top URL`')}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise ServerError(_error_text(body[: 1 << 20], f"{self.url} answers {path} with HTTP {response.status}"))
        return body

    def _pieces(self, response: http.client.HTTPResponse) -> Iterator[str]:
        if response.status != 200:
            raise ServerError(_error_text(response.read(1 << 20), f"HTTP status {response.status}"))
        finished = False
        while line := response.readline():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                finished = True
                break
            event = msgspec.json.decode(data)
            if "error" in event:
                raise ServerError(_error_text(data, "the server broke off the answer"))
            for choice in event.get("choices", []):
                self.cut_off |= choice.get("finish_reason") == "length"
                if text := choice.get("delta", {}).get("content"):
                    yield text
        if not finished:
            raise ServerError("the server closed the connection in the middle of the answer")

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)


def _error_text(body: bytes, fallback: str) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return fallback

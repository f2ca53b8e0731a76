"""A server that speaks just enough of the chat API to test clients of it: what it is told to say, or to fail with."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any


class FakeServer:
    """`answers` are lists of pieces, one list per request, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[list[str]] = [["Hel", "lo"]]
        self.finish_reason = "stop"
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.break_off = False  # close the connection before [DONE]
        self.hold_after: int | None = None  # pieces after which to wait until the client is gone
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.client_left = threading.Event()
        self.holding = threading.Event()

    def __enter__(self) -> FakeServer:
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                owner.bodies.append({"path": self.path, **body})
                owner.headers.append({key.lower(): value for key, value in self.headers.items()})
                owner.reply(self)

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def reply(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        if self.refusal is not None:
            status, body = self.refusal
            handler.send_response(status)
            handler.end_headers()
            handler.wfile.write(json.dumps(body).encode())
            return
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write(b": a comment\n\n")
        pieces = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for number, piece in enumerate(pieces):
            if number == self.hold_after:
                self._hold(handler)
                return
            self._event(handler, {"choices": [{"index": 0, "delta": {"content": piece}}]})
        if not self.break_off:
            self._event(handler, {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
            handler.wfile.write(b"data: [DONE]\n\n")

    def _hold(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.flush()
        self.holding.set()
        handler.connection.settimeout(60)
        if handler.connection.recv(1) == b"":
            self.client_left.set()

    @staticmethod
    def _event(handler: http.server.BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
        handler.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

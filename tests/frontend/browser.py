"""Headless Chromium over the DevTools protocol on a pipe: no driver, no socket, no package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-extensions", "--mute-audio",
    "--hide-scrollbars", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--renderer-process-limit=1",
)  # fmt: skip
# The browser wants its pipe on the descriptors 3 and 4.
LAUNCH = """
import os, sys
high = [os.dup(os.dup(os.dup(int(fd)))) for fd in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    def __init__(self, profile: Path) -> None:
        to_read, self._to_write = os.pipe()
        self._from_read, from_write = os.pipe()
        chromium = find_chromium()
        assert chromium is not None
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCH,
                f"{to_read}",
                f"{from_write}",
                chromium,
                *FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(to_read, from_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        call_id = next(self._ids)
        answer = self._answers[call_id] = queue.Queue()
        message = {"id": call_id, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to_write, json.dumps(message).encode() + b"\0")
        found = answer.get(timeout=60)
        assert "error" not in found, (method, found)
        result: dict[str, Any] = found["result"]
        return result

    def new_page(self) -> Page:
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        return Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"], context)

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(30)
        self._reader.join(10)
        os.close(self._to_write)
        os.close(self._from_read)

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._from_read, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                else:
                    self.events.append(message)


class Page:
    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never became true: {condition}\n{self.js('document.body.innerText')}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """A real click in the middle of the element."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{element}.scrollIntoView({{block: 'nearest'}})")
        x, y = self.js(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({element}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, *, shift: bool = False) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        common: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def viewport(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )  # fmt: skip

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def requests(self) -> list[str]:
        return [event["params"]["request"]["url"] for event in self._mine("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Exceptions, console output, and what the browser logs (blocked by the policy, failed to load)."""
        return [
            json.dumps(e) for e in self._mine("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        ]

    def _mine(self, *methods: str) -> list[dict[str, Any]]:
        return [e for e in list(self._browser.events) if e.get("sessionId") == self._session and e["method"] in methods]

"""A headless Chromium for tests of the page, driven over the DevTools protocol through a pipe. Needs no package.

`Browser.page` opens a file and gives a `Tab` that evaluates, clicks, types and collects what went wrong.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 120.0  # seconds, for any one answer on a busy machine


class Browser:
    """One browser process. Mutable, owned by the fixture that made it."""

    def __init__(self, profile: Path) -> None:
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip

        def wire() -> None:
            # Chromium reads commands from descriptor 3 and answers on 4. Both ends move up first: 3 or 4 may be one of them.
            ours, theirs = os.dup(read_end), os.dup(write_end)
            high = [os.dup(ours), os.dup(theirs)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.process = subprocess.Popen(
            command, preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_end)
        os.close(write_end)
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def close(self) -> None:
        for descriptor in (self._out, self._in):
            os.close(descriptor)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._read(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._events.append(answer)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser did not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser went away"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def take_events(self, session: str) -> list[dict[str, Any]]:
        mine = [event for event in self._events if event.get("sessionId") == session]
        self._events = [event for event in self._events if event.get("sessionId") != session]
        return mine

    @contextmanager
    def page(
        self, path: Path, *, width: int = 1200, height: int = 900, query: str = "", touch: bool = False
    ) -> Iterator[Tab]:
        """Open a file and wait until its pictures stand."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        tab.call("Page.bringToFront")
        tab.call("Page.navigate", url=path.resolve().as_uri() + query)
        tab.wait("globalThis.benchctl && benchctl.ready && document.readyState === 'complete'")
        tab.evaluate("benchctl.ready.then(() => true)")
        try:
            yield tab
        finally:
            self.call("Target.closeTarget", targetId=target)


class Tab:
    """One open page. `trouble()`: console messages, exceptions; `requests()`: every address asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser = browser
        self.session = session
        self._seen: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def evaluate(self, code: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, (code[:200], found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = PATIENCE) -> None:
        until = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < until, f"never true: {condition}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Let what was asked for be drawn."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30)))"
        self.evaluate(f"new Promise((done) => {{ {frames}; setTimeout(done, 2000); }})")

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """left, top, width, height of an element that is scrolled into view first, once what came into view is drawn."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{node}.scrollIntoView({{ block: 'center', behavior: 'instant' }})")
        self.settle()
        box = self.evaluate(
            f"(({{ left, top, width, height }}) => [left, top, width, height])({node}.getBoundingClientRect())"
        )
        return tuple(box)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str, dx: float = 0.5, dy: float = 0.5) -> None:
        """Press and release at a share of the element's width and height."""
        left, top, width, height = self.place(selector)
        x, y = left + dx * width, top + dy * height
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1, buttons=1 if kind == "mousePressed" else 0)
        self.settle()

    def drag(self, selector: str, start: float, end: float) -> None:
        left, top, width, height = self.place(selector)
        y = top + height / 2
        self.mouse("mouseMoved", left + start * width, y)
        self.mouse("mousePressed", left + start * width, y, button="left", clickCount=1, buttons=1)
        for k in range(1, 5):
            self.mouse("mouseMoved", left + (start + (end - start) * k / 4) * width, y, button="left", buttons=1)
        self.mouse("mouseReleased", left + end * width, y, button="left", clickCount=1)
        self.settle()

    def key(self, key: str, **more: Any) -> None:
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Escape": 27, "Home": 36, "End": 35}
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes.get(key, 0),
                **(text if kind == "keyDown" else {}),
                **more,
            )
        self.settle()

    def type(self, selector: str, text: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        self.settle()

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _events(self, *methods: str) -> list[dict[str, Any]]:
        self._seen += self.browser.take_events(self.session)
        return [event["params"] for event in self._seen if event["method"] in methods]

    def trouble(self) -> list[Any]:
        self.evaluate("1")
        return self._events("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")

    def requests(self) -> list[str]:
        self.evaluate("1")
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

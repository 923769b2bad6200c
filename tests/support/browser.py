"""A headless Chromium, driven over two pipes by its DevTools protocol: no driver and no library of others."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ANSWER_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # As root, in a container.
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


AXE = Path(__file__).parents[2] / ".venv" / "axe" / "axe_playwright_python" / "axe.min.js"


def chromium() -> str | None:
    """Where it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One window with one page. Its processes end with the `with` block."""

    def __init__(self) -> None:
        program = chromium()
        assert program is not None, "no chromium here: make browser"
        self._profile = tempfile.TemporaryDirectory(prefix="slotstream-browser-", ignore_cleanup_errors=True)
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_browser, from_browser),
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._loaded: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.complaints: list[str] = []  # What the page's console was told: refused styles and scripts, errors.
        threading.Thread(target=self._listen, daemon=True).start()
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command. Raises AssertionError with what the browser says where it fails."""
        number = next(self._numbers)
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers[number] = answer
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        found = answer.get(timeout=_ANSWER_S)
        assert "error" not in found, f"{method}: {found}"
        return found["result"]

    def size(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)

    def scripts(self, on: bool) -> None:
        """Whether pages may run scripts; those of `run` always do."""
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def open(self, url: str) -> None:
        """Goes there, and waits until it is loaded."""
        self.await_load(lambda: self.call("Page.navigate", url=url))

    def click(self, selector: str, *, loads: bool = True) -> None:
        """A mouse click into the middle of the first element that matches; with `loads`, waits for the page that follows."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center', inline: 'center'}); const b = e.getClientRects()[0];"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        assert box is not None, f"nothing matches {selector}"

        def press() -> None:
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

        if loads:
            self.await_load(press)
        else:
            press()

    def write(self, selector: str, text: str) -> None:
        assert self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select(); return 1 }})()"
        )
        self.call("Input.insertText", text=text)

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page; a promise's, once it has one."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """As a reader sees it."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def all(self, selector: str) -> list[str]:
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
        return found

    def axe(self) -> list[str]:
        """What axe-core finds on the page, rule by rule with the first elements of each; all its rules, best practices too."""
        assert AXE.exists(), "no axe-core here: make browser"
        self.run(AXE.read_text() + "\n;1")
        found = self.run("axe.run(document, {resultTypes: ['violations']}).then(done => done.violations)")
        return [f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes'][:3]]}" for one in found]

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def await_load(self, act: Callable[[], Any]) -> None:
        """Does it, and waits for the page that is loaded then."""
        while not self._loaded.empty():
            self._loaded.get()
        act()
        self._loaded.get(timeout=_ANSWER_S)

    def _listen(self) -> None:
        held = b""
        while piece := os.read(self._from, 1 << 16):
            *messages, held = (held + piece).split(b"\0")
            for message in map(json.loads, messages):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers.pop(message["id"]).put(message)
            return
        params = message.get("params", {})
        match message["method"]:
            case "Page.loadEventFired":
                self._loaded.put("loaded")
            case "Log.entryAdded" if params["entry"]["level"] in ("warning", "error"):
                self.complaints.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        self._profile.cleanup()

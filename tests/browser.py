"""Debian's Chromium, driven over a pipe by its own protocol: enough to open one file, click, and see what went wrong."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any


def found() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One headless Chromium with one page. problems: console errors, uncaught exceptions, broken policies. requests: URLs."""

    def __init__(self, profile: Path):
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._next, self._buffer = 0, b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def plumb() -> None:  # Chromium reads commands from 3 and answers on 4
            a, b = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(a, 3)
            os.dup2(b, 4)

        command = [found(), "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
                   "--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={profile}", "about:blank"]
        env = {**os.environ, "HOME": str(profile)}
        self.process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=plumb, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        os.close(theirs_in)
        os.close(theirs_out)
        self.session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._in)
        os.close(self._out)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that come meanwhile are kept."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            got = self._read(60)
            if got.get("id") == self._next:
                assert "error" not in got, got
                return got["result"]

    def _read(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], seconds)
            assert ready, "Chromium does not answer"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium is gone"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        got = json.loads(line)
        self._keep(got.get("method", ""), got.get("params", {}))
        return got

    def _keep(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(said["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(said["args"])[:500])
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.problems.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression on the page. The page's policy does not bind the debugger."""
        got = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"{script} did not become true; {self.problems}"
            time.sleep(0.05)

    def open(self, page: Path) -> None:
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.until("document.readyState === 'complete' && document.documentElement.classList.contains('drawn')")

    def look(self, width: int, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Width of the window in pixels, the colour scheme, and whether it is a screen or paper."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", media=media,
                 features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def click(self, selector: str) -> None:
        """A real click of the mouse in the middle of an element."""
        x, y = self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
                        f" e.scrollIntoView({{block: 'center'}});"
                        " const r = e.getBoundingClientRect();"
                        " return [r.x + Math.min(r.width / 2, 60), r.y + r.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            extra = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **extra)

    def picture(self, path: Path) -> None:
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def paper(self, path: Path) -> bytes:
        pdf = base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"])
        path.write_bytes(pdf)
        return pdf

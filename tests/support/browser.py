"""A headless browser that looks at pages: Debian's chromium, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
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


class Browser:
    """One page in a browser. complaints: errors and warnings of its console, exceptions, and what was refused to it."""

    def __init__(self, profile: Path):
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # The protocol is spoken on descriptors 3 and 4.
        words = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", words, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in), os.close(theirs_out)
        self.reads, self.writes = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb", buffering=0)
        self.rest, self.number, self.session, self.complaints, self.seen = b"", 0, None, [], set()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reads.close(), self.writes.close()

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """What the browser answers; events that come before it are taken note of."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": given}
        self.writes.write(json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = self.reads.read1(1 << 20)
            assert more, "the browser has ended"
            self.rest += more
        text, _, self.rest = self.rest.partition(b"\0")
        event = json.loads(text)
        self.seen.add(event.get("method"))
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.complaints.append(event["params"])
        return event

    def open(self, address: str, width: int, dark: bool = False) -> None:
        """Shows a page in a window of that width, and waits until it has loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self.seen.discard("Page.loadEventFired")
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self.seen:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page, as JSON; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Writes a picture of the page, or of its first `height` pixels."""
        tall = height or self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": tall, "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

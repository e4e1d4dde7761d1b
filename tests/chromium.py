"""A headless Chromium for tests: opens pages, runs expressions in them, and keeps what they said and asked for.

It is driven through pipes by the DevTools protocol (https://chromedevtools.github.io/devtools-protocol), so that it
needs no port and no library.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium; install Debian's package of that name"
)

# Chromium takes commands at file descriptor 3 and answers at 4.
_LAUNCHER = """
import fcntl, os, sys
spare = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(spare[0], 3)
os.dup2(spare[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless",
    # tests may run as root, where it does not start otherwise; the pages are the tests' own
    "--no-sandbox",
    "--disable-gpu",
    "--enable-unsafe-swiftshader",  # WebGL without a graphics card
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-pipe",
)


class NavigatedError(Exception):
    """The page was left while an expression ran in it."""


class Page:
    """One page of a browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.said: list[str] = []  # errors, those of frames too
        # addresses that were requested, but for those inside the page itself
        self.asked: list[str] = []
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session: str | None = None
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def start_anew(self) -> None:
        """Leave the page that is open, and what the tests before have set."""
        self._send("Page.navigate", {"url": "about:blank"})
        self._send("Emulation.clearDeviceMetricsOverride")
        self._send("Emulation.setEmulatedMedia", {"features": []})

    def size(self, width: int, height: int) -> None:
        self._send(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def open(self, file: Path, fragment: str = "") -> None:
        self.open_address(file.resolve().as_uri() + fragment)

    def open_address(self, address: str) -> None:
        self.said.clear()
        self.asked.clear()
        self._send("Page.navigate", {"url": "about:blank"})
        self._send("Page.navigate", {"url": address})
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of an expression; of what it promises, where that is a promise."""
        answer = self._send(
            "Runtime.evaluate",
            {"expression": expression, "returnByValue": True, "awaitPromise": True},
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        """Until an expression holds, in this page or in the one that it goes to."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(NavigatedError):
                if self.run(f"Boolean({expression})"):
                    return
            assert time.monotonic() < end, f"never: {expression}; the page said {self.said}"
            time.sleep(0.01)

    def press(self, *keys: str) -> None:
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            for kind in ("keyDown", "keyUp"):
                code = {"Enter": 13, "Escape": 27}.get(key, 0)
                self._send(
                    "Input.dispatchKeyEvent",
                    {"type": kind, "key": key, "windowsVirtualKeyCode": code, **text},
                )

    def click(self, x: float, y: float, clicks: int = 1) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": clicks}
            self._send("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **button})

    def picture(self, file: Path, scale: float = 1) -> None:
        """A screen as a PNG, a pixel of it for each pixel of the page, or fewer."""
        whole = self.run("[innerWidth, innerHeight]")
        clip = {"x": 0, "y": 0, "width": whole[0], "height": whole[1], "scale": scale}
        shot = self._send("Page.captureScreenshot", {"format": "png", "clip": clip})
        file.write_bytes(base64.b64decode(shot["data"]))

    def theme(self, name: str) -> None:
        """What the user prefers: ``light`` or ``dark``."""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self._send("Emulation.setEmulatedMedia", {"features": features})

    def pixels(self, png: bytes) -> np.ndarray:
        """An image as an array, ``[height, width, 3]``, decoded by the browser; leaves the page that is open."""
        self._send("Page.navigate", {"url": "about:blank"})
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        width, height, text = self.run(
            f"(async () => {{ const image = new Image(); image.src = {json.dumps(url)}; await image.decode();"
            "const { width, height } = image; const canvas = Object.assign(document.createElement('canvas'),"
            "{ width, height }); const pen = canvas.getContext('2d'); pen.drawImage(image, 0, 0);"
            "const { data } = pen.getImageData(0, 0, width, height); let text = '';"
            "for (let k = 0; k < data.length; k += 8192) text += String.fromCharCode(...data.subarray(k, k + 8192));"
            "return [width, height, btoa(text)]; })()"
        )
        return np.frombuffer(base64.b64decode(text), np.uint8).reshape(height, width, 4)[..., :3]

    def _send(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters or {}}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise NavigatedError
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium ended"
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "assert"):
                self.said.append(
                    " ".join(
                        str(each.get("value", each.get("description")))
                        for each in parameters["args"]
                    )
                )
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.said.append(
                    str(details.get("exception", {}).get("description", details["text"]))
                )
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.said.append(
                    f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}"
                )
            case "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if (
                    not url.startswith(("blob:", "data:", "about:"))
                    and parameters.get("type") != "Document"
                ):
                    self.asked.append(url)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A browser with one page, while it lasts."""
    assert CHROMIUM is not None
    their_input, commands = os.pipe()
    answers, their_output = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        launch = [
            sys.executable,
            "-c",
            _LAUNCHER,
            str(their_input),
            str(their_output),
            CHROMIUM,
            *_FLAGS,
        ]
        process = subprocess.Popen(
            [*launch, f"--user-data-dir={folder}"],
            pass_fds=(their_input, their_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        try:
            yield Page(commands, answers)
        finally:
            process.terminate()
            process.wait(timeout=30)
            os.close(commands)
            os.close(answers)

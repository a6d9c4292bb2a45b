"""Chromium by the WebDriver protocol, without a package for it."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def missing() -> str | None:
    """Why no browser can be driven here; None if one can."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed: `make test-browser` installs it"
    return None


class Browser:
    def __init__(self, address: str) -> None:
        self.address = address
        options = {
            "args": [
                *("--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--window-size=1000,1400", "--disable-dev-shm-usage"),
                "--host-resolver-rules=MAP * ~NOTFOUND",  # there is no network
            ]
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._ask("session", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/session/{made['sessionId']}"

    def _ask(self, what: str, body: Any = None, method: str = "POST") -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            f"{self.address}/{what}".rstrip("/"), data, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self._ask("url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """What a script returns in the page."""
        return self._ask("execute/sync", {"script": script, "args": list(args)})

    def drag(self, x: float, y: float, to_y: float) -> None:
        """The pointer goes down at a place of the window, and up at another."""
        move = {"type": "pointerMove", "duration": 20, "x": round(x)}
        steps = [
            {**move, "y": round(y)},
            {"type": "pointerDown", "button": 0},
            {**move, "y": round(to_y)},
            {"type": "pointerUp", "button": 0},
        ]
        self.actions(steps)

    def point(self, x: float, y: float) -> None:
        self.actions(
            [{"type": "pointerMove", "duration": 20, "x": round(x), "y": round(y)}]
        )

    def actions(self, steps: list[dict[str, Any]]) -> None:
        pointer = {"type": "pointer", "id": "mouse", "actions": steps}
        self._ask("actions", {"actions": [pointer]})

    def errors(self) -> list[str]:
        """What the page complained of."""
        return [entry["message"] for entry in self._ask("se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("screenshot", method="GET")))

    def end(self) -> None:
        self._ask("", method="DELETE")


@contextmanager
def browser() -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/status", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        made = Browser(address)
        try:
            yield made
        finally:
            made.end()
    finally:
        driver.terminate()
        driver.wait()

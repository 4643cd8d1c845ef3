"""A headless Chromium, driven through chromedriver by plain HTTP, for the browser tests."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
PATIENCE = 240  # seconds; a busy machine is slow, not broken


def missing() -> str:
    """Return what is not installed, or an empty text."""
    if browser() is None:
        return "no Chromium here: install chromium and chromium-driver to run the browser tests"
    return (
        ""
        if shutil.which("chromedriver")
        else "no chromedriver here: install the package chromium-driver to run the browser tests"
    )


def browser() -> str | None:
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


class Chrome:
    """One browser session with an empty profile; use as a context manager."""

    def __enter__(self) -> Chrome:
        self.profile = tempfile.TemporaryDirectory(
            prefix="lobs-chrome-", ignore_cleanup_errors=True
        )
        command = [shutil.which("chromedriver"), "--port=0"]
        self.driver = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self.base = f"http://127.0.0.1:{self._port()}"
            options = {
                "binary": browser(),
                "args": [*FLAGS, f"--user-data-dir={self.profile.name}"],
            }
            wanted = {
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            wanted["timeouts"] = {"script": 1000 * PATIENCE, "pageLoad": 1000 * PATIENCE}
            answer = self._send(
                "POST",
                "/session",
                {"capabilities": {"alwaysMatch": {"browserName": "chrome", **wanted}}},
            )
            self.base += f"/session/{answer['sessionId']}"
            self._send("POST", "/url", {"url": "about:blank"})  # leave the page that new tabs show
            self.log("performance")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "/session/" in getattr(self, "base", ""):
            self._send("DELETE", "", None)
        self.driver.terminate()
        self.driver.wait(timeout=PATIENCE)
        self.driver.stdout.close()
        self.profile.cleanup()

    def _port(self) -> int:
        for line in self.driver.stdout:
            if "started successfully on port" in line:
                return int(line.strip().rstrip(".").split()[-1])
        raise RuntimeError("chromedriver did not start")

    def _send(self, method: str, path: str, body: dict | None) -> object:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=PATIENCE
            ) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, page: Path) -> None:
        self._send("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: object) -> object:
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str) -> None:
        """Wait until a script returns something true."""
        end = time.monotonic() + PATIENCE
        while not self.run(script):
            assert time.monotonic() < end, f"still not: {script}"
            time.sleep(0.05)

    def protocol(self, command: str, **parameters: object) -> dict:
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def log(self, kind: str) -> list[dict]:
        return self._send("POST", "/se/log", {"type": kind})

    def complaints(self) -> list[str]:
        """Return the console's warnings since the last call."""
        return [
            entry["message"]
            for entry in self.log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def requests(self) -> list[str]:
        """Return every address that was requested since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
        ]

    def emulate(
        self, width: int = 1200, height: int = 900, *, scheme: str = "light", phone: bool = False
    ) -> None:
        self.protocol(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.protocol("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.protocol(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def photograph(self, path: Path) -> None:
        """Save a picture of the whole page, beyond the window."""
        shot = self.protocol("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

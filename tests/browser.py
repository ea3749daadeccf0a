"""Pages in headless Chromium, through the DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp


NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = 'There is no Chromium: `make chromium` installs it, or install the package "chromium" of your system.'


def chromium() -> str | None:
    """Path of the browser, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Browser:
    """One Chromium for several pages, for the time of a `with` block."""

    def __init__(self) -> None:
        path = chromium()
        assert path is not None, MISSING
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [path, "--headless", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        command.append(f"--user-data-dir={self._folder.name}")
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--no-sandbox")  # it refuses to run as root otherwise; the pages are our own
        self._log = Path(self._folder.name, "log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, "about:blank"], stdout=log, stderr=log)
        self._loop = asyncio.new_event_loop()
        self._number = 0

    def __enter__(self) -> Browser:
        try:
            self._run(self._connect())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._loop.run_until_complete(self._close())
        self._loop.close()
        self._folder.cleanup()

    def open(self, page: Path, width: int, height: int = 900) -> list[str]:
        """Show a page at this width, in pixels; returns the addresses that were asked for."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._requests = []
        self._run(self._navigate(page.absolute().as_uri()))
        return self._requests

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in JavaScript."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write all of the page into a PNG file."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    # The protocol

    def _call(self, method: str, **parameters: Any) -> Any:
        return self._run(self._ask(method, **parameters))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 120))

    async def _connect(self) -> None:
        while not (found := re.search(r"DevTools listening on ws://([^/]+)/", self._log.read_text())):
            assert self._process.poll() is None, self._log.read_text()
            await asyncio.sleep(0.05)
        self._session = aiohttp.ClientSession()
        while not (pages := await self._pages(found[1])):  # it listens before it has opened one
            assert self._process.poll() is None, self._log.read_text()
            await asyncio.sleep(0.05)
        (page,) = pages
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Network", "Runtime"):
            await self._ask(f"{domain}.enable")

    async def _pages(self, address: str) -> list[dict[str, Any]]:
        async with self._session.get(f"http://{address}/json/list") as answer:
            return [one for one in await answer.json() if one["type"] == "page"]

    async def _close(self) -> None:
        if hasattr(self, "_session"):
            await self._session.close()

    async def _navigate(self, address: str) -> None:
        await self._ask("Page.navigate", url=address)
        while await self._receive() != "Page.loadEventFired":
            pass

    async def _ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._receive()
            if isinstance(message, dict) and message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    async def _receive(self) -> Any:
        """The name of the next event, or the next answer."""
        message = await self._socket.receive_json()
        if message.get("method") == "Network.requestWillBeSent":
            self._requests.append(message["params"]["request"]["url"])
        return message.get("method", message)

"""An HTTP server that sends exactly the bytes it is given, valid or not, in the event loop of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """An answer, status line and headers included; each piece is a write of its own."""

    pieces: list[bytes]


@dataclass(frozen=True)
class Asked:
    """A request; `name` is its `X-Request-Id`, if it has one."""

    path: str
    name: str | None
    body: dict[str, Any] = field(repr=False)


class RawServer:
    """The server, for the length of an `async with` block. `live` names the requests with an open connection."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self._answer = answer
        self.live: list[str] = []
        self.base_url = ""

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0, limit=2**20)
        host, port = self._server.sockets[0].getsockname()
        self.base_url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = None
        try:
            asked = await _read_request(reader)
            name = asked.name
            if name is not None:
                self.live.append(name)
            for piece in self._answer(asked).pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()
            if name is not None:
                self.live.remove(name)


async def _read_request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(head[0].split(" ")[1], headers.get("x-request-id"), json.loads(body or b"{}"))

"""An HTTP server that sends bytes as it is told to, sound or not, in the event loop of the test.

`tests/fake_vllm.py` is a server that speaks HTTP properly. This one need not: status lines, headers and framing are
the test's, and so is the way in which a connection ends.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class Ending(Enum):
    """What becomes of a connection once an answer has been written."""

    CLOSE = auto()
    RESET = auto()
    SILENCE = auto()  # nothing more until the client goes away
    REPEAT = auto()  # the same bytes over and over, until the client goes away
    ABORT = auto()  # nothing more until the request is aborted, then the rest


@dataclass(frozen=True)
class Answer:
    """An answer, written in pieces.

    Args:
        pieces (`list[bytes]`):
            All of it, status line and headers included; each in a write of its own.
        ending (`Ending`):
            What comes then.
        rest (`bytes`):
            What is repeated, or sent at the abort.
    """

    pieces: list[bytes]
    ending: Ending = Ending.CLOSE
    rest: bytes = b""


@dataclass(frozen=True)
class Asked:
    """A request as it arrived; `name` is its `X-Request-Id`, if it has one."""

    path: str
    name: str | None
    body: dict[str, Any] = field(repr=False)


class RawServer:
    """The server, for the length of an `async with` block.

    Args:
        answer (`Callable[[Asked], Answer]`):
            Makes the answer to a request.

    Attributes:
        live (`list[str]`):
            Names of the requests whose connection is open.
    """

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self._answer = answer
        self._aborted: dict[str, asyncio.Event] = {}
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
        asked = None
        try:
            asked = await _read_request(reader)
            if asked.name is not None:
                self.live.append(asked.name)
                self._aborted.setdefault(asked.name, asyncio.Event())
            answer = self._answer(asked)
            for piece in answer.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            await self._end(answer, asked.name, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()
            if asked is not None and asked.name is not None:
                self.live.remove(asked.name)
                if asked.name not in self.live:
                    del self._aborted[asked.name]

    async def _end(
        self, answer: Answer, name: str | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        match answer.ending:
            case Ending.RESET:
                # Without lingering, closing sends RST in place of FIN.
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            case Ending.SILENCE:
                await reader.read()
            case Ending.REPEAT:
                while not reader.at_eof():
                    writer.write(answer.rest)
                    await writer.drain()
                    await asyncio.sleep(0.002)
            case Ending.ABORT:
                assert name is not None
                left = asyncio.ensure_future(reader.read())
                aborted = asyncio.ensure_future(self._aborted[name].wait())
                await asyncio.wait({left, aborted}, return_when=asyncio.FIRST_COMPLETED)
                if aborted.done():
                    writer.write(answer.rest)
                    await writer.drain()
                for waiting in (left, aborted):
                    waiting.cancel()
                await asyncio.gather(left, aborted, return_exceptions=True)

    def abort(self, names: list[str]) -> None:
        """Do what vLLM does at `/abort_requests`."""
        for name in names:
            aborted = self._aborted.get(name.removeprefix("cmpl-").removesuffix("-0"))
            if aborted is not None:
                aborted.set()


async def _read_request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(head[0].split(" ")[1], headers.get("x-request-id"), json.loads(body or b"{}"))

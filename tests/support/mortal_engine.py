"""Scripted engines that die and come back, as the servers of one [`ServersEngine`]."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from tests.support.scripted_engine import ScriptedEngine
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.errors import ServerError


class MortalEngine(ScriptedEngine):
    """A scripted engine that breaks its streams when it dies, or when its connections are closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.alive = True
        self.version = 0  # of its weights
        self._broken = asyncio.Event()

    def die(self) -> None:
        self.alive, self.version = False, -1
        self._broken.set()

    def come_back(self) -> None:
        self.alive, self._broken = True, asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        broken = self._broken
        stream = super().generate(request)
        try:
            while not broken.is_set():
                following = asyncio.ensure_future(anext(stream, None))
                waiting = asyncio.ensure_future(broken.wait())
                await asyncio.wait([following, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if broken.is_set():
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                    break
                chunk = following.result()
                if chunk is None:
                    return
                yield chunk
        finally:
            await stream.aclose()
        raise ServerError("The server is dead.")

    async def abort(self, request_ids: Sequence[str]) -> None:
        if not self.alive:
            raise ServerError("The server is dead.")
        await super().abort(request_ids)

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        if not self.alive:
            raise ServerError("The server is dead.")
        return await super().generated(request_ids)

    async def holds(self, version: int) -> bool:
        self.asked_for.append(version)
        return self.alive and version == self.version

    async def close(self) -> None:
        self._broken.set()
        if self.alive:
            self._broken = asyncio.Event()

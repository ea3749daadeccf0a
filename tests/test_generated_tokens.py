"""The middleware by itself: what it hands on, what it refuses, and that it counts nothing too early."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from trl_april.generated_tokens import PATH, GeneratedTokens


class Engine:
    """As much of vLLM's client as is looked at. Its handler takes a while over what comes from the queue."""

    def __init__(self, *, paused: bool = True, engines: int = 1, servers: int = 1) -> None:
        parallel = SimpleNamespace(data_parallel_size=engines, _api_process_count=servers)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.output_processor = SimpleNamespace(request_states={})
        self._paused = paused

    async def is_paused(self) -> bool:
        return self._paused

    def holds(self, name: str) -> list[int]:
        tokens: list[int] = []
        self.output_processor.request_states[f"{name}-internal"] = SimpleNamespace(
            external_req_id=name, detokenizer=SimpleNamespace(num_output_tokens=lambda: len(tokens))
        )
        return tokens

    async def handle(self) -> None:
        while True:
            tokens, new = await self.engine_core.outputs_queue.get()
            for token in new:
                await asyncio.sleep(0)
                tokens.append(token)


async def ask(engine: Engine, body: Any = None, *, path: str = PATH, method: str = "POST") -> tuple[int, Any]:
    sent: list[Any] = []
    scope = {
        "type": "http", "path": path, "method": method,
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
    }  # fmt: skip
    data = json.dumps(body).encode()
    pieces = [
        {"type": "http.request", "body": data[:5], "more_body": True},
        {"type": "http.request", "body": data[5:]},
    ]

    async def receive() -> Any:
        return pieces.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def other(*args: Any) -> None:
        sent.append("handed on")

    await GeneratedTokens(other)(scope, receive, send)
    return (sent[0], None) if len(sent) == 1 else (sent[0]["status"], json.loads(sent[1]["body"]))


def test_other_requests_are_handed_on():
    async def run():
        assert await ask(Engine(), path="/v1/completions") == ("handed on", None)
        assert await ask(Engine(), path=PATH + "/more") == ("handed on", None)

    asyncio.run(run())


def test_what_is_on_its_way_is_counted_too():
    async def run():
        engine = Engine()
        one, other = engine.holds("one"), engine.holds("other")
        engine.holds("somebody else's")
        handler = asyncio.create_task(engine.handle())
        for tokens in (one, other, one):
            engine.engine_core.outputs_queue.put_nowait((tokens, [1, 2, 3]))
        answer = await ask(engine, {"request_ids": ["one", "other", "unknown"]})
        handler.cancel()
        return answer

    assert asyncio.run(run()) == (200, {"generated": {"one": 6, "other": 3}})


def test_a_server_that_generates_is_not_counted():
    async def run():
        return await ask(Engine(paused=False), {"request_ids": []})

    assert asyncio.run(run())[0] == 409


@pytest.mark.parametrize("several", [{"engines": 2}, {"servers": 2}])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_where_no_process_knows_all_requests_it_is_not_to_be_used(several, method):
    async def run():
        return await ask(Engine(**several), {"request_ids": []}, method=method)

    assert asyncio.run(run())[0] == 501


def test_it_can_be_asked_whether_it_is_there():
    async def run():
        return await ask(Engine(paused=False), method="GET")

    assert asyncio.run(run()) == (200, {"known": True})

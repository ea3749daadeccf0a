"""An endpoint for the vLLM server: how many tokens each request has generated, while the server is paused.

vLLM streams tokens in chunks and does not say, before a chunk is full, how far a request is. Where weights change in
the middle of a request, that is the place where its policy version changes, so the trainer asks for it. `trl-april
serve` adds the endpoint by vLLM's own option `--middleware`; the server is not changed otherwise. Nothing is changed
by asking.

- `GET /april/generated_tokens`: whether this server can answer.
- `POST /april/generated_tokens` with `{"request_ids": [...]}`: `{"generated": {id: tokens}}`, for those of the ids
  that are known and have not ended. 409 if the server is not paused.

The invariant owned here: what is answered are exactly the tokens that the weights of before the pause have sampled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any


PATH = "/april/generated_tokens"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class GeneratedTokens:
    """ASGI middleware that answers requests for [`PATH`] and hands all others on.

    Args:
        app:
            The ASGI application behind it.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        if not _is_of_one_process(engine):
            await _answer(send, 501, {"error": "several API servers or engines, none of which knows all requests"})
        elif scope["method"] == "GET":
            await _answer(send, 200, {"known": True})
        elif not await engine.is_paused():
            await _answer(send, 409, {"error": "the server is not paused, so what is generated changes meanwhile"})
        else:
            await _all_is_processed(engine)
            wanted = set(json.loads(await _body(receive))["request_ids"])
            await _answer(send, 200, {"generated": _generated(engine, wanted)})


def _is_of_one_process(engine: Any) -> bool:
    """Whether all requests of the server go through this process and one engine."""
    parallel = engine.vllm_config.parallel_config
    return parallel.data_parallel_size == 1 and getattr(parallel, "_api_process_count", 1) == 1


async def _all_is_processed(engine: Any) -> None:
    """Wait until what the engine had sampled when it paused has gone through this process.

    It comes through one queue, in order, and before the answer of `is_paused`. Who takes it from there waits for more
    only when it has worked everything off.
    """
    queue = engine.engine_core.outputs_queue
    while not queue.empty() or not queue._getters:
        await asyncio.sleep(0)


def _generated(engine: Any, wanted: set[str]) -> dict[str, int]:
    return {
        state.external_req_id: state.detokenizer.num_output_tokens()
        for state in engine.output_processor.request_states.values()
        if state.external_req_id in wanted
    }


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""ASGI middleware that runs inside the vLLM server, added by `trl-april serve` with vLLM's option `--middleware`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .command_line import GENERATED_TOKENS_PATH, LEASE_PATH, TOKEN_IDS_ONLY
from .lease import Claim


class _Endpoint:
    """Answers requests to `path`, and passes on all others."""

    path: str

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != self.path:
            await self._app(scope, receive, send)
        else:
            answer = await self.answer(Request(scope, receive))
            await answer(scope, receive, send)

    async def answer(self, request: Request) -> JSONResponse:
        raise NotImplementedError


class GeneratedTokens(_Endpoint):
    """Reports how many tokens each request has generated while the server is paused for a weight sync.

    vLLM streams tokens in chunks and does not report the progress of a request before a chunk is full. The trainer
    needs the exact count, because the policy version changes at this token.

    - `GET /april/generated_tokens`: whether this server can answer, and which of vLLM's model runners it has.
    - `POST /april/generated_tokens` with `{"request_ids": [...]}`: `{"generated": {id: tokens}}` for the known and
      unfinished requests among them; 409 if the server is not paused.
    """

    path = GENERATED_TOKENS_PATH

    async def answer(self, request: Request) -> JSONResponse:
        engine = request.app.state.engine_client
        if not _knows_all_requests(engine):
            return JSONResponse({"error": "With several API servers, no process knows all requests."}, 501)
        if request.method == "GET":
            runner = "V2" if getattr(engine.vllm_config, "use_v2_model_runner", False) else "V1"
            return JSONResponse({"known": True, "model_runner": runner})
        if not await engine.is_paused():
            return JSONResponse({"error": "The server is not paused, so the counts would change."}, 409)
        await _outputs_processed(engine)
        wanted = set((await request.json())["request_ids"])
        generated = {
            state.external_req_id: state.detokenizer.num_output_tokens()
            for state in engine.output_processor.request_states.values()
            if state.external_req_id in wanted
        }
        return JSONResponse({"generated": generated})


class TokenIdsOnly:
    """Omits the text of completions whose requests have `TOKEN_IDS_ONLY` among their `vllm_xargs`.

    Detokenization takes half of the output processing of vLLM's API process, and `/v1/completions` has no field to
    turn it off. Requests with stop strings keep their text, since vLLM searches it for the strings.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._engine: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._engine is None:  # the engine exists before the first request
            self._engine = scope["app"].state.engine_client
            self._engine.generate = partial(_generate, self._engine.generate)
        await self._app(scope, receive, send)


class Lease(_Endpoint):
    """Reserves the server for one training run, so that a second run is refused before it changes any weights.

    `POST /april/lease` with the arguments of [`Claim.take`] takes or renews the lease for `seconds`; 0 gives it back.
    The answer is `{}`, or `{"holder": text, "left": seconds}` while another run has the lease.
    """

    path = LEASE_PATH

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._claim = Claim()

    async def answer(self, request: Request) -> JSONResponse:
        return JSONResponse(self._claim.take(**await request.json()))


def _generate(generate: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = getattr(sampling_params, "extra_args", None) or {}
    if wanted.get(TOKEN_IDS_ONLY) and not sampling_params.stop:
        sampling_params.detokenize = False
    return generate(prompt, sampling_params, *args, **kwargs)


def _knows_all_requests(engine: Any) -> bool:
    """Return whether this is the only API process, and it sends requests to all engines of the server."""
    parallel = engine.vllm_config.parallel_config
    engines = getattr(engine.engine_core, "core_engines", ())  # of this process
    return getattr(parallel, "_api_process_count", 1) == 1 and parallel.data_parallel_size in (1, len(engines))


async def _outputs_processed(engine: Any) -> None:
    """Wait until this process has handled every token that the engines sampled before the pause.

    Every engine put its tokens into the queue before it answered `is_paused`. The reader waits for the next item
    (`_getters`) only after it has handled all tokens, and never again if the engines die.
    """
    queue = engine.engine_core.outputs_queue
    while not queue.empty() or not queue._getters:
        if engine.errored:
            raise engine.dead_error
        await asyncio.sleep(0)


class BrowserGuard:
    """Refuses requests from web pages, which have an `Origin` header.

    A page open in a browser reaches every server on the loopback address, and vLLM's development endpoints run
    commands without an API key. A page cannot omit the header from a request that changes anything, and other clients
    do not send it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not any(name.lower() == b"origin" for name, _ in scope.get("headers", ())):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            message = "This server refuses requests from browsers. Start it with --allowed-origins to allow some."
            await JSONResponse({"error": message}, 403)(scope, receive, send)

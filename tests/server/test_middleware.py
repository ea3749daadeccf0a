"""The middleware inside the vLLM server: exact token counts during a pause, and no requests from browsers."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from trl_april.server.command_line import GENERATED_TOKENS_PATH, LEASE_PATH, TOKEN_IDS_ONLY
from trl_april.server.middleware import BrowserGuard, GeneratedTokens, Lease, TokenIdsOnly
from trl_april.server.worker import RELOAD_LOGGER, WeightLoader


def answer_of(middleware: Callable[[Any], Any], scope: dict[str, Any], body: bytes = b"") -> Coroutine[Any, Any, Any]:
    """Send a request; returns what the server sends: ASGI messages, or "passed on"."""
    sent: list[Any] = []

    async def app(*_: Any) -> None:
        sent.append("passed on")

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> Any:
        async with asyncio.timeout(10):
            await middleware(app)(scope, receive, send)
        return (sent[0]["status"], json.loads(sent[1]["body"])) if len(sent) == 2 else sent[0]

    return ask()


class Engine:
    """The part of vLLM's client that the middleware reads."""

    def __init__(self, *, paused: bool = True, engines: int = 1, own: int = 1, servers: int = 1) -> None:
        parallel = SimpleNamespace(data_parallel_size=engines, _api_process_count=servers)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue(), core_engines=[b"engine"] * own)
        self.output_processor = SimpleNamespace(request_states={})
        self.errored, self.dead_error = False, RuntimeError("The engine died.")
        self._paused = paused

    async def is_paused(self) -> bool:
        return self._paused

    def add(self, name: str) -> list[int]:
        tokens: list[int] = []
        self.output_processor.request_states[f"{name}-internal"] = SimpleNamespace(
            external_req_id=name, detokenizer=SimpleNamespace(num_output_tokens=lambda: len(tokens))
        )
        return tokens

    async def handle_outputs(self) -> None:
        """Append queued tokens, one for each turn of the event loop."""
        while True:
            tokens, new = await self.engine_core.outputs_queue.get()
            for token in new:
                await asyncio.sleep(0)
                tokens.append(token)


async def ask(engine: Engine, body: Any = None, *, path: str = GENERATED_TOKENS_PATH, method: str = "POST") -> Any:
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "path": path, "method": method, "app": app}
    return await answer_of(GeneratedTokens, scope, json.dumps(body).encode())


def test_tokens_in_transit_are_counted():
    """Tokens that the engine sampled before the pause may still be queued in the API server."""

    async def run() -> Any:
        engine = Engine()
        one, other = engine.add("one"), engine.add("other")
        engine.add("another client's")
        handler = asyncio.create_task(engine.handle_outputs())
        for tokens in (one, other, one):
            engine.engine_core.outputs_queue.put_nowait((tokens, [1, 2, 3]))
        answer = await ask(engine, {"request_ids": ["one", "other", "unknown"]})
        handler.cancel()
        return answer

    assert asyncio.run(run()) == (200, {"generated": {"one": 6, "other": 3}})


def test_an_engine_that_dies_after_the_pause_answers_no_question():
    """Nothing reads its outputs any more. To wait for that would keep the API process busy for ever."""

    async def run() -> None:
        engine = Engine()
        asyncio.get_running_loop().call_later(0.05, setattr, engine, "errored", True)
        with pytest.raises(RuntimeError, match="died"):
            await ask(engine, {"request_ids": ["one"]})

    asyncio.run(run())


@pytest.mark.parametrize(
    ("engine", "method", "path", "expected"),
    [
        ({"paused": False}, "GET", GENERATED_TOKENS_PATH, (200, {"known": True, "model_runner": "V1"})),
        ({"paused": False}, "POST", GENERATED_TOKENS_PATH, 409),
        ({"engines": 2, "own": 2}, "GET", GENERATED_TOKENS_PATH, (200, {"known": True, "model_runner": "V1"})),
        ({"engines": 2}, "GET", GENERATED_TOKENS_PATH, 501),
        ({"engines": 2, "own": 2, "servers": 2}, "POST", GENERATED_TOKENS_PATH, 501),
        ({}, "POST", "/v1/completions", "passed on"),
    ],
)
def test_counts_need_a_paused_server_of_one_process(engine, method, path, expected):
    async def run() -> Any:
        return await ask(Engine(**engine), {"request_ids": []}, method=method, path=path)

    answer = asyncio.run(run())
    assert (answer[0] if isinstance(expected, int) else answer) == expected


@pytest.mark.parametrize(
    ("arguments", "stop", "has_text"),
    [
        ({TOKEN_IDS_ONLY: 1}, [], False),
        ({TOKEN_IDS_ONLY: 1}, ["end"], True),
        ({"other": 1}, [], True),
        (None, [], True),
    ],
)
def test_text_is_left_out_for_requests_that_do_not_read_it(arguments, stop, has_text):
    generated = []

    class Generating(Engine):
        def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> None:
            generated.append((prompt, sampling_params.detokenize, request_id, options))

    async def answering(*_: Any) -> None:
        pass

    async def run() -> None:
        engine = Generating()
        scope = {"type": "http", "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}
        middleware = TokenIdsOnly(answering)
        for number in range(2):
            await middleware(scope, None, None)
            sampling = SimpleNamespace(extra_args=arguments, stop=stop, detokenize=True)
            engine.generate("prompt", sampling, str(number), priority=3)

    asyncio.run(run())
    assert generated == [("prompt", has_text, number, {"priority": 3}) for number in "01"]


@pytest.mark.server
def test_real_server_leaves_text_out(server):
    """Tokens and log-probabilities are the same, and the prompt's are not affected."""
    body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0.0, "logprobs": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    answers = []
    for more in ({}, {"vllm_xargs": {TOKEN_IDS_ONLY: 1}}):
        answer = requests.post(f"{server.base_url}/v1/completions", json=body | more, timeout=60).json()
        answers.append(answer["choices"][0])
    with_text, without = answers
    assert with_text["text"] and not without["text"]
    assert with_text["token_ids"] == without["token_ids"]
    assert with_text["logprobs"]["token_logprobs"] == pytest.approx(without["logprobs"]["token_logprobs"], abs=1e-5)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"type": "http", "headers": [(b"host", b"127.0.0.1")]}, "passed on"),
        ({"type": "websocket", "headers": []}, "passed on"),
        ({"type": "lifespan"}, "passed on"),
        ({"type": "http", "headers": [(b"host", b"127.0.0.1"), (b"Origin", b"https://evil.example")]}, 403),
        ({"type": "websocket", "headers": [(b"origin", b"null")]}, {"type": "websocket.close", "code": 1008}),
    ],
)
def test_requests_with_an_origin_are_refused(scope, expected):
    answer = asyncio.run(answer_of(BrowserGuard, scope))
    if expected == 403:
        assert answer[0] == 403 and "--allowed-origins" in answer[1]["error"]
    else:
        assert answer == expected


# The log of a worker during a weight sync


def test_only_the_warning_of_computed_tables_is_left_out(caplog):
    class Worker:
        pass

    class ExtendedWorker(Worker, WeightLoader):
        def __init__(self, rank: int) -> None:
            self.rank = rank

    assert ExtendedWorker(rank=3).rank == 3
    for name in ("RotaryEmbedding", "Llama3RotaryEmbedding", "QKVParallelLinear"):
        logging.getLogger(RELOAD_LOGGER).warning("%s: Failed to load weights", name)
    logging.getLogger(RELOAD_LOGGER).warning("RotaryEmbedding: no such device")
    assert caplog.messages == ["QKVParallelLinear: Failed to load weights", "RotaryEmbedding: no such device"]


def test_lease_is_answered_by_the_server():
    lease = Lease(None)

    def ask(holder: str, path: str = LEASE_PATH) -> Any:
        body = json.dumps({"holder": holder, "seconds": 60}).encode()
        middleware = lambda app: setattr(lease, "_app", app) or lease  # noqa: E731
        return asyncio.run(answer_of(middleware, {"type": "http", "path": path, "method": "POST"}, body))

    assert ask("first") == (200, {})
    assert ask("second")[1]["holder"] == "first"
    assert ask("second", "/health") == "passed on"

"""Checks of a vLLM server.

They harm no other user: only requests with ids of their own are aborted, and a server in use is given no weights.
After the weight sync, the server holds the same weights and reports the same version as before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import requests
from transformers import AutoConfig

from ..engine.logprobs import MEANING
from ..engine.protocol import Chunk, GenerationRequest
from ..engine.sampling import sampling_options
from ..engine.vllm import VLLMEngine
from ..errors import AprilError, ServerError, WeightSyncError
from ..rollout.event_loop import BackgroundLoop
from ..server.check import check_server, get_json, max_sequences, remedy_for_address, server_info
from ..server.command_line import GENERATED_TOKENS_PATH
from ..server.traffic import TimedRequests, server_load
from .doctor import Examination, Finding, Mark


PROMPT_TOKENS, STREAMED_TOKENS, LONGEST = 8, 32, 4096
SECONDS_BEFORE_ABORT = 1.0  # a few tokens, also of a slow server
SETTLING_SECONDS = 2.0  # until the server no longer counts our finished requests
CHECK_VERSION = "check that TRL supports this version of vLLM, and that no proxy changes its answers"


@dataclass
class Server:
    """A server, and what the checks have learned about it."""

    base_url: str
    session: TimedRequests
    options: argparse.Namespace
    name: str = ""
    info: dict[str, Any] = field(default_factory=dict)  # its own configuration
    path: str = ""  # folder or id of the served model
    context: int = 0


def examine_server(examination: Examination, options: argparse.Namespace, base_url: str) -> None:
    """Check a server."""
    session = TimedRequests(options.timeout)
    if "VLLM_API_KEY" in os.environ:
        session.headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
    server = Server(base_url, session, options)

    def check(name: str, what: Callable[[Server], Any], *after: str) -> None:
        examination.check(name, partial(_check, what, server), after=after)

    check("server", check_health)
    check("configuration", check_configuration, "server")
    check("model", check_model, "configuration")
    check("requests", check_requests, "configuration")
    check("other requests", check_idle, "server")
    check("weight sync", check_weight_sync, "model", "requests", "other requests")
    session.close()


def _check(what: Callable[[Server], Any], server: Server) -> Finding:
    try:
        with closing(BackgroundLoop("trl-april-doctor")) as loop:  # asyncio.run fails in a notebook
            found = what(server)
            return found if isinstance(found, Finding) else loop.run(found)
    except AprilError:
        raise
    except (requests.Timeout, requests.ConnectionError) as error:
        remedy = "start a server with `trl-april serve MODEL`, correct --base-url, see its log, or raise --timeout"
        return Finding(Mark.FAIL, f"no answer from {server.base_url}: {error}", remedy)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        remedy = "correct --base-url, and check that TRL supports its version of vLLM"
        return Finding(Mark.FAIL, f"{server.base_url} does not answer as a vLLM server does: {error!r}", remedy)


def check_health(server: Server) -> Finding:
    """Check that the server is ready and accepts the API key."""
    response = server.session.get(f"{server.base_url}/health")
    if response.status_code != 200:
        found = f"{server.base_url} is not healthy: /health answered {response.status_code} {response.text[:200]}"
        is_down = response.status_code >= 500
        remedy = "see the server's log, and restart it" if is_down else remedy_for_address(server.base_url)
        return Finding(Mark.FAIL, found, remedy)
    paused = server.session.get(f"{server.base_url}/is_paused")
    if paused.status_code == 200 and paused.json()["is_paused"]:
        found = f"{server.base_url} is paused, as in a weight sync or after one that failed"
        return Finding(Mark.FAIL, found, "wait for the sync, or train with it again, which loads all weights")
    server.name = str(get_json(server.session, f"{server.base_url}/v1/models")["data"][0]["id"])
    return Finding(Mark.OK, f"{server.base_url} serves {server.name!r}")


def check_configuration(server: Server) -> Finding:
    """Check flags that are not necessary, but better."""
    server.info = server_info(server.session, server.base_url)
    model, device = server.info["model_config"], str(server.info["device_config"]["device"]).split(":")[0]
    server.path, server.context = str(model["model"]), int(model["max_model_len"])
    answer = server.session.get(server.base_url + GENERATED_TOKENS_PATH)
    keeps_requests = answer.status_code == 200
    runner = answer.json().get("model_runner") if keeps_requests else None
    found = (
        f"{server.path}, {str(model['dtype']).removeprefix('torch.')} on {device}, context {server.context} tokens, "
        f"{max_sequences(server.info) or 'unknown'} concurrent sequences, model runner {runner or 'unknown'}"
    )
    defaults, quantization = model.get("generation_config", "vllm"), model.get("quantization")
    caches = server.info.get("cache_config", {}).get("enable_prefix_caching", True)
    transfers = device == "cpu" or server.info.get("weight_transfer_config") is not None
    wrong = {
        f"a file of the model may change the sampling (--generation-config {defaults})": defaults != "vllm",
        "every sample of a group computes the prompt (without --enable-prefix-caching)": not caches,
        f"quantized weights sample from another policy (--quantization {quantization})": quantization is not None,
        "weights travel through files (without --weight-transfer-config)": not transfers,
        f"resume_kv='keep' is not possible ({GENERATED_TOKENS_PATH} is missing)": not keeps_requests,
    }
    if any(wrong.values()):
        found = "; ".join([found, *(text for text, is_wrong in wrong.items() if is_wrong)])
        return Finding(Mark.WARN, found, "start it with `trl-april serve`, which sets the flags for training")
    return Finding(Mark.OK, found)


def check_model(server: Server) -> Finding:
    """Check what training checks when it starts: model, vocabulary, log-probabilities, context, endpoints."""
    options = server.options
    name, longest = options.model or server.path, options.max_completion_length
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        found = f"the configuration of {name} cannot be read here, so the model was not checked"
        mark = Mark.FAIL if options.model is not None else Mark.WARN
        return Finding(mark, f"{found} ({str(error).splitlines()[0]})", "name the model to train: --model DIR")
    info = check_server(server.session, server.base_url, config=config, max_completion_length=longest)
    room, architecture = server.context - longest, (config.architectures or [config.model_type])[0]
    meaning = MEANING[info.logprobs_mode]
    return Finding(Mark.OK, f"{architecture}, with room for prompts of {room} tokens; {info.logprobs_mode}: {meaning}")


async def check_requests(server: Server) -> Finding:
    """Check that tokens arrive in chunks, and that a request ends at its abort, with every token that it generated."""
    number, longest = (min(tokens, server.context - PROMPT_TOKENS) for tokens in (STREAMED_TOKENS, LONGEST))
    chunks: list[Chunk] = []
    async with engine_for(server, 4) as engine:
        await complete(engine, new_request(number), chunks, server.session.seconds)
    received, reason = sum(len(chunk.token_ids) for chunk in chunks), chunks[-1].finish_reason
    found = f"{received} of {number} token ids with their log-probabilities, in {len(chunks)} chunks of 4"
    if received != number or reason != "length" or len(chunks) == 1:
        return Finding(Mark.FAIL, f"{found}, finish reason {reason!r}", CHECK_VERSION)
    logprobs = [value for chunk in chunks for value in chunk.logprobs]
    if not all(-9999 < value <= 1e-3 for value in logprobs):  # vLLM sends -9999 where it has none
        return Finding(Mark.FAIL, f"these log-probabilities: {str(logprobs)[:200]}", CHECK_VERSION)
    # The server sends the first token at once, and the others at the end: only an abort brings them earlier.
    async with engine_for(server, longest) as engine:
        return await _abort(engine, new_request(longest), server.session.seconds, found)


async def _abort(engine: VLLMEngine, request: GenerationRequest, silence: float, before: str) -> Finding:
    chunks: list[Chunk] = []
    task = asyncio.create_task(complete(engine, request, chunks, 3 * silence))
    try:
        while not chunks and not task.done():
            await asyncio.sleep(0.01)
        await asyncio.wait({task}, timeout=SECONDS_BEFORE_ABORT)
        if task.done():
            await task  # raises its error
            found = f"no abort was tried: a completion of {request.max_tokens} tokens ended before it"
            return Finding(Mark.WARN, f"{before}; {found}", "serve the model with a larger --max-model-len")
        started = time.perf_counter()
        async with asyncio.timeout(silence):
            await engine.abort([request.request_id])
            await task
    except TimeoutError:
        found = f"an aborted request continued for {silence:g} s"
        return Finding(Mark.FAIL, found, "see the server's log, restart it, or raise --timeout")
    finally:
        task.cancel()  # closes the connection, which ends the request
        await asyncio.gather(task, return_exceptions=True)
    kept, reason = sum(len(chunk.token_ids) for chunk in chunks), chunks[-1].finish_reason
    if reason != "abort" or kept <= 1:
        found = f"an aborted request ended with {kept} tokens and finish reason {reason!r}"
        return Finding(Mark.FAIL, found, CHECK_VERSION)
    found = f"{before}; aborted after {kept} tokens in {1000 * (time.perf_counter() - started):.0f} ms"
    return Finding(Mark.OK, found)


@asynccontextmanager
async def engine_for(server: Server, stream_interval: int) -> AsyncGenerator[VLLMEngine, None]:
    """The engine of training, without end-of-sequence tokens."""
    options = sampling_options(generation_kwargs={"ignore_eos": True})
    key = str(server.session.headers.get("Authorization", "")).removeprefix("Bearer ") or None
    engine = VLLMEngine(server.base_url, server.name, options, stream_interval=stream_interval, api_key=key)
    try:
        yield engine
    finally:
        await engine.close()


def new_request(max_tokens: int) -> GenerationRequest:
    """A request with its own id, and a prompt that is not in the prefix cache."""
    name = f"doctor-{uuid.uuid4().hex}"
    prompt = random.choices(range(8), k=PROMPT_TOKENS)  # ids that every vocabulary has, even that of the demo
    return GenerationRequest(name, prompt, generated=0, max_tokens=max_tokens, cache_salt=name)


async def complete(engine: VLLMEngine, request: GenerationRequest, chunks: list[Chunk], silence: float) -> None:
    """Generate until the request ends, and collect its `chunks`.

    Raises:
        ServerError: If the stream ends early, or has no data for `silence` seconds.
    """
    async with aclosing(engine.generate(request)) as stream:
        while not chunks or chunks[-1].finish_reason is None:
            try:
                async with asyncio.timeout(silence):
                    chunks.append(await anext(stream))
            except (TimeoutError, StopAsyncIteration) as error:
                what = f"sent nothing for {silence:g} s" if isinstance(error, TimeoutError) else "ended the stream"
                raise ServerError(
                    f"After {sum(len(chunk.token_ids) for chunk in chunks)} of {request.max_tokens} tokens, the "
                    f"server {what}. See its log, restart it, raise --timeout, or remove a proxy that buffers streams."
                ) from None


def check_idle(server: Server) -> Finding:
    deadline = time.monotonic() + SETTLING_SECONDS
    while load := server_load(server.session, server.base_url):
        others = load.running + load.waiting
        if not others:
            return Finding(Mark.OK, "none")
        if time.monotonic() > deadline:
            return Finding(Mark.SKIP, f"others have {others} requests on the server; run this again when it is idle")
        time.sleep(SETTLING_SECONDS / 10)
    found = "the server does not report whether others use it"
    return Finding(Mark.WARN, found, "start it without --disable-log-stats")


def check_weight_sync(server: Server) -> Finding:
    """Send the server the weights that it has, through files."""
    import torch  # these three take seconds to import
    from trl.trainer.utils import create_model_from_path

    from ..weights import canary
    from ..weights.files import FileTransport, sees_files
    from ..weights.names import in_checkpoint_format, tied_names
    from ..weights.synced_server import SyncedServer, for_each

    if not sees_files(server.base_url, server.options.weight_sync_dir):
        remedy = "name a folder that both hosts see under the same path: --weight-sync-dir DIR"
        return Finding(Mark.SKIP, "the server is on another host, which sees no weight files of this one", remedy)
    version = str(get_json(server.session, f"{server.base_url}/weight_info")["weight_version"])
    path = server.options.model or server.path
    if version != "default":
        return Finding(Mark.SKIP, f"the server holds weights of a training run (version {version!r})")
    if server.info["model_config"].get("quantization") is not None:
        return Finding(Mark.SKIP, "the server's weights are quantized, so they cannot be compared with the model's")
    dtype = str(server.info["model_config"]["dtype"]).removeprefix("torch.")
    load_to = partial(create_model_from_path, path, dtype=dtype, local_files_only=True)
    try:
        needed, free = load_to(device_map="meta").get_memory_footprint(), psutil.virtual_memory().available
        if needed > free:
            return Finding(Mark.SKIP, f"{path} has {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB of memory are free")
        model = load_to(device_map=None)
    except (OSError, ValueError) as error:
        found = f"the weights of {path} cannot be loaded here ({error})"
        return Finding(Mark.WARN, found, "name a folder with the served model: --model DIR")
    check = canary.Canary(model.config.get_text_config().vocab_size, exact=model.dtype == torch.float32)
    expected = canary.trainer_logprobs(model, check.token_ids, torch.device("cpu"))
    receiver = SyncedServer(server.base_url, server.session.seconds, server.session.headers)
    control = receiver.control
    logprobs = partial(canary.server_logprobs, control, server.name, check.token_ids)
    try:
        check.compare(expected, logprobs(), 0)
    except WeightSyncError:
        found = f"nothing was sent: the server holds other weights than {path}, such as trained ones"
        return Finding(Mark.WARN, found, "name the served folder (--model DIR), or restart the server")
    # vLLM's CPU build updates a tied output layer only under its own name.
    on_cpu = str(server.info["device_config"]["device"]).startswith("cpu")
    parameters = model.named_parameters(remove_duplicate=not (on_cpu and tied_names(model)))
    started = time.perf_counter()
    read = partial(in_checkpoint_format, parameters, model)
    try:
        receiver.lease.take(renews=True)
    except WeightSyncError as error:
        return Finding(Mark.SKIP, str(error))
    try:
        with FileTransport(server.options.weight_sync_dir).stage(read, sends=True, dtypes=frozenset()) as load:
            receiver.begin_load()
            load([receiver], for_each)
        receiver.end_load(version)
    finally:
        receiver.give_up()
    control.request("POST", "reset_prefix_cache")
    seconds = time.perf_counter() - started
    difference = check.compare(expected, logprobs(), 0)
    found = f"{seconds:.2f} s; server and transformers differ by {difference:.1e} nats"
    return Finding(Mark.OK, found)

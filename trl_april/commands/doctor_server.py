"""Checks of a vLLM server.

They harm no other user: only requests with ids of their own are aborted, and a server in use is neither measured nor
given weights. After the weight sync, the server holds the same weights and reports the same version as before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import requests
from transformers import AutoConfig

from ..engine.logprobs import MEANING
from ..errors import AprilError, WeightSyncError
from ..rollout.event_loop import BackgroundLoop
from ..server.check import check_server, get_json, max_sequences, remedy_for_address, server_info
from ..server.command_line import GENERATED_TOKENS_PATH
from ..server.traffic import TimedRequests, server_load
from . import doctor_speed
from .doctor import DoctorOptions, Examination, Finding, Mark


SETTLING_SECONDS = 2.0  # until the server no longer counts our finished requests


@dataclass
class Server:
    """A server, and what the checks have learned about it."""

    base_url: str
    session: TimedRequests
    model: str | None = None  # the model to train, unless it is found where the server found it
    name: str = ""
    info: dict[str, Any] = field(default_factory=dict)  # its own configuration
    path: str = ""  # folder or id of the served model
    context: int = 0
    device: str = ""
    dtype: str = ""
    keeps_requests: bool = False  # whether it has the endpoint that resume_kv="keep" needs


def examine_server(examination: Examination, options: DoctorOptions, base_url: str) -> None:
    """Check a server."""
    session = TimedRequests(options.timeout)
    if "VLLM_API_KEY" in os.environ:
        session.headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
    server = Server(base_url, session, options.model)

    def check(name: str, what: Callable[..., Any], *arguments: Any, after: Sequence[str]) -> None:
        examination.check(name, partial(_check, what, server, *arguments), after=after)

    check("server", check_health, after=[])
    check("configuration", check_configuration, after=["server"])
    check("flags", check_flags, after=["configuration"])
    check("model", check_model, options.max_completion_length, after=["configuration"])
    check("streaming", doctor_speed.check_streaming, after=["configuration"])
    check("abort", doctor_speed.check_abort, after=["streaming"])
    check("other requests", check_idle, after=["server"])
    alone = ["streaming", "other requests"]
    check("decode speed", doctor_speed.check_decode, options.max_sequences, after=alone)
    check("prefill speed", doctor_speed.check_prefill, after=alone)
    check("weight sync", check_weight_sync, options.weight_sync_dir, after=["model", *alone])
    session.close()


def _check(what: Callable[..., Any], server: Server, *arguments: Any) -> Finding:
    try:
        with closing(BackgroundLoop("trl-april-doctor")) as loop:  # asyncio.run fails in a notebook
            found = what(server, *arguments)
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
    server.info = server_info(server.session, server.base_url)
    model = server.info["model_config"]
    server.path, server.context = str(model["model"]), int(model["max_model_len"])
    server.dtype = str(model["dtype"]).removeprefix("torch.")
    server.device = str(server.info["device_config"]["device"]).split(":")[0]
    sequences = max_sequences(server.info)
    data = {
        "model": server.path,
        "dtype": server.dtype,
        "device": server.device,
        "max_model_len": server.context,
        "max_num_seqs": sequences,
    }
    response = server.session.get(server.base_url + GENERATED_TOKENS_PATH)
    server.keeps_requests = response.status_code == 200
    data["model_runner"] = response.json().get("model_runner") if server.keeps_requests else None
    found = f"{server.path}, {server.dtype} on {server.device}, context {server.context} tokens"
    found += f", {sequences or 'unknown'} concurrent sequences, model runner {data['model_runner'] or 'unknown'}"
    return Finding(Mark.OK, found, data={"server": data})


def check_flags(server: Server) -> Finding:
    """Check flags that are not necessary, but better."""
    model = server.info["model_config"]
    defaults, quantization = model.get("generation_config", "vllm"), model.get("quantization")
    caches = server.info.get("cache_config", {}).get("enable_prefix_caching", True)
    transfers = server.device == "cpu" or server.info.get("weight_transfer_config") is not None
    wrong = {
        f"a file of the model may change the sampling (--generation-config {defaults})": defaults != "vllm",
        "every sample of a group computes the prompt (without --enable-prefix-caching)": not caches,
        f"quantized weights sample from another policy (--quantization {quantization})": quantization is not None,
        "weights travel through files (without --weight-transfer-config)": not transfers,
        f"resume_kv='keep' is not possible ({GENERATED_TOKENS_PATH} is missing)": not server.keeps_requests,
    }
    if any(wrong.values()):
        found = "; ".join(text for text, is_wrong in wrong.items() if is_wrong)
        return Finding(Mark.WARN, found, "start it with `trl-april serve`, which sets the flags for training")
    return Finding(Mark.OK, "all as recommended")


def check_model(server: Server, max_completion_length: int) -> Finding:
    """Check what training checks when it starts: model, vocabulary, log-probabilities, context, endpoints."""
    name = server.model or server.path
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        found = f"the configuration of {name} cannot be read here, so the model was not checked"
        mark = Mark.FAIL if server.model is not None else Mark.WARN
        return Finding(mark, f"{found} ({str(error).splitlines()[0]})", "name the model to train: --model DIR")
    info = check_server(
        server.session,
        server.base_url,
        config=config,
        max_completion_length=max_completion_length,
    )
    room, architecture = server.context - max_completion_length, (config.architectures or [config.model_type])[0]
    meaning = MEANING[info.logprobs_mode]
    return Finding(Mark.OK, f"{architecture}, with room for prompts of {room} tokens; {info.logprobs_mode}: {meaning}")


def check_idle(server: Server) -> Finding:
    deadline = time.monotonic() + SETTLING_SECONDS
    while load := server_load(server.session, server.base_url):
        others = load.running + load.waiting
        if not others:
            return Finding(Mark.OK, "none")
        if time.monotonic() > deadline:
            return Finding(Mark.SKIP, f"others have {others} requests on the server; run this again when it is idle")
        time.sleep(SETTLING_SECONDS / 10)
    found = "the server does not report whether others use it; measured speeds are right only if none do"
    return Finding(Mark.WARN, found, "start it without --disable-log-stats")


def check_weight_sync(server: Server, folder: str | None) -> Finding:
    """Send the server the weights that it has, through files."""
    import torch  # these three take seconds to import
    from trl.trainer.utils import create_model_from_path

    from ..weights import canary
    from ..weights.files import FileTransport, sees_files
    from ..weights.names import in_checkpoint_format, tied_names
    from ..weights.synced_server import SyncedServer, for_each

    if not sees_files(server.base_url, folder):
        remedy = "name a folder that both hosts see under the same path: --weight-sync-dir DIR"
        return Finding(Mark.SKIP, "the server is on another host, which sees no weight files of this one", remedy)
    version = str(get_json(server.session, f"{server.base_url}/weight_info")["weight_version"])
    path = server.model or server.path
    if version != "default":
        return Finding(Mark.SKIP, f"the server holds weights of a training run (version {version!r})")
    if server.info["model_config"].get("quantization") is not None:
        return Finding(Mark.SKIP, "the server's weights are quantized, so they cannot be compared with the model's")
    load_to = partial(create_model_from_path, path, dtype=server.dtype, local_files_only=True)
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
    parameters = model.named_parameters(remove_duplicate=server.device != "cpu" or not tied_names(model))
    started = time.perf_counter()
    read = partial(in_checkpoint_format, parameters, model)
    try:
        receiver.lease.take(renews=True)
    except WeightSyncError as error:
        return Finding(Mark.SKIP, str(error))
    try:
        with FileTransport(folder).stage(read, sends=True, dtypes=frozenset()) as load:
            receiver.begin_load()
            load([receiver], for_each)
        receiver.end_load(version)
    finally:
        receiver.give_up()
    control.request("POST", "reset_prefix_cache")
    seconds = time.perf_counter() - started
    difference = check.compare(expected, logprobs(), 0)
    found = f"{seconds:.2f} s; server and transformers differ by {difference:.1e} nats"
    return Finding(Mark.OK, found, data={"weight_sync_seconds": seconds})

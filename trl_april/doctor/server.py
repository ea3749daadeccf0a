"""Checks of what a server is and says of itself.

The invariant owned here: they only ask; nothing on the server is changed or generated for them, but one token.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from transformers import AutoConfig, PretrainedConfig

from ..errors import ServerError
from ..generated_tokens import PATH
from ..server_address import remedy_for_address
from ..server_check import (
    check_architecture,
    check_context,
    check_experts,
    check_logprobs_mode,
    check_vocabulary,
    get_json,
    max_sequences,
    server_info,
)
from ..server_load import server_load
from .finding import Finding, Mark
from .session import TimedSession


# What rollouts, aborts and weight syncs ask for. GET where asking changes nothing; to the others a GET is answered
# with 405 where they exist, and with 404 where they do not, and does nothing.
ENDPOINTS = (
    "v1/completions",
    "abort_requests",
    "collective_rpc",
    "reset_prefix_cache",
    "update_weight_version",
    "weight_info",
    "server_info",
)
ROUND_TRIPS = 20
SLOW_ROUND_TRIP = 0.05  # seconds: what some decode steps take
SETTLING_SECONDS = 2.0  # in which the server stops counting a request that has ended, such as ours of the check before


@dataclass
class Server:
    """A server, and what the checks have learnt of it so far.

    Args:
        base_url (`str`):
            Where it is.
        session ([`TimedSession`]):
            Carries the API key, if any.
        model (`str`, *optional*):
            Folder or id of the model that is to be trained, if it is not found where the server found it.
    """

    base_url: str
    session: TimedSession
    model: str | None = None
    name: str = ""  # under which it serves its model
    info: dict[str, Any] | None = None
    config: PretrainedConfig | None = None  # of the model that is to be trained
    seconds_per_token: float = 0.0  # of one sequence, roughly

    @property
    def described(self) -> dict[str, Any]:
        """The server's own account of its configuration."""
        assert self.info is not None, "the check `configuration` comes first"
        return self.info

    @property
    def served_path(self) -> str:
        """Folder or id that the server has loaded."""
        return str(self.described["model_config"]["model"])

    @property
    def context(self) -> int:
        """Tokens of prompt and completion together."""
        return int(self.described["model_config"]["max_model_len"])

    @property
    def max_sequences(self) -> int | None:
        """Sequences that it decodes at once, if it says so."""
        return max_sequences(self.described)

    @property
    def device(self) -> str:
        """Type of its device."""
        return str(self.described["device_config"]["device"]).split(":")[0]

    def token_ids(self, number: int, seed: int) -> list[int]:
        """Token ids that make a prompt of `number` tokens, others for every `seed`."""
        # The first half of the vocabulary: at its end are tokens with a meaning, such as the place of an image.
        size = 64 if self.config is None else self.config.get_text_config().vocab_size
        generator = random.Random(seed)
        return [generator.randrange(size // 2) for _ in range(number)]


def check_health(server: Server) -> Finding:
    """Whether it is there and ready to generate."""
    response = server.session.get(f"{server.base_url}/health")
    if response.status_code != 200:
        is_vllm = response.status_code >= 500
        return Finding(
            Mark.FAIL,
            f"{server.base_url} is not healthy: /health answered {response.status_code} {response.text[:200]}",
            "see the server's log, and restart it" if is_vllm else remedy_for_address(server.base_url),
        )
    return Finding(Mark.OK, f"{server.base_url} is healthy")


def check_access(server: Server) -> Finding:
    """Whether it lets us in, and what it serves."""
    try:
        server.name = str(get_json(server.session, f"{server.base_url}/v1/models")["data"][0]["id"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ServerError(
            f"What answers at {server.base_url} does not answer /v1/models as a vLLM server does: {error!r}. Correct "
            "--base-url."
        ) from error
    key = "without an API key" if server.session.api_key is None else "with the key in VLLM_API_KEY"
    return Finding(Mark.OK, f"serves {server.name!r}, {key}")


def check_version(server: Server, supported: SpecifierSet) -> Finding:
    """Whether TRL supports this version of vLLM."""
    response = server.session.get(f"{server.base_url}/version")
    remedy = f"install a vLLM that TRL supports ({supported}) where the server runs"
    try:
        version = str(response.json()["version"])
    except (KeyError, TypeError, ValueError):
        return Finding(Mark.WARN, f"not known: /version answered {response.status_code}", remedy)
    if re.match(r"\d+\.\d+", version) is None or version.startswith("0.0"):
        return Finding(Mark.WARN, f"{version!r}, which is no release ({supported} is supported)", remedy)
    if not supported.contains(version, prereleases=True):
        return Finding(Mark.FAIL, f"{version}, and {supported} is supported", remedy)
    return Finding(Mark.OK, f"{version} ({supported})")


def check_endpoints(server: Server) -> Finding:
    """Whether everything is there that training will call, vLLM's development endpoints included."""
    missing = [path for path in ENDPOINTS if server.session.get(f"{server.base_url}/{path}").status_code in (404, 501)]
    if missing:
        return Finding(
            Mark.FAIL,
            f"not there: {', '.join(f'/{path}' for path in missing)}",
            "restart the server with VLLM_SERVER_DEV_MODE=1 in its environment (`trl-april serve` does)",
        )
    return Finding(Mark.OK, f"all {len(ENDPOINTS)} are there, the development ones included")


def check_configuration(server: Server) -> Finding:
    """What the server has loaded, where, and how much it takes at once."""
    try:
        server.info = server_info(server.session, server.base_url)
        model = server.described["model_config"]
        dtype, device = str(model["dtype"]).removeprefix("torch."), server.device
        path, context = server.served_path, server.context
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(
            f"What answers at {server.base_url} does not answer /server_info as a vLLM server does: {error!r}. "
            "Correct --base-url, and check that the server is a version of vLLM that TRL supports."
        ) from error
    cache = server.described.get("cache_config", {}).get("kv_cache_size_tokens")
    data = {
        "model": path,
        "dtype": dtype,
        "device": device,
        "max_model_len": context,
        "max_num_seqs": server.max_sequences,
        "kv_cache_tokens": cache,
    }
    limits = [f"context {context} tokens"]
    if server.max_sequences is not None:
        limits.append(f"{server.max_sequences} sequences at once")
    if cache is not None:
        limits.append(f"KV cache for {cache} tokens")
    return Finding(Mark.OK, f"{path}, {dtype} on {device}, {', '.join(limits)}", data={"server": data})


def check_flags(server: Server) -> Finding:
    """Whether it was started with what is not necessary, but better."""
    model = server.described["model_config"]
    wrong: list[tuple[str, str]] = []
    if model.get("generation_config", "vllm") != "vllm":
        wrong.append(
            (
                f"--generation-config is {model['generation_config']!r}, so that a file of the model's may change "
                "how is sampled",
                "start it with --generation-config vllm",
            )
        )
    if not server.described.get("cache_config", {}).get("enable_prefix_caching", True):
        wrong.append(
            (
                "prefix caching is off, so that the samples of a group each compute their prompt",
                "start it with --enable-prefix-caching",
            )
        )
    if model.get("quantization") is not None:
        wrong.append(
            (
                f"its weights are quantized ({model['quantization']}), so that it samples from another policy than "
                "the trainer's and a weight sync cannot be verified as closely",
                "serve the model as it is trained",
            )
        )
    if server.device != "cpu" and server.described.get("weight_transfer_config") is None:
        wrong.append(
            (
                "it was started without --weight-transfer-config, so that weights travel through files",
                """start it with --weight-transfer-config '{"backend": "nccl"}'""",
            )
        )
    if wrong:
        return Finding(
            Mark.WARN,
            "; ".join(found for found, _ in wrong),
            "; ".join(remedy for _, remedy in wrong) + " (`trl-april serve` sets what training is better with)",
        )
    return Finding(Mark.OK, "nothing that training is better without")


def check_keeping(server: Server) -> Finding:
    """Whether its requests can live through a weight sync."""
    status = server.session.get(f"{server.base_url}{PATH}").status_code
    if status != 200:
        return Finding(
            Mark.WARN,
            f"{PATH} answered {status}, so requests are cut for a weight sync, with resume_kv='keep', too",
            "if you want that option, start the server by `trl-april serve`, and without data parallelism",
        )
    return Finding(Mark.OK, "resume_kv='keep' is possible")


def check_model(server: Server) -> Finding:
    """Whether the server's model has the shape and the vocabulary of the one that is to be trained."""
    name = server.model or server.served_path
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        return Finding(
            Mark.FAIL if server.model is not None else Mark.WARN,
            f"the configuration of {name} cannot be read from here ({str(error).splitlines()[0]}), so that shape and "
            "vocabulary were not compared",
            "name the model that is to be trained: --model DIR",
        )
    server.config = config
    check_architecture(server.served_path, server.base_url, config)
    check_experts(server.device, server.base_url, config)
    check_vocabulary(server.session, server.base_url, server.name, config)
    text = config.get_text_config()
    architecture = (config.architectures or [config.model_type])[0]
    return Finding(Mark.OK, f"{architecture} with a vocabulary of {text.vocab_size}, on both sides")


def check_logprobs(server: Server) -> Finding:
    """Whether recorded log-probabilities are those of the distribution that is sampled from."""
    mode = str(server.described["model_config"].get("logprobs_mode"))
    check_logprobs_mode(mode, server.base_url)
    return Finding(Mark.OK, f"--logprobs-mode {mode}")


def check_room(server: Server, max_completion_length: int) -> Finding:
    """Whether a prompt and a completion have room in the context."""
    check_context(server.context, max_completion_length, server.base_url)
    room = server.context - max_completion_length
    return Finding(Mark.OK, f"room for prompts of {room} tokens before completions of {max_completion_length}")


def check_idle(server: Server) -> Finding:
    """Whether others use the server now. Then nothing is done that would slow them down."""
    deadline = time.monotonic() + SETTLING_SECONDS
    load = server_load(server.session, server.base_url)
    while load and load.running + load.waiting and time.monotonic() < deadline:
        time.sleep(SETTLING_SECONDS / 10)
        load = server_load(server.session, server.base_url)
    if load is None:
        return Finding(
            Mark.WARN,
            "the server does not say whether others use it, so that speeds are only right if none do",
            "start it without --disable-log-stats",
        )
    if others := load.running + load.waiting:
        return Finding(Mark.SKIP, f"others have {others} requests on the server; run this again when they are done")
    return Finding(Mark.OK, "none")


def check_round_trip(server: Server) -> Finding:
    """How long the shortest answer takes."""
    seconds = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        server.session.get(f"{server.base_url}/health")
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    found = f"{1000 * median:.1f} ms (median of {ROUND_TRIPS}, slowest {1000 * max(seconds):.1f} ms)"
    data = {"round_trip_seconds": median}
    if median > SLOW_ROUND_TRIP:
        return Finding(
            Mark.WARN,
            f"{found}; every abort, and every resumed sample, waits for it",
            "run the server nearer to the trainer, or leave it a core of its own",
            data,
        )
    return Finding(Mark.OK, found, data=data)

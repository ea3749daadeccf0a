"""How many servers of a model fit on the GPUs of this host: `python -m trl_april.server.model_size MODEL GPUS`.

The size is that of the model's configuration, so neither weights nor a download of them are needed. The launchers call
it, with vLLM's flags as further arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import AprilError, ConfigError
from .command_line import check_model, flag_name, flag_value


WEIGHTS_SHARE = 0.6  # of the memory, at most; the rest is for KV blocks, activations and CUDA graphs


def servers_that_fit(weights: int, heads: int, memory: Sequence[int]) -> int:
    """The largest number of servers, each on an equal part of the GPUs, that hold their weights.

    A server splits the model over its GPUs, and each of them gets as many attention heads. Where the weights do not
    fit, a server gets as many GPUs as possible.

    Args:
        weights: Bytes of the weights.
        heads: Number of attention heads.
        memory: Bytes of each GPU.
    """
    gpus = len(memory)
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0 and heads % size == 0]
    fitting = [size for size in sizes if weights <= WEIGHTS_SHARE * size * min(memory)]
    return gpus // (fitting[0] if fitting else sizes[-1])


def model_size(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> tuple[int, int]:
    """Number of parameters and of attention heads of a model in a folder or on the Hub.

    Raises [`ConfigError`] if transformers does not know the model.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
        architecture = getattr(transformers, (config.architectures or [""])[0])
        with torch.device("meta"):
            parameters = architecture(config).parameters()
        return sum(param.numel() for param in parameters), int(config.get_text_config().num_attention_heads)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"The size of {model!r} is not known: {cause}") from error


def gpu_memory(count: int) -> list[int]:
    """Bytes of each of the first `count` GPUs. Raises [`ConfigError`] if torch cannot use as many."""
    import torch

    found, problem, accelerator = 0, ": it is built for CPUs", torch.accelerator.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        try:
            module.init()
            found, problem = module.device_count(), ""
        except RuntimeError as error:  # the driver is too old, or missing
            problem = f": {error}"
    if found < count:
        raise ConfigError(f"torch {torch.__version__} can use {found} of {count} GPUs{problem}")
    return [module.get_device_properties(index).total_memory for index in range(count)]


def main(argv: Sequence[str]) -> int:
    """Print the number of servers for a model and a number of GPUs, with vLLM's flags. Returns the exit code."""
    model, count, *vllm_args = argv
    try:
        check_model(model, vllm_args)
        trusts = "--trust-remote-code" in map(flag_name, vllm_args)
        size, heads = model_size(model, revision=flag_value(vllm_args, "--revision"), trust_remote_code=trusts)
        # By itself, vLLM serves weights in float32 in 16 bits.
        width = 4 if flag_value(vllm_args, "--dtype") in ("float", "float32") else 2
        sys.stdout.write(f"{servers_that_fit(size * width, heads, gpu_memory(int(count)))}\n")
    except AprilError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

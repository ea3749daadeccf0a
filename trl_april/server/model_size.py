"""GPU memory that servers and trainers need, by the size of a model.

`python -m trl_april.server.model_size MODEL GPUS` prints how many servers fit on the GPUs of this host. The launchers
call it, with vLLM's flags as further arguments. The size follows from the model's configuration, without its weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ..errors import AprilError, ConfigError
from .command_line import check_model, flag_name, flag_value


WEIGHTS_SHARE = 0.6  # of the memory, at most; the rest is for KV blocks, activations and CUDA graphs
ACTIVATIONS_SHARE = 0.1  # of the memory of a GPU, a rule of thumb
# Optimizer states per parameter, by the first of these words in the optimizer's name. States that are factored, paged
# to the host, low-rank or unknown are not counted.
STATES = {
    "paged": 0, "adafactor": 0, "galore": 0, "apollo": 0, "lomo": 0, "ademamix": 3, "adam": 2, "schedule_free": 1,
    "adagrad": 1, "lion": 1, "rmsprop": 1,
}  # fmt: skip
BYTES_OF_STATE = {"8bit": 1.0, "4bit": 0.5}  # by a word in the optimizer's name; otherwise the bytes of a weight


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes that training needs on each GPU, without activations."""

    weights: float
    gradients: float
    states: float
    optimizer: str = ""

    @property
    def total(self) -> float:
        """Weights, gradients and states together."""
        return self.weights + self.gradients + self.states

    def __str__(self) -> str:
        parts = (f"{part / 1e9:.1f} GB" for part in (self.total, self.weights, self.gradients, self.states))
        return "{} per GPU ({} of weights, {} of gradients, {} of states of {})".format(*parts, self.optimizer)

    def divided(self, stage: int, gpus: int) -> TrainingMemory:
        """Divide among `gpus` as a stage of ZeRO does: states, then gradients, then weights. FSDP is stage 3."""
        weights, gradients, states, optimizer = astuple(self)
        return TrainingMemory(
            weights / (gpus if stage >= 3 else 1),
            gradients / (gpus if stage >= 2 else 1),
            states / (gpus if stage >= 1 else 1),
            optimizer,
        )

    def fits(self, memory: float, left: float) -> bool:
        """Return whether training with activations fits into the bytes `left` of a GPU with this `memory`."""
        return self.total <= left - ACTIVATIONS_SHARE * memory


def training_memory(models: Sequence[Any], optimizer: str, *, casts: bool = False) -> TrainingMemory:
    """Return the memory of several models, of which the first is trained where parameters require gradients.

    With `casts`, as in DeepSpeed, it is trained in 16 bits, and the optimizer has a copy in 32 bits. Quantized
    parameters count with their packed bytes, and ZeRO-3's parameters with all of their shards (`ds_numel`).
    """
    weights = gradients = states = 0.0
    number = next((number for word, number in STATES.items() if word in optimizer), 0)
    for model in models:
        for param in model.parameters():
            size, width = getattr(param, "ds_numel", param.numel()), param.element_size()
            kept = size * (min(width, 2) if casts else width)
            weights += kept
            if param.requires_grad and model is models[0]:
                gradients += kept
                each = next((width for word, width in BYTES_OF_STATE.items() if word in optimizer), width)
                states += size * (number * each + (4 if casts else 0))
    return TrainingMemory(weights, gradients, states, optimizer)


def left_of_gpu(device: Any) -> tuple[int, int]:
    """Return the bytes of a GPU, and the bytes that this process can use. Other processes have the rest."""
    import torch

    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return total, free + module.memory_reserved(device)


def servers_that_fit(weights: int, heads: int, memory: Sequence[int]) -> int:
    """Return the largest number of servers, each on an equal part of the GPUs, that can hold the `weights`, in bytes.

    A server divides its attention `heads` equally among its GPUs. If the weights do not fit, a server gets as many
    GPUs as possible. `memory` has the bytes of each GPU.
    """
    gpus = len(memory)
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0 and heads % size == 0]
    fitting = [size for size in sizes if weights <= WEIGHTS_SHARE * size * min(memory)]
    return gpus // (fitting[0] if fitting else sizes[-1])


def model_size(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> tuple[int, int]:
    """Return the number of parameters and of attention heads of a model in a folder or on the Hub.

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
    """Return the bytes of each of the first `count` GPUs. Raises [`ConfigError`] if torch finds fewer."""
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
        # By default, vLLM serves float32 weights in 16 bits.
        width = 4 if flag_value(vllm_args, "--dtype") in ("float", "float32") else 2
        sys.stdout.write(f"{servers_that_fit(size * width, heads, gpu_memory(int(count)))}\n")
    except AprilError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

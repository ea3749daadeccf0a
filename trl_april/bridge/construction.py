"""Construction of TRL's trainer: its arguments, and the server, which is started before it and connected after it.

TRL would connect to vLLM by itself, and has no factory for the connection. In TRL, GSPO (arXiv 2507.18071, equation 7:
an importance ratio per sequence) is the `grpo` aggregation with sequence-level importance sampling.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id

from ..config import APRILGRPOConfig, AprilOptions, correction_mode
from ..distributed.processes import Processes, get_logger
from ..engine.sampling import SamplingOptions
from ..engine.servers import ServersEngine
from ..engine.vllm import VLLMEngine
from ..errors import ConfigError, ServerError
from ..pool.budget import LARGER_CONTEXT
from ..server.command_line import PROCESSED_LOGPROBS
from ..server.embedded import (
    CONTEXT_REMEDY,
    EmbeddedServer,
    choose_devices,
    keep_one_gpu,
    lora_flags,
    save_architecture,
    server_flags,
    visible_gpus,
)
from ..server.host import server_addresses
from ..server.local import DEFAULT_HOST
from ..server.model_size import left_of_gpu, training_memory
from ..weights.adapters import AdapterTransport, is_quantized, why_not_served
from ..weights.sync import ServerGeneration
from .compatibility import names_server, option_left_out


logger = get_logger(__name__)

# Section 5.1 of the GSPO paper.
GSPO_EPSILON, GSPO_EPSILON_HIGH = 3e-4, 4e-4

# For the model card.
PAPER = {
    "title": "APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail Generation",
    "id": "2509.18521",
    "citation": textwrap.dedent("""\
        @article{zhou2025april,
            title        = {{APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail Generation}},
            author       = {Yuzhen Zhou and Jiajun Li and Yusheng Su and Gowtham Ramesh and Zilin Zhu and Xiang Long and Chenyang Zhao and Jin Pan and Xiaodong Yu and Ze Wang and Kangrui Du and Jialian Wu and Ximeng Sun and Jiang Liu and Qiaolin Yu and Hao Chen and Zicheng Liu and Emad Barsoum},
            year         = 2025,
            eprint       = {arXiv:2509.18521},
        }"""),  # noqa: E501
}


def gspo_options(args: GRPOConfig) -> dict[str, Any]:
    """TRL's options for `loss_type="gspo"`. A clip bound stays unless it is TRL's default."""
    options: dict[str, Any] = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    if args.epsilon == GRPOConfig.epsilon:
        options["epsilon"] = GSPO_EPSILON
        if args.epsilon_high is None:
            options["epsilon_high"] = GSPO_EPSILON_HIGH
    return options


def trl_options(args: GRPOConfig, *, april_enabled: bool) -> dict[str, Any]:
    """Return values for the options that [`APRILGRPOConfig`] leaves `None`; without APRIL, TRL's defaults."""
    is_server, mode = names_server(args), GRPOConfig.vllm_importance_sampling_mode
    values = {
        "use_vllm": april_enabled or is_server,
        "vllm_mode": "server" if is_server else "colocate",
        "vllm_importance_sampling_mode": correction_mode(args) if april_enabled else mode,
    }
    return {name: value for name, value in values.items() if getattr(args, name) is None}


def model_and_arguments(model: Any, args: GRPOConfig | None) -> tuple[Any, GRPOConfig]:
    """Return the model (a path as text), and the configuration or, if it is `None`, TRL's default for the model.

    Raises [`ConfigError`] for the folder of an adapter, which TRL does not load.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    if (
        isinstance(model, str)
        and Path(model, "adapter_config.json").exists()
        and not Path(model, "config.json").exists()
    ):
        raise ConfigError(
            f"{model!r} is the folder of an adapter, without its base. Load both: "
            f"AutoPeftModelForCausalLM.from_pretrained({model!r}, is_trainable=True)."
        )
    return model, args or APRILGRPOConfig(f"{name.rstrip('/').split('/')[-1]}-APRIL")


@contextmanager
def arguments_for_trl(
    args: GRPOConfig, model: Any, *, april_enabled: bool, server: EmbeddedServer | None = None
) -> Iterator[None]:
    """Change `args` while TRL's constructor runs: TRL's name of the loss; with APRIL, no vLLM, and another attention.

    Saved configs keep the user's values. After an error `server` is stopped, since the traceback keeps the trainer.
    """
    changes = trl_options(args, april_enabled=april_enabled)
    if args.loss_type == "gspo":
        changes |= gspo_options(args)
    if april_enabled:
        changes |= {"use_vllm": False, "generation_kwargs": None}
        if (attention := attention_of(args, model)) is not None:
            changes["model_init_kwargs"] = {**(args.model_init_kwargs or {}), "attn_implementation": attention}
    elif args.vllm_server_base_url is not None:
        changes["vllm_server_base_url"] = server_addresses(args.vllm_server_base_url)[0]  # TRL takes a single address
    if server is not None and server.devices.gpus and not server.devices.shared and args.world_size == 1:
        loading = changes.get("model_init_kwargs", args.model_init_kwargs) or {}
        changes["model_init_kwargs"] = {"device_map": {"": args.device.index or 0}, **loading}
    before = {name: getattr(args, name) for name in changes}
    # Without vLLM, TRL reads this token of a model with an image processor, even if the model takes text only.
    adds_token = april_enabled and isinstance(model, PreTrainedModel) and not hasattr(model.config, "image_token_id")
    if adds_token:
        model.config.image_token_id = 0
    for name, value in changes.items():
        setattr(args, name, value)
    is_constructed = False
    try:
        yield
        is_constructed = True
    except AttributeError as error:
        if "image_token_id" not in str(error):
            raise
        raise ConfigError(
            f"{model} takes text only, but its processor takes images. Pass the loaded model instead of its name, or "
            "its tokenizer as processing_class."
        ) from error
    finally:
        if server is not None and not is_constructed:
            server.stop()
        for name, value in before.items():
            setattr(args, name, value)
        if adds_token:
            del model.config.image_token_id


def start_server(
    trainer: object, args: GRPOConfig, model: Any, processing_class: Any, peft_config: Any, processes: Processes
) -> EmbeddedServer | None:
    """Start a server for the trainer if needed, or take over the server of an earlier trainer. A collective call.

    On GPUs that the trainer uses too, all processes wait until the server is ready: while vLLM measures how much
    memory the KV cache can have, it counts the allocations of other processes as its own.

    The server stops when its last trainer is garbage-collected. Returns `None` in all processes but the first.
    """
    if names_server(args):
        return None
    server = None
    if needs_server(args):
        keep_one_gpu(args, model)
        server = embedded_server(args, model, processing_class, peft_config).shared_with(trainer)
        server.start(wait=False)
    processes.decide(lambda: server.wait().port if server.devices.shared else None)
    return server


def needs_server(args: GRPOConfig) -> bool:
    """Whether this process has to start a server.

    A server at the default address is not used unless the user named it: it may be a judge, whose weights would be
    overwritten.
    """
    if names_server(args):
        return False
    if args.world_size > int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)):
        raise ConfigError(
            f"The {args.world_size} processes run on several hosts, and no server is given. A server that the trainer "
            "starts is reached from its own host only: run `trl-april serve MODEL --host ADDRESS`, and set "
            "vllm_server_base_url."
        )
    return args.process_index == 0


def embedded_server(args: GRPOConfig, model: Any, processing_class: Any, peft_config: Any = None) -> EmbeddedServer:
    """The server for `model` in the trainer's precision, on GPUs that the trainer does not use, or else shared."""
    gpus, variables = visible_gpus() if args.device.type == "cuda" else ([], [])
    used = max(args.n_gpu, args.world_size)
    devices = choose_devices(gpus, used, args.vllm_tensor_parallel_size)
    flags = server_flags(
        devices,
        dtype=precision(args, model),
        memory=args.vllm_gpu_memory_utilization,
        tensor_parallel=args.vllm_tensor_parallel_size,
        max_model_length=args.vllm_max_model_length,
    )
    if args.temperature != 1.0:  # raw log-probabilities have temperature 1
        flags += ["--logprobs-mode", PROCESSED_LOGPROBS]
    if args.vllm_model_impl != GRPOConfig.vllm_model_impl:
        flags += ["--model-impl", args.vllm_model_impl]
    loading = args.model_init_kwargs or {}
    # The code of a model object runs in this process already.
    if loading.get("trust_remote_code", args.trust_remote_code) or getattr(model, "_auto_class", None):
        flags += ["--trust-remote-code"]
    adapter = getattr(model, "active_peft_config", peft_config)
    if is_quantized(model):
        model = get_config_model_id(model.config)
    if isinstance(model, str):
        # A model object gets merged weights instead: its base would have to be sent before the first adapter.
        if adapter is not None and AprilOptions.of(args).sends_adapter and why_not_served(adapter) is None:
            flags += lora_flags(adapter.r)
        if loading.get("revision"):
            flags += ["--revision", loading["revision"]]
        return EmbeddedServer(model, devices, flags, gpu_variables=variables)
    folder = save_architecture(model, processing_class)
    flags += ["--load-format", "dummy"]  # the first weight sync brings the weights
    return EmbeddedServer(str(folder), devices, flags, gpu_variables=variables, folder=folder)


def precision(args: GRPOConfig, model: Any) -> str:
    """The data type in which the trainer computes log-probabilities, by its name in vLLM."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    if not isinstance(model, str):
        return str(model.dtype).removeprefix("torch.")
    return dtype_of(args, model)


def dtype_of(args: GRPOConfig, model: str) -> str:
    """The data type of the weights that TRL loads."""
    dtype = (args.model_init_kwargs or {}).get("dtype", "float32")  # TRL's default
    if dtype in (None, "auto"):
        dtype = config_of(args, model).dtype or "float32"
    return str(dtype).removeprefix("torch.")


def attention_of(args: GRPOConfig, model: Any) -> str | None:
    """The attention to load a model with, if the user named none and transformers' default omits an option."""
    named = (args.model_init_kwargs or {}).get("attn_implementation")
    if not isinstance(model, str) or named is not None:
        return None
    with suppress(OSError, ValueError):  # TRL raises it again
        if option_left_out(config_of(args, model), "sdpa") is not None:
            has_flash = args.device.type == "cuda" and is_flash_attn_2_available()
            takes_dtype = args.bf16 or args.fp16 or dtype_of(args, model) != "float32"
            return "flash_attention_2" if has_flash and takes_dtype else "eager"
    return None


def config_of(args: GRPOConfig, model: str) -> PreTrainedConfig:
    """The configuration that TRL loads a model with."""
    loading = args.model_init_kwargs or {}
    trusts = loading.get("trust_remote_code", args.trust_remote_code)
    return AutoConfig.from_pretrained(model, revision=loading.get("revision"), trust_remote_code=trusts)


def connect_server(
    args: GRPOConfig,
    options: AprilOptions,
    *,
    server: EmbeddedServer | None,
    processes: Processes,
    **of_trainer: Any,
) -> ServerGeneration:
    """Connect to the server as TRL's constructor would, with our own weight sync. A collective call.

    `server` is the embedded server, in the process that started it. `of_trainer` are the trainer's model, accelerator
    and the like.
    """

    def addresses() -> list[str]:  # they may change during training
        return server_addresses(args.vllm_server_base_url or [])

    def wait() -> tuple[int | None, bool]:
        return (None, False) if server is None else (server.wait().port, server.devices.shared)

    port, shares_device = processes.decide(wait)
    try:
        generation = ServerGeneration(
            local_server=server,
            processes=processes,
            weight_sync=options.weight_sync,
            shares_device=shares_device,
            weight_sync_dir=options.weight_sync_dir,
            needs_logprobs=args.vllm_importance_sampling_correction or args.off_policy_mask_threshold is not None,
            api_key=api_key(),
            resume_kv=options.resume_kv,
            server_base_url=f"http://{DEFAULT_HOST}:{port}" if port else None,
            larger_context=LARGER_CONTEXT if names_server(args) else CONTEXT_REMEDY,
            addresses=None if port or args.vllm_server_base_url is None else addresses,
            server_host=args.vllm_server_host,
            server_port=args.vllm_server_port,
            server_timeout=args.vllm_server_timeout,
            group_port=args.vllm_group_port,
            repetition_penalty=args.repetition_penalty,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            max_completion_length=args.max_completion_length,
            logprobs=0,  # of the sampled tokens only
            generation_kwargs=args.generation_kwargs,
            **of_trainer,
        )
        if server is not None:
            server.has_base &= generation.weight_sync == AdapterTransport.name
        return generation
    except BaseException as error:
        if server is not None:
            server.stop()
        if isinstance(error, ServerError):
            raise error.with_traceback(None) from None  # the message says all of it
        raise


def attach_server(trainer: GRPOTrainer) -> None:
    """Connect a trainer that was constructed without vLLM to its server, embedded or given."""
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_generation = connect_server(
        trainer.args,
        trainer._april_options,
        server=trainer._april_server,
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        processes=trainer._april_processes,
        policy_version=lambda: trainer.state.global_step,
        trained_model=lambda: trainer.model,
    )


def check_memory(trainer: GRPOTrainer) -> None:
    """Warn before the first round if training does not fit into the memory that the server leaves it."""
    args, plugin = trainer.args, trainer.accelerator.state.deepspeed_plugin
    places = set((getattr(trainer.model, "hf_device_map", None) or {}).values())
    is_offloaded = plugin is not None and plugin.offload_optimizer_device not in (None, "none")
    if args.device.type == "cpu" or len(places) > 1 or is_offloaded:
        return
    others = [model for model in (trainer.ref_model, *trainer.reward_funcs) if isinstance(model, torch.nn.Module)]
    given = trainer.optimizer
    needed = training_memory(
        [trainer.model, *others],
        args.optim.value if given is None else type(given).__name__.lower(),
        casts=plugin is not None and (args.bf16 or args.fp16),
    )
    stage = 3 if trainer.is_fsdp_enabled else plugin.zero_stage if plugin is not None else 0
    needed, (total, left) = needed.divided(stage, args.world_size), left_of_gpu(args.device)
    if not needed.fits(total, left):
        logger.warning(
            f"Training needs {needed}, and activations. The trainer has {left / 1e9:.1f} of {total / 1e9:.1f} GB, so "
            "the first optimizer step may run out of memory. Set optim='adamw_8bit', train a LoRA adapter "
            "(peft_config), lower vllm_gpu_memory_utilization, give the server another GPU, or divide the model by "
            "FSDP or ZeRO. docs/servers.md has a table."
        )


def model_card(
    trainer_class: type[GRPOTrainer], april_class: type[GRPOTrainer], *, april_enabled: bool
) -> dict[str, Any]:
    """Attributes of the model card, which cites the method and, if it is enabled, APRIL."""
    other = super(april_class, trainer_class)  # GRPOTrainer, or another trainer that a subclass mixes in
    if not april_enabled:
        names = ("_tag_names", "_name", "_paper")
        inherited = [name for name in names if getattr(trainer_class, name) is getattr(april_class, name)]
        return {name: getattr(other, name) for name in inherited}
    papers = (trainer_class._paper, april_class._paper, other._paper)
    citations = dict.fromkeys(paper["citation"] for paper in papers if "citation" in paper)
    return {
        "_paper": {**trainer_class._paper, "citation": "\n\n".join(citations)},
        "_tag_names": list(dict.fromkeys([*trainer_class._tag_names, *other._tag_names])),
    }


def api_key() -> str | None:
    """API key of the server, from the environment variable that vLLM itself reads."""
    return os.environ.get("VLLM_API_KEY")


def rollout_engine(
    options: AprilOptions, sampling: SamplingOptions, server: ServerGeneration, vocab_size: int, rank: int
) -> ServersEngine:
    """The engine for completions on the servers that get the weights."""
    return ServersEngine(
        server.servers.addresses,
        lambda address: VLLMEngine(
            address, server.server_info.model, sampling, stream_interval=options.stream_interval,
            vocab_size=vocab_size, api_key=api_key(), adapter=server.adapter_of,
        ),
        is_sticky=options.resume_kv != "recompute", rank=rank, on_lost=server.servers.leave_out,
    )  # fmt: skip

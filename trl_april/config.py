"""APRIL's options: the fields that TRL lacks, and the few TRL defaults that partial rollouts change."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

import torch
from transformers.trainer_utils import SaveStrategy
from trl import GRPOConfig

from .distributed.processes import get_logger
from .errors import ConfigError
from .pool.staleness import AUTO, check_bound, factor_of
from .server.host import server_addresses
from .tuning.admission_control import START


logger = get_logger(__name__)

WEIGHT_SYNCS = ("auto", "adapter", "nccl", "ipc", "filesystem")
RESUME_KV = ("auto", "recompute", "reuse", "keep")
# While its tools run, a sample has no request on the server, so more groups are needed for the same requests.
DEFAULT_FACTOR, DEFAULT_FACTOR_WITH_TOOLS = START, 6.0


def given_address(args: GRPOConfig) -> str | None:
    """Return the name of the option that gives a server's address, or `None` if no address is given."""
    names = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
    return next((name for name in names if getattr(args, name) != getattr(GRPOConfig, name)), None)


def correction_mode(args: GRPOConfig) -> str:
    """Return `vllm_importance_sampling_mode`, or APRIL's default if it is not set."""
    return args.vllm_importance_sampling_mode or "token_truncate"


@dataclass
class AprilOptions:
    """APRIL's options, validated. A stock [`~trl.GRPOConfig`] has none of them and gets the defaults.

    [`APRILGRPOConfig`] describes the options.
    """

    over_provisioning: float | str | None = None
    max_staleness: int | None = 8
    staleness_policy: str = "wait"
    resume_kv: str = "auto"
    # True, False or "auto". With `bool` in the type, HfArgumentParser would accept no text.
    overlap_generation: int | str | None = "auto"
    dynamic_sampling: bool = False
    score_during_generation: bool = False
    max_rejected_groups_per_round: int | None = None
    dppo_threshold: float | None = None
    weight_sync: str = "auto"
    weight_sync_dir: str | None = None
    stream_interval: int = 64
    save_on_signal: bool | None = None
    tool_timeout: float | None = None
    replay_environments: bool = False

    @classmethod
    def of(cls, args: GRPOConfig) -> AprilOptions:
        """Return the options of an [`APRILGRPOConfig`] as given, or the defaults for any other config."""
        if not isinstance(args, AprilOptions):
            return cls()
        return cls(**{option.name: getattr(args, option.name) for option in fields(cls)})

    @classmethod
    def resolved(
        cls, args: GRPOConfig, *, scores: bool = False, keeps: bool = True, acts: bool = False
    ) -> AprilOptions:
        """Return the options of a training run, with each `None` and `"auto"` resolved that needs no measurement.

        With `scores`, groups are scored during generation in any case. See [`with_schedule`] for `keeps` and `acts`.
        """
        options = cls.of(args).with_schedule(keeps=keeps, acts=acts)
        saves = args.save_strategy != SaveStrategy.NO
        return replace(
            options,
            score_during_generation=options.score_during_generation or scores,
            save_on_signal=saves if options.save_on_signal is None else options.save_on_signal,
        )

    @property
    def scores_groups(self) -> bool:
        """Whether each group is scored during generation."""
        return self.dynamic_sampling or self.score_during_generation

    @property
    def sends_adapter(self) -> bool:
        """Whether `weight_sync` allows sending only the adapter to the server."""
        return self.weight_sync in ("auto", "adapter")

    def with_schedule(self, *, keeps: bool = True, acts: bool = False) -> AprilOptions:
        """Return these options, with each `None` and `"auto"` resolved that needs no measurement.

        `keeps` says whether requests can be kept through a weight sync, and `acts` whether samples have tools,
        environments or a rollout.
        """
        factor, overlaps, kv = self.over_provisioning, self.overlap_generation, self.resume_kv
        if factor is None:
            factor = DEFAULT_FACTOR_WITH_TOOLS if acts else DEFAULT_FACTOR
            if self.max_staleness is not None and self.staleness_policy == "wait":
                factor = min(factor, self.max_staleness + 1.0)
        if overlaps == AUTO:
            overlaps = factor != 1.0 and self.max_staleness != 0
        if kv == AUTO:
            kv = "keep" if overlaps and keeps else "reuse"
        return replace(self, over_provisioning=factor, overlap_generation=overlaps, resume_kv=kv)

    def __post_init__(self) -> None:
        if self.over_provisioning is not None:
            self.over_provisioning = factor_of(self.over_provisioning)  # a command line passes text
        # Only a given factor can violate the bound: the default and "auto" respect it.
        factor = self.over_provisioning if isinstance(self.over_provisioning, float) else 1.0
        check_bound(factor, self.max_staleness, self.staleness_policy)
        switch = str(self.overlap_generation).lower()  # a command line passes text
        timeout, dppo = self.tool_timeout, self.dppo_threshold
        for name, is_valid, rule in (
            ("weight_sync", self.weight_sync in WEIGHT_SYNCS, f"must be among {', '.join(WEIGHT_SYNCS)}"),
            ("resume_kv", self.resume_kv in RESUME_KV, f"must be among {', '.join(RESUME_KV)}"),
            ("overlap_generation", switch in ("true", "false", AUTO), "must be True, False or 'auto'"),
            ("dppo_threshold", dppo is None or 0 < dppo < 1, "must be between 0 and 1. Omit it for no mask"),
            ("tool_timeout", timeout is None or timeout > 0, "must be positive. Omit it for no limit"),
            ("stream_interval", self.stream_interval >= 1, "counts tokens and must be at least 1"),
        ):
            if not is_valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it {rule}.")
        self.overlap_generation = AUTO if switch == AUTO else switch == "true"
        if self.resume_kv == "keep" and not self.overlap_generation:
            raise ConfigError(
                "resume_kv='keep' lets requests continue through the weight sync, but without overlap_generation "
                "none is running then. Set overlap_generation=True, or resume_kv='reuse'."
            )

    def bounded_factor(self, versions_per_round: int) -> float:
        """Return the over-provisioning factor as a number, capped by the staleness bound.

        In a round of several optimizer steps (`versions_per_round`), waiting groups age by as many versions.
        """
        is_auto = isinstance(self.over_provisioning, str)  # "auto" respects the bound under every policy
        assert self.over_provisioning is not None, "with_schedule comes first"
        factor = START if isinstance(self.over_provisioning, str) else self.over_provisioning
        if self.max_staleness is None or not (is_auto or self.staleness_policy == "wait"):
            return factor
        highest = self.max_staleness // versions_per_round + 1
        if factor <= highest:
            return factor
        if not is_auto or highest == 1 < versions_per_round:  # otherwise "auto" still has several factors
            change = "is 'auto' and stays" if is_auto else f"is lowered from {factor} to"
            logger.warning(
                f"over_provisioning {change} {highest}{', which is synchronous training' * (highest == 1)}: a "
                f"generation batch is trained for {versions_per_round} optimizer steps, so with "
                f"max_staleness={self.max_staleness} a group can wait {highest - 1} rounds. Set max_staleness to "
                f"{math.ceil(factor - 1) * versions_per_round} or more for a factor of {factor:g}; None, or null in "
                "YAML, lifts the bound."
            )
        return highest

    def oldest_trained(self, version: int) -> int | None:
        """Return the oldest policy version whose tokens stay in the loss at `version`, or `None` if all stay."""
        masks = self.staleness_policy == "mask" and self.max_staleness is not None
        return version - self.max_staleness if masks else None


@dataclass
class APRILGRPOConfig(AprilOptions, GRPOConfig):
    r"""
    Configuration class for the [`APRILGRPOTrainer`].

    This class includes only the parameters that are specific to APRIL (Active Partial Rollouts, arXiv 2509.18521). For
    all other parameters, please refer to [`~trl.GRPOConfig`]. Four defaults differ:

    - `use_vllm=None`: APRIL uses vLLM. If stock GRPO runs instead, TRL's default applies, or `True` if the address of
      a server is given.
    - `vllm_mode=None`: uses the server whose address is given (`vllm_server_base_url`, `vllm_server_host` or
      `vllm_server_port`), or else a server that the trainer starts. `"server"` always uses the given server, and
      `"colocate"` always the trainer's server, to which TRL's `vllm_gpu_memory_utilization`,
      `vllm_tensor_parallel_size`, `vllm_max_model_length` and `vllm_model_impl` apply.
    - `bf16=False` on a machine without a GPU, where TRL's default raises an error. With `use_cpu=True` it raises none,
      and applies.
    - `vllm_importance_sampling_mode=None`: `"token_truncate"`, or TRL's default if stock GRPO runs. TRL's
      `"sequence_mask"` exponentiates the log-ratio summed over the sequence, and would mask out the long samples of
      several policy versions that APRIL keeps.

    `vllm_server_base_url` takes the addresses of several servers, as a list or as comma-separated text. It is read
    again before every weight sync, so servers can be added and removed during training.

    `loss_type="gspo"` is accepted in addition to TRL's loss types and stands for TRL's `"grpo"` with
    `importance_sampling_level="sequence"` and the clip range of the GSPO paper
    (https://huggingface.co/papers/2507.18071), `epsilon=3e-4` and `epsilon_high=4e-4`, unless they were set. TRL's
    default `epsilon` of 0.2 counts as not set; with any other value, `epsilon_high` follows `epsilon` as in TRL.
    `loss_type="dapo"` sets only the aggregation, as in TRL; `trl-april grpo --recipe dapo` adds the rest of DAPO.

    Parameters:
        over_provisioning (`float` or `str`, *optional*):
            Ratio of the prompt groups in flight to the groups of a batch (N'/N in the paper), at least 1.0. 1.0 is
            synchronous GRPO through the same code. Defaults to 3.0, or to 6.0 with `tools`, `environment_factory` or
            `rollout`, since a sample has no request on the server while these run. Under `staleness_policy="wait"`,
            the factor is at most `max_staleness + 1`. With several optimizer steps per batch, it is at most
            `max_staleness // steps + 1`, and a higher factor is lowered with a warning. `"auto"` starts with 3.0,
            raises the factor while the servers decode faster with more groups in flight, and lowers it while requests
            wait for memory. It respects `max_staleness` and never exceeds 8. `april/over_provisioning` logs the factor
            of each round.
        max_staleness (`int` or `None`, *optional*, defaults to `8`):
            Bound on the age of a trained token, in policy versions (optimizer steps): version at training minus
            version at sampling. `None` lifts the bound. The paper observed at most 5.
        staleness_policy (`str`, *optional*, defaults to `"wait"`):
            What happens at the bound. `"wait"` guarantees it: the round stays open for groups that are due. `"mask"`
            removes older tokens from the loss, while the sample's reward stays in the group's baseline. `"ignore"`
            trains older tokens and counts them in the logs.
        resume_kv (`str`, *optional*, defaults to `"auto"`):
            The KV cache that a resumed sample continues on. `"auto"` is `"keep"` with `overlap_generation`, and
            `"reuse"` without. `"recompute"`: the server recomputes the cache with the current weights. `"reuse"`: the
            sample finds the blocks of its earlier segments in the server's prefix cache, which is then not reset. This
            saves the prefill, but the next tokens are sampled from a mixture of policies. The log-probabilities of
            this mixture are recorded, so the correction covers it. A new sample never finds blocks of older weights.
            `"keep"`, with `overlap_generation`: requests are not aborted for a weight sync. The server is paused, and
            the requests continue with the new weights; the server reports where in each request the version changes.
            `"keep"` needs a server started by `trl-april serve`. On any other server, requests are aborted as with
            `"reuse"`, with a warning.
        overlap_generation (`bool` or `str`, *optional*, defaults to `"auto"`):
            Whether unfinished requests continue while the trainer scores and optimizes, together with the requests of
            the next batch. Tokens become about one policy version older. `"auto"` is `True` unless `over_provisioning`
            is 1.0 or `max_staleness` is 0, which ask for synchronous training. The schedule of the paper is
            `overlap_generation=False, resume_kv="recompute"`.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Whether groups with equal rewards are rejected and replaced while the round runs, as in DAPO
            (https://huggingface.co/papers/2503.14476, section 3.2). Each group is then scored as soon as it is
            finished, during generation.
        score_during_generation (`bool`, *optional*, defaults to `False`):
            Whether each group is scored as soon as it is finished, as with `dynamic_sampling`, while other groups are
            generated; with `overlap_generation`, also while a batch is trained (except by reward models). Slow rewards
            (tests, judges) then take no extra time. Off by default, because reward functions are called in a thread
            and with a part of the batch: a function that compares all completions of a batch, or is not thread-safe,
            would behave differently than in [`~trl.GRPOTrainer`].
        max_rejected_groups_per_round (`int`, *optional*):
            Number of rejected groups after which a round stops replacing them and fills the batch with rejected
            groups, oldest first. At least the groups of a batch; by default ten times as many.
        dppo_threshold (`float`, *optional*):
            Trust region of DPPO (https://huggingface.co/papers/2602.04879, Binary-TV): a token is removed from the
            loss if, since it was sampled, its probability has moved by more than this threshold in the direction that
            its advantage reinforces. The paper's value is 0.15. Applies in addition to
            `vllm_importance_sampling_mode`, in every update of a batch; `april/correction/dppo_masked_fraction` logs
            the share. Useful if the trainer warns that the policy moves too fast for old tokens.
        weight_sync (`str`, *optional*, defaults to `"auto"`):
            How weights travel to the server: `"adapter"` (only the LoRA adapter, in files, to a server started with
            `--enable-lora`; running requests keep their adapter), `"nccl"` (TRL's transport; RCCL on AMD), `"ipc"`
            (memory that trainer and server share on the same GPU, or on the CPUs of the same host), `"filesystem"`
            (any device), or `"auto"`, which sends only the adapter if possible, and otherwise uses NCCL if trainer and
            server have separate GPUs and the server was started for NCCL, IPC on a shared GPU, and files elsewhere or
            if NCCL or IPC fails.
        weight_sync_dir (`str`, *optional*):
            Existing folder for the file-system sync, visible to the server under the same path. Defaults to shared
            memory of this host.
        stream_interval (`int`, *optional*, defaults to `64`):
            Tokens per streamed chunk, and thus the most tokens that a sample can lose if the server crashes.
        save_on_signal (`bool`, *optional*):
            Whether Ctrl-C and SIGTERM (a preemption) write a checkpoint before training stops: immediately in the
            middle of a round, otherwise at the end of the optimizer step. A second signal stops at once. By default,
            they do unless `save_strategy="no"`.
        tool_timeout (`float`, *optional*):
            Seconds after which a tool call returns an error result, as after an exception, and counts as a failure.
            Its thread is abandoned, or its coroutine canceled. Also limits `reset` of an environment, after which
            another instance is reset, and `_april_restore`. With `rollout`, limits the time between two turns, after
            which the sample ends with `None` in its columns. No limit by default.
        replay_environments (`bool`, *optional*, defaults to `False`):
            Whether an environment without `_april_state` is rebuilt when training resumes: it is reset, and the
            recorded calls of its sample are repeated. If a result differs, the sample starts over, as it does by
            default.

    Raises:
        ConfigError: If a value is out of range. It is a `ValueError`.
    """

    # Changed defaults and meanings; the class docstring gives the reasons.
    use_vllm: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to use vLLM for generating completions. If `False`, training runs as stock GRPO. By "
            "default APRIL uses it, and stock GRPO only if the address of a server is given."
        },
    )
    vllm_mode: str | None = field(
        default=None,
        metadata={
            "help": "`'server'`: your vLLM server. `'colocate'`: a server that the trainer starts. By default the "
            "former if its address is given."
        },
    )
    vllm_server_base_url: str | None = field(
        default=None,
        metadata={
            "help": "Address of the vLLM server, such as 'http://localhost:8000', or of several, with commas between "
            "them. If given, `vllm_server_host` and `vllm_server_port` are ignored."
        },
    )
    vllm_importance_sampling_mode: str | None = field(
        default=None,
        metadata={
            "help": "Importance sampling correction for tokens sampled under other weights: 'token_truncate', "
            "'token_mask', 'sequence_truncate' or 'sequence_mask'. By default the first; see `GRPOConfig`."
        },
    )

    def __post_init__(self) -> None:
        AprilOptions.__post_init__(self)
        given = self.vllm_server_base_url
        if given is not None and (not isinstance(given, str) or "," in given):
            self.vllm_server_base_url = ",".join(server_addresses(given))  # TRL's option is text
        if self.bf16 is None and not self.use_cpu and not torch.accelerator.is_available():
            self.bf16 = False
        if self.vllm_mode == "colocate" and (address := given_address(self)):
            raise ConfigError(
                f"vllm_mode is 'colocate', for which the trainer starts a server, but {address} gives the address of "
                "another. Omit either."
            )
        mode = self.vllm_importance_sampling_mode
        self.vllm_importance_sampling_mode = correction_mode(self)  # TRL checks the bounds that it needs
        GRPOConfig.__post_init__(self)
        self.vllm_importance_sampling_mode = mode
        for name, value in (("vllm_importance_sampling_correction", False), ("loss_type", "vespo")):
            if self.dppo_threshold is not None and getattr(self, name) == value:
                raise ConfigError(
                    f"dppo_threshold={self.dppo_threshold} masks tokens by their weight in the loss, which they do "
                    f"not have with {name}={value!r}. Change {name}, or omit dppo_threshold."
                )


def _describe(options: type[AprilOptions]) -> None:
    """Copy each option's description from the docstring to the field's help, which HfArgumentParser shows."""
    parameters = (options.__doc__ or "").partition("Parameters:")[2].partition("Raises:")[0]
    names_and_texts = re.split(r"\n {8}(\w+) \(.*\):\n", parameters)[1:]
    for name, text in zip(names_and_texts[::2], names_and_texts[1::2], strict=True):
        options.__dataclass_fields__[name].metadata = MappingProxyType({"help": " ".join(text.split())})


_describe(APRILGRPOConfig)

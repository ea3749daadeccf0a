"""APRIL's options: the fields that TRL lacks, and the few TRL defaults that partial rollouts change."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from .errors import ConfigError
from .staleness import check_bound, factor_of


WEIGHT_SYNCS = ("auto", "nccl", "filesystem")
RESUME_KV = ("recompute", "reuse", "keep")


@dataclass
class APRILGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`APRILGRPOTrainer`].

    This class includes only the parameters that are specific to APRIL (Active Partial Rollouts, arXiv 2509.18521). For
    all others please refer to [`~trl.GRPOConfig`]. Three of its defaults differ:

    - `use_vllm=True` and `vllm_mode="server"`: APRIL works on a vLLM server.
    - `vllm_importance_sampling_mode="token_truncate"`: TRL's default, `"sequence_mask"`, exponentiates the log-ratio
      summed over the sequence, and so would mask out just those long samples of several policy versions that APRIL
      keeps.

    `loss_type="gspo"` is accepted beside all of TRL's loss types. It stands for TRL's `"grpo"` with
    `importance_sampling_level="sequence"` and the clip range of the GSPO paper
    (https://huggingface.co/papers/2507.18071), `epsilon=3e-4` and `epsilon_high=4e-4`, each if it was not
    set. An `epsilon` of 0.2, TRL's default, counts as not set; with another, `epsilon_high` follows it as in TRL.
    `loss_type="dapo"` keeps TRL's meaning, the aggregation; `scripts/recipes/dapo.yaml` spells out the rest of DAPO.

    Parameters:
        over_provisioning (`float` or `str`, *optional*, defaults to `2.0`):
            Prompt groups in flight as a factor of those that a batch needs (N'/N in the paper), at least 1.0. 1.0 is
            synchronous GRPO through the same code. `"auto"` begins with 2.0 and then takes what a model of the rounds
            predicts the most trained tokens per second for, with the completion lengths and the server's speed as
            they were seen so far. It stays within `max_staleness`, and is at most 8. `april/over_provisioning` is what
            a round had, and each change is logged at the level `INFO`.
        max_staleness (`int` or `None`, *optional*, defaults to `5`):
            Bound on the age of a trained token, in policy versions (optimiser steps): version at training minus
            version at sampling. `None` lifts it. The paper observed at most 5.
        staleness_policy (`str`, *optional*, defaults to `"wait"`):
            What happens at the bound. `"wait"`: a guarantee, the round stays open for the groups that fall due.
            `"mask"`: older tokens leave the loss, token by token, while the sample keeps its reward in the group's
            baseline. `"ignore"`: older tokens are trained all the same, and only counted in the logs.
        resume_kv (`str`, *optional*, defaults to `"recompute"`):
            What a resumed sample continues on. `"recompute"`: the KV of its prompt and partial completion is computed
            anew with the present weights. `"reuse"`: it finds the blocks that its earlier segments have left in the
            prefix cache of the server, which is not reset any more. That spares the prefill, and the tokens that
            follow are sampled from a mixture of policies; their recorded log-probabilities are those of that mixture,
            so the correction is as exact as before. A sample that is asked for the first time never finds blocks of
            older weights. `"keep"`, with `overlap_generation`: the same mixture, and nothing is cut and resumed
            unless the server is full. For a weight sync it is paused, and its requests go on in their place with the
            new weights; where in each of them the policy version changes, the server is asked. Such a server is
            started by `trl-april serve`; on another one requests are cut as with `"reuse"`, which is said in a
            warning.
        overlap_generation (`bool`, *optional*, defaults to `False`):
            Whether requests that are not finished when the quota is met go on while the trainer scores and optimises,
            together with those of the next batch, and are cut only for the weight sync. What they finish meanwhile
            counts for the next round. Tokens are about a policy version older for it.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Whether groups whose rewards are all equal are rejected and replaced by others while the round runs, as in
            DAPO (https://huggingface.co/papers/2503.14476, section 3.2). Each group is then scored as soon as it is
            finished, beside the generation of the others.
        max_rejected_groups_per_round (`int`, *optional*):
            Rejected groups at which a round is given up and filled with them, oldest first. At least the groups of a
            batch; by default ten times as many.
        weight_sync (`str`, *optional*, defaults to `"auto"`):
            How weights travel to the server: `"nccl"` (TRL's own, RCCL on AMD), `"filesystem"` (any device; also
            trainer and server on one GPU), or `"auto"`, which takes NCCL where each has a GPU of its own and the
            server was started for it.
        weight_sync_dir (`str`, *optional*):
            Existing folder that the file-system sync writes to, visible to the server under the same path. Defaults to
            shared memory of this host.
        stream_interval (`int`, *optional*, defaults to `64`):
            Tokens per streamed chunk: what a crash of the server can cost per sample.
        save_on_signal (`bool`, *optional*, defaults to `False`):
            Whether Ctrl-C and SIGTERM (a preemption) write a checkpoint before training ends: in the middle of a round
            at once, with everything that has been generated, otherwise at the end of the optimiser step. A second one
            leaves at once.
        max_parked_tokens (`int`, *optional*):
            Bound on the completion tokens that each process keeps from one round to the next, at 8 bytes each. At the
            bound nothing is dropped: the groups that the batch does not need wait. By default there is none.

    Raises:
        ConfigError: If a value is out of its range. It is a `ValueError`.
    """

    # Not `None`: with it in the type HfArgumentParser takes text, and without it numbers only.
    over_provisioning: float | str | None = field(
        default=2.0,
        metadata={
            "help": "Prompt groups in flight as a factor of those that a batch needs, at least 1.0. 1.0 is "
            "synchronous GRPO through the same code. `'auto'` chooses it while training runs."
        },
    )
    max_staleness: int | None = field(
        default=5,
        metadata={
            "help": "Bound on the age of a trained token, in policy versions (version at training minus version at "
            "sampling). `None` lifts it."
        },
    )
    staleness_policy: str = field(
        default="wait",
        metadata={
            "help": "What happens at `max_staleness`. `'wait'`: a guarantee, the round stays open for the groups that "
            "fall due. `'mask'`: older tokens leave the loss. `'ignore'`: older tokens are trained and only counted."
        },
    )
    resume_kv: str = field(
        default="recompute",
        metadata={
            "help": "What a resumed sample continues on: `'recompute'`, its KV is computed anew with the present "
            "weights; `'reuse'`, it finds the blocks of its earlier segments in the server's prefix cache; or "
            "`'keep'`, with `overlap_generation`, requests go on through a weight sync and need not be resumed."
        },
    )
    overlap_generation: bool = field(
        default=False,
        metadata={
            "help": "Whether requests go on while the trainer scores and optimises, and are cut only for the weight "
            "sync."
        },
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "help": "Whether groups whose rewards are all equal are rejected and replaced by others while the round "
            "runs (DAPO)."
        },
    )
    max_rejected_groups_per_round: int | None = field(
        default=None,
        metadata={
            "help": "Rejected groups at which a round is given up and filled with them. At least the groups of a "
            "batch; by default ten times as many."
        },
    )
    weight_sync: str = field(
        default="auto",
        metadata={
            "help": "How weights travel to the server: `'nccl'`, `'filesystem'`, or `'auto'`, which takes NCCL where "
            "trainer and server both have a GPU and the server was started for it."
        },
    )
    weight_sync_dir: str | None = field(
        default=None,
        metadata={
            "help": "Existing folder that the file-system sync writes to, visible to the server under the same path. "
            "Defaults to shared memory of this host."
        },
    )
    stream_interval: int = field(
        default=64,
        metadata={"help": "Tokens per streamed chunk: what a crash of the server can cost per sample."},
    )

    save_on_signal: bool = field(
        default=False,
        metadata={
            "help": "Whether Ctrl-C and SIGTERM write a checkpoint before training ends, partial samples included. A "
            "second one leaves at once."
        },
    )
    max_parked_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Bound on the completion tokens that each process keeps from one round to the next. At the bound "
            "the groups that the batch does not need wait; nothing is dropped."
        },
    )

    # Changed defaults; the class docstring says why.
    use_vllm: bool = field(
        default=True,
        metadata={"help": "Whether to use vLLM for generating completions. APRIL is on in server mode only."},
    )
    vllm_mode: str = field(
        default="server",
        metadata={
            "help": "`'server'`: APRIL, on a separate vLLM server (start one with `trl-april serve`). `'colocate'`: "
            "stock GRPO with vLLM in the same process."
        },
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={
            "help": "Importance sampling correction for tokens sampled under other weights: 'token_truncate', "
            "'token_mask', 'sequence_truncate' or 'sequence_mask'. See `GRPOConfig`."
        },
    )

    def __post_init__(self) -> None:
        self.over_provisioning = AprilOptions.of(self).over_provisioning  # a number, where it was one in text
        super().__post_init__()


@dataclass(frozen=True, slots=True)
class AprilOptions:
    """APRIL's own options, checked; also for a stock [`~trl.GRPOConfig`], which has none of them."""

    over_provisioning: float | str = 2.0
    max_staleness: int | None = 5
    staleness_policy: str = "wait"
    resume_kv: str = "recompute"
    overlap_generation: bool = False
    dynamic_sampling: bool = False
    max_rejected_groups_per_round: int | None = None
    weight_sync: str = "auto"
    weight_sync_dir: str | None = None
    stream_interval: int = 64
    save_on_signal: bool = False
    max_parked_tokens: int | None = None

    @classmethod
    def of(cls, args: GRPOConfig) -> AprilOptions:
        """The options of an [`APRILGRPOConfig`], or the defaults for any other config."""
        if not isinstance(args, APRILGRPOConfig):
            return cls()
        values: dict[str, Any] = {option.name: getattr(args, option.name) for option in fields(cls)}
        return cls(**values)

    def __post_init__(self) -> None:
        factor = factor_of(self.over_provisioning)
        object.__setattr__(self, "over_provisioning", factor)  # as a frozen dataclass has to
        # "auto" keeps to whatever bound there is.
        check_bound(1.0 if isinstance(factor, str) else factor, self.max_staleness, self.staleness_policy)
        if self.max_rejected_groups_per_round is not None and self.max_rejected_groups_per_round < 1:
            raise ConfigError(
                f"max_rejected_groups_per_round is {self.max_rejected_groups_per_round}; it must be at least the "
                "groups of a batch (generation_batch_size / num_generations). Leave it out for ten times as many."
            )
        if self.weight_sync not in WEIGHT_SYNCS:
            raise ConfigError(f"weight_sync is {self.weight_sync!r}; it must be one of {', '.join(WEIGHT_SYNCS)}.")
        if self.resume_kv not in RESUME_KV:
            raise ConfigError(f"resume_kv is {self.resume_kv!r}; it must be one of {', '.join(RESUME_KV)}.")
        if self.resume_kv == "keep" and not self.overlap_generation:
            raise ConfigError(
                "resume_kv='keep' lets requests go on through the weight sync, but without overlap_generation none "
                "runs by then. Set overlap_generation=True, or resume_kv='reuse'."
            )
        if self.max_parked_tokens is not None and self.max_parked_tokens < 0:
            raise ConfigError(
                f"max_parked_tokens is {self.max_parked_tokens}; it counts tokens and cannot be negative. Leave it "
                "out for no bound."
            )
        if self.stream_interval < 1:
            raise ConfigError(f"stream_interval is {self.stream_interval}; it counts tokens and must be at least 1.")

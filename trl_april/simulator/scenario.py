"""What is simulated: the workload, the servers and the trainer, the same for every configuration that is compared.

The invariant owned here: no scenario passes that cannot be simulated. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import ConfigError
from ..staleness import check_bound
from .lengths import Lengths
from .step_time import StepTime


UNITS = 1024  # of the longest completion, at most


@dataclass(frozen=True, slots=True)
class Scenario:
    """The workload, the servers and the trainer.

    Args:
        step_time ([`StepTime`]):
            How long the steps of a server take.
        lengths ([`Lengths`]):
            How long completions are.
        group_correlation (`float`, *optional*, defaults to `0.0`):
            Correlation of the (normal scores of the) lengths in a group: 0 if the prompt says nothing of the length,
            1 if all samples of a prompt are equally long.
        quota (`int`, *optional*, defaults to `8`):
            Groups of a batch.
        group_size (`int`, *optional*, defaults to `4`):
            Samples of a group.
        prompt_tokens (`int`, *optional*, defaults to `16`):
            Tokens of a prompt.
        servers (`int`, *optional*, defaults to `1`):
            Inference servers, all alike.
        processes (`int`, *optional*, defaults to `1`):
            Trainer processes, each of which sends the requests of its share of the groups.
        max_sequences (`int`, *optional*, defaults to `256`):
            Sequences that a server decodes at once (vLLM's `--max-num-seqs`).
        max_batched_tokens (`int`, *optional*, defaults to `2048`):
            Tokens of one step of a server (vLLM's `--max-num-batched-tokens`).
        kv_block (`int`, *optional*, defaults to `16`):
            Tokens of a block of the prefix cache (128 on a CPU).
        request_seconds (`float`, *optional*, defaults to `0.0005`):
            What a process takes to send one request, before the next.
        request_stall_seconds (`float`, *optional*, defaults to `0.0`):
            What a request takes from the steps of the server, beside its prefill: nothing where the engine has devices
            of its own, and about `request_seconds` where it shares its cores with clients and API server.
        abort_seconds (`float`, *optional*, defaults to `0.02`):
            From the abort until the last stream has ended. Generation goes on for the first half of it.
        train_seconds (`float`, *optional*, defaults to `0.0`):
            Training on a batch.
        sync_seconds (`float`, *optional*, defaults to `0.0`):
            Weight sync after it, as long as nothing is generated for it.
        updates_per_batch (`int`, *optional*, defaults to `1`):
            Optimiser steps that a batch is trained for: policy versions from one round to the next.
        max_staleness (`int`, *optional*, defaults to `5`):
            Bound that the pool guarantees, in policy versions. `None` lifts it.
        warmup (`int`, *optional*, defaults to `4`):
            Rounds that are not measured, until the pool has settled.
        rounds (`int`, *optional*, defaults to `8`):
            Rounds that are.
        seed (`int`, *optional*, defaults to `0`):
            Of the lengths.
        quantum (`int`, *optional*):
            Real tokens that the pool counts as one, so that large runs fit into memory. Times, throughput and lengths
            stay exact; staleness and carried share are rounded to it. By default as many as give the longest
            completion at most 1024 units.

    Raises:
        ConfigError: If one is out of range.
    """

    step_time: StepTime
    lengths: Lengths
    group_correlation: float = 0.0
    quota: int = 8
    group_size: int = 4
    prompt_tokens: int = 16
    servers: int = 1
    processes: int = 1
    max_sequences: int = 256
    max_batched_tokens: int = 2048
    kv_block: int = 16
    request_seconds: float = 0.0005
    request_stall_seconds: float = 0.0
    abort_seconds: float = 0.02
    train_seconds: float = 0.0
    sync_seconds: float = 0.0
    updates_per_batch: int = 1
    max_staleness: int | None = 5
    warmup: int = 4
    rounds: int = 8
    seed: int = 0
    quantum: int = 0

    def __post_init__(self) -> None:
        least = dict.fromkeys(
            (
                "quota", "group_size", "prompt_tokens", "servers", "processes", "max_sequences",
                "max_batched_tokens", "kv_block", "updates_per_batch", "rounds",
            ),
            1,
        )  # fmt: skip
        seconds = ("request_seconds", "request_stall_seconds", "abort_seconds", "train_seconds", "sync_seconds")
        least |= dict.fromkeys(("warmup", *seconds), 0)
        for name, bound in least.items():
            value = getattr(self, name)
            if not bound <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be at least {bound}, and finite.")
        if not 0 <= self.group_correlation <= 1:
            raise ConfigError(f"group_correlation is {self.group_correlation}; it must be between 0 and 1.")
        check_bound(1.0, self.max_staleness, "wait", self.updates_per_batch)
        if self.quantum < 0:
            raise ConfigError(f"quantum is {self.quantum}; it must be at least 1 token, or 0 to have it chosen.")
        if not self.quantum:
            object.__setattr__(self, "quantum", max(1, math.ceil(self.lengths.longest / UNITS)))

    def units(self, tokens: int) -> int:
        """So many tokens as the pool counts them, rounded up."""
        return math.ceil(tokens / self.quantum)

    def described(self) -> dict[str, object]:
        """The settings as plain data, lengths and step times as text."""
        return {
            field.name: value if isinstance(value, (int, float)) or value is None else str(value)
            for field in fields(self)
            for value in [getattr(self, field.name)]
        }

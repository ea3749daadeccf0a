"""What is compared, and what it came to.

The invariant owned here: figures follow from sums that were measured together. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """What becomes of the groups that a batch does not wait for.

    - `synchronous`: there are none; every round waits for its longest completion.
    - `abort`: they are cut, kept, and resumed in the next round, from a new prefill.
    - `reuse`: the same, but a resumed sample finds its keys and values in the server's cache.
    - `overlap`: they go on while the trainer trains, and are cut for the weight sync only.
    - `both`: overlap and reuse.
    - `keep`: overlap, and nothing is cut: servers stand still for the weight sync, with their requests in place.
    - `discard`: they are thrown away: the baseline that needs no pool. Its completions are the shorter ones.
    - `uninterrupted`: they are never cut, and neither training nor weight sync takes any time: the limit.
    """

    SYNCHRONOUS = "synchronous"
    ABORT = "abort"
    REUSE = "reuse"
    OVERLAP = "overlap"
    BOTH = "both"
    KEEP = "keep"
    DISCARD = "discard"
    UNINTERRUPTED = "uninterrupted"

    @property
    def reuses_kv(self) -> bool:
        return self in (Mode.REUSE, Mode.BOTH, Mode.KEEP)

    @property
    def resume_kv(self) -> str:
        """The setting of APRILGRPOConfig."""
        return "keep" if self is Mode.KEEP else "reuse" if self.reuses_kv else "recompute"

    @property
    def overlaps(self) -> bool:
        return self in (Mode.OVERLAP, Mode.BOTH, Mode.KEEP)

    @property
    def can_be_trained(self) -> bool:
        """Whether there are settings of APRILGRPOConfig for it."""
        return self not in (Mode.DISCARD, Mode.UNINTERRUPTED)


@dataclass(slots=True)
class Result:
    """What a configuration took, in the rounds that are measured.

    Args:
        mode (`Mode`):
            What became of the groups that a batch did not wait for.
        factor (`float`):
            Over-provisioning. Where it was chosen, the mean over the rounds.
        is_chosen (`bool`):
            Whether it was chosen while training ran, by `over_provisioning="auto"`.
        seconds (`float`):
            Simulated time, training and weight sync included.
        rollout_seconds (`float`):
            The part of it in which the trainer waited for rollouts.
        groups (`int`):
            Trained groups.
        trained_tokens (`int`):
            Their tokens.
        generated_tokens (`int`):
            Tokens that the servers generated in that time.
        idle (`float`):
            Share of the servers' time without a step.
        bubble (`float`):
            Share of the servers' capacity left unused: 1 minus what they generated, as a part of what they generate in
            that time at their best number of sequences.
        ages (`dict[int, float]`):
            Trained tokens by staleness, in units of the scenario's quantum.
        carried (`float`):
            Share of the trained tokens that were generated in an earlier round.
    """

    mode: Mode
    factor: float
    is_chosen: bool = False
    seconds: float = 0.0
    rollout_seconds: float = 0.0
    groups: int = 0
    trained_tokens: int = 0
    generated_tokens: int = 0
    idle: float = 0.0
    bubble: float = 0.0
    ages: dict[int, float] = field(default_factory=dict)
    carried: float = 0.0

    @property
    def trained_per_second(self) -> float:
        """Trained tokens per second of everything."""
        return self.trained_tokens / self.seconds

    @property
    def trained_per_rollout_second(self) -> float:
        """Trained tokens per second of rollout, as benchmarks/rollout.py measures it."""
        return self.trained_tokens / self.rollout_seconds if self.rollout_seconds else math.inf

    @property
    def generated_per_second(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def groups_per_second(self) -> float:
        return self.groups / self.seconds

    @property
    def staleness_mean(self) -> float:
        tokens = sum(self.ages.values())
        return sum(age * number for age, number in self.ages.items()) / tokens if tokens else 0.0

    @property
    def staleness_max(self) -> int:
        return max(self.ages, default=0)

    @property
    def staleness(self) -> dict[int, float]:
        """Share of the trained tokens by their staleness."""
        tokens = sum(self.ages.values())
        return {age: self.ages[age] / tokens for age in sorted(self.ages)}

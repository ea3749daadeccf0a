"""Run logs of simulated rounds of a real pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.simulated_rounds import Lengths, SimulatedRounds, bent, lognormal
from trl_april.pool.pool import Pool
from trl_april.rollout.record import Round
from trl_april.training.batch import round_metrics
from trl_april.training.run_log import RunLog


MAX_STALENESS = 5
SYNC_SECONDS = 0.05


class WrittenRun:
    """A training run on a simulated clock, whose `output_dir` is `folder`. `options` are added to the `run` line."""

    def __init__(
        self,
        folder: Path,
        factor: float = 2.0,
        *,
        lengths: Lengths | None = None,
        quota: int = 8,
        training_seconds: float = 0.3,
        resumed_at: int | None = None,
        reward: Callable[[int], float] = lambda step: 0.9 - 0.6 / (1 + step / 8),
        **options: object,
    ) -> None:
        self.now = 1000.0
        self.pool = Pool(quota, over_provisioning=factor, max_staleness=MAX_STALENESS)
        self.rounds = SimulatedRounds(self.pool, lengths or lognormal(1.0), bent)
        self.rounds.version = resumed_at or 0
        self.training_seconds, self.reward = training_seconds, reward
        run = {
            "over_provisioning": factor, "max_staleness": MAX_STALENESS, "staleness_policy": "wait",
            "overlap_generation": False, "resume_kv": "recompute", "dynamic_sampling": False, "quota": quota,
            "group_size": 4, "max_completion_length": 1000, "versions_per_round": 1, **options,
        }  # fmt: skip
        self.log = RunLog(folder, run, resumed_at_step=resumed_at, clock=lambda: self.now)

    def go(self, count: int = 20) -> WrittenRun:
        """Write rounds of one optimizer step each, and return self."""
        for _ in range(count):
            self.step()
        return self

    def step(self) -> Round:
        """Write one round and its optimizer step."""
        log = self.log
        log.step_began()
        log.round_began()
        with log.timing("sync"):
            self.now += SYNC_SECONDS
        done = self.rounds.run_round()
        done.started = self.now
        done.in_flight = in_flight([ended for ended, _, _ in self.rounds.requests])
        done.launched_lengths = [before + tokens for _, before, tokens in self.rounds.requests]
        samples = [sample for group in done.groups for sample in group.samples]
        done.carried_tokens = sum(s.length for one in samples for s in one.segments if s.version < done.version)
        done.abort_seconds = min(done.seconds, 0.01)
        self.now += done.seconds
        metrics = round_metrics(done, self.pool, sync_seconds=SYNC_SECONDS, max_staleness=MAX_STALENESS)
        log.note(metrics)
        with log.timing("scoring"):
            self.now += 0.005
            with log.timing("reward_calls"):
                self.now += 0.015
        log.note(corrections(done))
        reward = self.reward(done.version)
        log.add_round(done, {"reward": reward, "reward_std": 0.2, "rewards/right/mean": reward})
        self.now += self.training_seconds
        log.step_ended(done.version + 1)
        self.now += 0.03  # neither round nor step
        return done


def in_flight(ends: list[float]) -> list[tuple[float, int]]:
    """Requests in flight, which all start at 0, at every change."""
    return [(0.0, len(ends)), *((end, len(ends) - place - 1) for place, end in enumerate(sorted(ends)))]


def corrections(done: Round) -> dict[str, float]:
    """Effective sample sizes that decrease with the age."""
    ages = {done.version - s.version for group in done.groups for sample in group.samples for s in sample.segments}
    names = {("age_0", "age_1", "age_2", "age_3+")[min(age, 3)]: age for age in sorted(ages, reverse=True)}
    return {
        f"correction/{name}/effective_sample_size": 1 / (1 + 0.05 * age + 0.002 * done.version * age)
        for name, age in names.items()
    } | {"correction/length_q1/effective_sample_size": 0.9}

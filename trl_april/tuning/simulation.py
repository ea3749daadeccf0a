"""Simulation of a configuration: the pool and the round driver of training, with simulated servers and clock.

All modes are measured by the same clock over the same number of batches, training and weight sync included.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from ..engine.protocol import GenerationRequest
from ..errors import ConfigError
from ..pool.pool import Pool
from ..pool.staleness import AUTO, factor_of
from ..rollout.driver import RolloutDriver
from ..rollout.loop import NewGroup, RoundLoop, RoundSteps
from ..rollout.record import Round
from .admission_control import AdmissionControl
from .scenario import Scenario
from .simulated_clock import simulate
from .simulated_server import SimulatedEngine


RUN_ID = "simulated"


class Mode(StrEnum):
    """How unfinished groups are handled when a batch is complete.

    - `synchronous`: there are none, since every round waits for its longest completion.
    - `abort`: they are aborted, kept, and resumed in the next round, with a new prefill.
    - `reuse`: as `abort`, but a resumed sample finds its keys and values in the server's cache.
    - `overlap`: they continue while the trainer trains, and are aborted for the weight sync only.
    - `both`: overlap and reuse.
    - `keep`: overlap without aborts: servers pause for the weight sync with their requests in place.
    - `discard`: they are discarded. This baseline without a pool trains on the shorter completions.
    - `uninterrupted`: they are never aborted, and training and weight sync take no time: the upper limit.
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
    def resume_kv(self) -> str:
        """The value of this setting in APRILGRPOConfig."""
        return "keep" if self is Mode.KEEP else "reuse" if self in (Mode.REUSE, Mode.BOTH) else "recompute"

    @property
    def overlaps(self) -> bool:
        """Whether requests continue between the rounds."""
        return self in (Mode.OVERLAP, Mode.BOTH, Mode.KEEP, Mode.UNINTERRUPTED)

    @property
    def can_be_trained(self) -> bool:
        """Whether APRILGRPOConfig has settings for this mode."""
        return self not in (Mode.DISCARD, Mode.UNINTERRUPTED)


@dataclass(slots=True)
class Result:
    """Figures of a configuration over the measured rounds."""

    mode: Mode
    factor: float  # the mean over the rounds, if it was chosen by `over_provisioning="auto"`
    is_chosen: bool = False
    seconds: float = 0.0  # simulated, training and weight sync included
    rollout_seconds: float = 0.0  # in which the trainer waited for rollouts
    groups: int = 0  # trained
    trained_tokens: int = 0
    generated_tokens: int = 0
    bubble: float = 0.0  # unused share of the servers' throughput at their best number of sequences
    ages: Counter[int] = field(default_factory=Counter)  # trained tokens by staleness, in the scenario's quanta
    carried: float = 0.0  # share of the trained tokens that were generated in an earlier round

    @property
    def trained_per_second(self) -> float:
        """Trained tokens per second of wall-clock."""
        return self.trained_tokens / self.seconds

    @property
    def generated_per_second(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def staleness(self) -> dict[int, float]:
        """Share of the trained tokens by staleness."""
        tokens = sum(self.ages.values())
        return {age: self.ages[age] / tokens for age in sorted(self.ages)}

    @property
    def staleness_mean(self) -> float:
        return sum(age * share for age, share in self.staleness.items())

    @property
    def staleness_max(self) -> int:
        return max(self.ages, default=0)


def run(scenario: Scenario, mode: Mode, factor: float | str) -> Result:
    """Simulate a configuration with an over-provisioning factor, or `"auto"` as in training."""
    if factor == AUTO and (mode is Mode.SYNCHRONOUS or not mode.can_be_trained):
        raise ConfigError(f"over_provisioning='auto' is impossible in the mode {mode}. Give a number.")
    simulation = _Simulation(scenario, mode, factor_of(factor))
    # Searching some hundred thousand samples for reference cycles, which they lack, would take half of the time.
    gc.disable()
    try:
        simulate(simulation.simulate())
    finally:
        gc.enable()
    return simulation.result


class _Row(NamedTuple):
    """A row to admit. The pool's prompts have a single token: the engine knows the real prompts."""

    group_id: int
    group_size: int
    longest: int

    def admit_to(self, pool: Pool) -> None:
        pool.admit(self.group_id, {}, [0], num_generations=self.group_size, max_completion_length=self.longest)


class _Simulation(RoundSteps):
    def __init__(self, scenario: Scenario, mode: Mode, factor: float | str) -> None:
        self.scenario, self.mode = scenario, mode
        self._longest = scenario.units(scenario.lengths.longest)
        self._factor = 1.0 if mode is Mode.SYNCHRONOUS or isinstance(factor, str) else factor
        self.engine = SimulatedEngine(scenario)
        self._start_over()
        self._control = AdmissionControl(self.pool) if factor == AUTO else None
        self.result = Result(mode, self._factor, is_chosen=self._control is not None)
        # Modes that leave nothing to the next round need no warm-up, but measure the same rows.
        self._first_round = scenario.warmup if mode in (Mode.SYNCHRONOUS, Mode.DISCARD) else 0
        self._next_id = self._first_round * self.pool.schedule.target
        self._began = 0.0  # when the round opened
        self._measures = False
        self._before = (0.0, 0)  # seconds and tokens before the measurement
        self._factors: list[float] = []
        self._carried = 0
        self._context = 0.0  # of each trained token, summed

    def _start_over(self) -> None:
        """Create an empty pool and its driver."""
        scenario = self.scenario
        self.pool = Pool(
            scenario.quota,
            over_provisioning=self._factor,
            max_staleness=scenario.max_staleness if self.mode.can_be_trained else None,
            versions_per_round=scenario.updates_per_batch,
        )
        self._driver = RolloutDriver(
            self.pool,
            self.engine,
            run_id=RUN_ID,
            idle_timeout=1e9,  # a stream is a single chunk, at its end
            sweep_interval=max(1.0, 2 * scenario.abort_seconds),  # every abort succeeds, so sweeps only cost time
            overlap=self.mode.overlaps,
            resume_kv=self.mode.resume_kv,
        )
        self._loop = RoundLoop(self.pool, self._driver, self, overlap=self.mode.overlaps, keeps=self.mode is Mode.KEEP)

    async def simulate(self) -> None:
        await (self._uninterrupted() if self.mode is Mode.UNINTERRUPTED else self._rounds())
        await self._driver.close()
        await self.engine.close()

    async def _rounds(self) -> None:
        """Run rounds by the same loop as training."""
        scenario = self.scenario
        version = self._first_round * scenario.updates_per_batch
        for _ in range(self._first_round, scenario.warmup + scenario.rounds):
            if self.mode is Mode.DISCARD and len(self.pool):
                for group in self.pool:
                    self.engine.forget(group.group_id)
                await self._driver.close()
                self._start_over()
            await self._loop.run(version)
            await asyncio.sleep(scenario.train_seconds)
            version += scenario.updates_per_batch
            await self._loop.sync(version)
        self._stop_measuring()

    # Steps of the round loop

    async def pause(self, *, keeps_weights: bool) -> bool:
        await self._driver.stop_asking()
        await self.engine.pause()
        return True

    async def load(self) -> None:
        await asyncio.sleep(self.scenario.sync_seconds)

    async def verify(self) -> None:
        if self.mode is Mode.KEEP:
            self.engine.resume()

    def begin(self, version: int) -> None:
        self._start_measuring_at(version / self.scenario.updates_per_batch)
        if self._control is not None:
            self._control.choose()
        self._began = asyncio.get_running_loop().time()

    def next_groups(self, count: int) -> Sequence[NewGroup]:
        return [_Row(group_id, self.scenario.group_size, self._longest) for group_id in self._new_ids(count)]

    def taken(self, done: Round) -> None:
        if self._control is not None:
            self._control.observe(done, [server.gauges for server in self.engine.servers])
        self._count(done, asyncio.get_running_loop().time() - self._began)

    def _count(self, done: Round, seconds: float) -> None:
        if self._measures:
            self.result.rollout_seconds += seconds
            self._factors.append(done.over_provisioning)
            self._carried += done.carried_tokens
            self.result.ages += done.ages
        self._train(group.group_id for group in done.groups)

    async def _uninterrupted(self) -> None:
        """Train every group as soon as it is finished, and start another group."""
        scenario, finished = self.scenario, asyncio.Queue[int]()

        async def generate(request_id: str) -> None:
            async for _ in self.engine.generate(GenerationRequest(request_id, [0], 0, self._longest, RUN_ID)):
                pass

        async def generate_group(group_id: int) -> None:
            names = [f"{RUN_ID}-{group_id}-{index}-0" for index in range(scenario.group_size)]
            await asyncio.gather(*map(generate, names))
            finished.put_nowait(group_id)

        async with asyncio.TaskGroup() as running:
            for group_id in self._new_ids(self.pool.schedule.target):
                running.create_task(generate_group(group_id))
            for trained in range((scenario.warmup + scenario.rounds) * scenario.quota):
                self._start_measuring_at(trained / scenario.quota)
                self._train([await finished.get()])
                running.create_task(generate_group(*self._new_ids(1)))
            self._stop_measuring()
        self.result.rollout_seconds = self.result.seconds
        # Equal lengths finish in waves, so the number of trained groups depends on when the measurement starts.
        self.result.trained_tokens = self.result.generated_tokens

    def _new_ids(self, number: int) -> range:
        self._next_id += number
        return range(self._next_id - number, self._next_id)

    def _train(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            if self._measures:
                self.result.groups += 1
                lengths = self.engine.lengths(group_id)
                self.result.trained_tokens += sum(lengths)
                self._context += sum(length * (self.scenario.prompt_tokens + length / 2) for length in lengths)
            self.engine.forget(group_id)

    def _start_measuring_at(self, round_number: float) -> None:
        if round_number == self.scenario.warmup:
            self._measures = True
            self._before = asyncio.get_running_loop().time(), self.engine.tokens

    def _stop_measuring(self) -> None:
        result, scenario = self.result, self.scenario
        seconds, tokens = self._before
        result.seconds = asyncio.get_running_loop().time() - seconds
        result.generated_tokens = self.engine.tokens - tokens
        context = self._context / max(1, result.trained_tokens)
        peak = scenario.step_time.peak(scenario.max_sequences, context)
        result.bubble = 1 - result.generated_per_second / (scenario.servers * peak)
        if result.ages:
            result.carried = self._carried / sum(result.ages.values())
        if result.is_chosen:
            result.factor = fmean(self._factors)

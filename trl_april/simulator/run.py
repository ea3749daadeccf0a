"""One configuration, simulated: its rounds, and what they took.

The invariant owned here: every mode is measured by the same clock over the same number of batches, from the end of the
last warm-up round to the end of the last round, training and weight sync included.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ..engine import GenerationRequest
from ..pool import Pool
from ..rollout import RolloutDriver
from ..round import Round
from .clock import simulate
from .engine import SimulatedEngine
from .scenario import Scenario


NEVER = 1e9  # seconds of silence that are too many: streams here are one chunk each, at the end
RUN_ID = "simulated"


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
            Over-provisioning.
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


def run(scenario: Scenario, mode: Mode, factor: float) -> Result:
    """Simulate one configuration.

    Args:
        scenario ([`Scenario`]):
            What is common to all of them.
        mode ([`Mode`]):
            What becomes of the groups that a batch does not wait for.
        factor (`float`):
            Over-provisioning: groups in flight as a factor of the quota.

    Raises:
        ConfigError: If the factor is out of range, or not possible under the staleness bound.
    """
    simulation = _Simulation(scenario, mode, factor)
    # Half of the time would go into looking for cycles among some hundred thousand samples, of which there are none.
    collects = gc.isenabled()
    gc.disable()
    try:
        simulate(simulation.run())
    finally:
        if collects:
            gc.enable()
    return simulation.result


class _Simulation:
    """The rounds of one configuration."""

    def __init__(self, scenario: Scenario, mode: Mode, factor: float) -> None:
        self.scenario = scenario
        self.mode = mode
        self.factor = 1.0 if mode is Mode.SYNCHRONOUS else factor
        self.pool = Pool(
            scenario.quota,
            over_provisioning=self.factor,
            # Only what comes out of a pool has an age.
            max_staleness=scenario.max_staleness if mode.can_be_trained else None,
        )
        self.engine = SimulatedEngine(scenario)
        self.result = Result(mode, self.factor)
        # Rounds that leave nothing behind need no warm-up. What is measured are the same rows all the same.
        self._first_round = scenario.warmup if mode in (Mode.SYNCHRONOUS, Mode.DISCARD) else 0
        self._next_id = self._first_round * self.pool.target
        self._carried = 0
        self._context = 0.0  # tokens before it, summed over all trained tokens
        self._measures = False
        self._before: tuple[float, int, float] = (0.0, 0, 0.0)  # time, tokens and busy seconds
        self._finished: asyncio.Queue[int] = asyncio.Queue()  # groups that no pool has

    async def run(self) -> None:
        if self.mode is Mode.DISCARD:
            await self._discarding()
        elif self.mode is Mode.UNINTERRUPTED:
            await self._uninterrupted()
        else:
            await self._pooled()
        await self.engine.close()
        self._end_measurement()

    # Rounds of the pool

    async def _pooled(self) -> None:
        """Rounds by the round driver, as in training."""
        clock = asyncio.get_running_loop().time
        driver = self._driver()
        for version in self._rounds():
            self._begin_measurement_at(version)
            self.pool.begin_round(version)
            self._admit(self.pool.room)
            began = clock()
            if self.mode.overlaps:
                driver.open_round()
            await driver.generate()
            done = driver.take()
            self._count(done, clock() - began)
            if self.mode.overlaps:
                self._admit(self.pool.room_ahead)
                await driver.go_on()
            await asyncio.sleep(self.scenario.train_seconds)
            if self.mode is Mode.KEEP:
                await driver.stop_asking()
                await self.engine.pause()
                await driver.hold(version + 1)
            elif self.mode.overlaps:
                await driver.cut()
            await asyncio.sleep(self.scenario.sync_seconds)
            if self.mode is Mode.KEEP:
                self.engine.resume()
        self._end_measurement()
        await driver.close()

    def _driver(self) -> RolloutDriver:
        """The one place that knows the driver's options."""
        return RolloutDriver(
            self.pool,
            self.engine,
            run_id=RUN_ID,
            idle_timeout=NEVER,
            # Every abort here works at once, so that sweeping again only costs time.
            sweep_interval=max(1.0, 2 * self.scenario.abort_seconds),
            overlap=self.mode.overlaps,
            resume_kv=self.mode.resume_kv,
        )

    def _admit(self, number: int) -> None:
        """Admit that many groups. Their prompt is the engine's business."""
        for group_id in self._new_ids(number):
            self.pool.admit(
                group_id,
                {},
                [0],
                num_generations=self.scenario.group_size,
                max_completion_length=self.scenario.units(self.scenario.lengths.longest),
            )

    def _count(self, done: Round, seconds: float) -> None:
        """Add a round to the measurement, if it is measured."""
        if self._measures:
            self.result.rollout_seconds += seconds
            self._carried += done.carried_tokens
            ages = self.result.ages
            for group in done.groups:
                for sample in group.samples:
                    for segment in sample.segments:
                        age = done.version - segment.version
                        ages[age] = ages.get(age, 0) + segment.length
        self._train(group.group_id for group in done.groups)

    # The two modes without a pool

    async def _discarding(self) -> None:
        """Every round begins with new groups, and what is not finished at its end is thrown away."""
        clock = asyncio.get_running_loop().time
        for version in self._rounds():
            self._begin_measurement_at(version)
            began = clock()
            running = self._start(self.pool.target, version)
            finished = [await self._finished.get() for _ in range(self.scenario.quota)]
            await self._throw_away(running, finished)
            if self._measures:
                self.result.rollout_seconds += clock() - began
                self.result.ages = {0: 1.0}  # all tokens are of the round's own version
            self._train(sorted(finished))
            await asyncio.sleep(self.scenario.train_seconds)
            await asyncio.sleep(self.scenario.sync_seconds)

    async def _uninterrupted(self) -> None:
        """A finished group is trained at once, and another takes its place."""
        clock = asyncio.get_running_loop().time
        scenario = self.scenario
        running = self._start(self.pool.target, 0)
        began = 0.0
        for trained in range((scenario.warmup + scenario.rounds) * scenario.quota):
            if trained == scenario.warmup * scenario.quota:
                began = clock()
                self._begin_measurement_at(scenario.warmup)
            group_id = await self._finished.get()
            self._train([group_id])
            await running.pop(group_id)
            running |= self._start(1, 0)
        self.result.rollout_seconds = clock() - began
        self._end_measurement()
        # Every token is trained at last. Counting finished groups would depend on where in a wave of them it begins.
        self.result.trained_tokens = self.result.generated_tokens
        await self._throw_away(running, [])

    def _start(self, number: int, version: int) -> dict[int, asyncio.Task[None]]:
        """Begin that many groups outside of the pool."""
        return {
            group_id: asyncio.create_task(self._generate_group(group_id, version))
            for group_id in self._new_ids(number)
        }

    async def _throw_away(self, running: dict[int, asyncio.Task[None]], finished: list[int]) -> None:
        """Cut all groups but the finished ones, and forget them."""
        late = running.keys() - set(finished)
        if late:
            await self.engine.abort([name for group_id in sorted(late) for name in self._request_ids(group_id)])
        await asyncio.gather(*running.values())
        for group_id in late:
            self.engine.forget(group_id)
        self._finished = asyncio.Queue()

    async def _generate_group(self, group_id: int, version: int) -> None:
        await asyncio.gather(*(self._generate(name, version) for name in self._request_ids(group_id)))
        self._finished.put_nowait(group_id)

    async def _generate(self, request_id: str, version: int) -> None:
        units = self.scenario.units(self.scenario.lengths.longest)
        async for _ in self.engine.generate(GenerationRequest(request_id, [0], 0, units, f"{RUN_ID}-{version}")):
            pass

    def _request_ids(self, group_id: int) -> list[str]:
        return [f"{RUN_ID}-{group_id}-{index}-0" for index in range(self.scenario.group_size)]

    # What is common

    def _rounds(self) -> range:
        return range(self._first_round, self.scenario.warmup + self.scenario.rounds)

    def _new_ids(self, number: int) -> Iterable[int]:
        first = self._next_id
        self._next_id += number
        return range(first, self._next_id)

    def _train(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            if self._measures:
                self.result.groups += 1
                lengths = self.engine.lengths(group_id)
                self.result.trained_tokens += sum(lengths)
                self._context += sum(length * (self.scenario.prompt_tokens + length / 2) for length in lengths)
            self.engine.forget(group_id)

    def _begin_measurement_at(self, round_number: int) -> None:
        if round_number == self.scenario.warmup:
            self._measures = True
            time = asyncio.get_running_loop().time()
            self._before = (time, self.engine.tokens, self.engine.busy_seconds)

    def _end_measurement(self) -> None:
        if not self._measures:
            return
        self._measures = False
        began, tokens, busy_seconds = self._before
        result, scenario = self.result, self.scenario
        result.seconds = asyncio.get_running_loop().time() - began
        result.generated_tokens = self.engine.tokens - tokens
        server_seconds = result.seconds * scenario.servers
        result.idle = max(0.0, 1 - (self.engine.busy_seconds - busy_seconds) / server_seconds)
        # The context that a token is generated in, as a mean over all of them.
        context = self._context / result.trained_tokens if result.trained_tokens else 0.0
        result.bubble = 1 - result.generated_tokens / (
            server_seconds * scenario.step_time.peak(scenario.max_sequences, context)
        )
        in_units = sum(result.ages.values())
        result.carried = self._carried / in_units if in_units else 0.0

"""One configuration, simulated: its rounds, and what they took.

The invariant owned here: every mode is measured by the same clock over the same number of batches, from the end of the
last warm-up round to the end of the last round, training and weight sync included.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING

from ..engine import GenerationRequest
from ..errors import ConfigError
from ..pool import Pool
from ..rollout import RolloutDriver
from ..round import Round
from ..staleness import AUTO, factor_of
from .clock import simulate
from .engine import SimulatedEngine
from .result import Mode, Result
from .scenario import Scenario


if TYPE_CHECKING:
    from .chosen import ChosenFactor


NEVER = 1e9  # seconds of silence that are too many: streams here are one chunk each, at the end
RUN_ID = "simulated"


def run(scenario: Scenario, mode: Mode, factor: float | str) -> Result:
    """Simulate one configuration.

    Args:
        scenario ([`Scenario`]):
            What is common to all of them.
        mode ([`Mode`]):
            What becomes of the groups that a batch does not wait for.
        factor (`float` or `str`):
            Over-provisioning: groups in flight as a factor of the quota. `"auto"` chooses it as in training.

    Raises:
        ConfigError: If the factor is no number, out of range, or not possible under the staleness bound, or if it is
            `"auto"` in a mode in which training has none to choose.
    """
    if factor == AUTO and (mode is Mode.SYNCHRONOUS or not mode.can_be_trained):
        raise ConfigError(
            f"over_provisioning='auto' is nothing that {mode} has: a factor is chosen in training with APRIL only. "
            "Give a number."
        )
    simulation = _Simulation(scenario, mode, factor_of(factor))
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

    def __init__(self, scenario: Scenario, mode: Mode, factor: float | str) -> None:
        self.scenario = scenario
        self.mode = mode
        fixed = 1.0 if mode is Mode.SYNCHRONOUS or isinstance(factor, str) else factor
        self.pool = Pool(
            scenario.quota,
            over_provisioning=fixed,
            # Only what comes out of a pool has an age.
            max_staleness=scenario.max_staleness if mode.can_be_trained else None,
            versions_per_round=scenario.updates_per_batch,
        )
        self.engine = SimulatedEngine(scenario)
        self._chosen: ChosenFactor | None = None
        if factor == AUTO:
            from .chosen import ChosenFactor  # here, because it needs numpy

            self._chosen = ChosenFactor(self.pool, self.engine, reuses_kv=mode.reuses_kv, overlaps=mode.overlaps)
        self._factors: list[float] = []  # of the rounds that are measured
        self.result = Result(mode, fixed, self._chosen is not None)
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
        for number in self._rounds():
            self._begin_measurement_at(number)
            version = number * self.scenario.updates_per_batch
            self.pool.begin_round(version)
            self._admit(self.pool.room)
            began = clock()
            if self.mode.overlaps:
                driver.open_round()
            await driver.generate()
            done = driver.take()
            if self._chosen is not None:
                self._chosen.observe(done, began)
            self._count(done, clock() - began)
            if self.mode.overlaps:
                self._admit(self.pool.room_ahead)
                await driver.go_on()
            if self._chosen is not None:
                self._chosen.choose()
            await asyncio.sleep(self.scenario.train_seconds)
            if self.mode is Mode.KEEP:
                await driver.stop_asking()
                await self.engine.pause()
                await driver.hold(version + self.scenario.updates_per_batch)
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
            self._factors.append(done.over_provisioning)
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
        if result.is_chosen:
            result.factor = fmean(self._factors)

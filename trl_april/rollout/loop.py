"""The order of steps in a round. Training, evaluation, the simulator, benchmarks and tests all drive this loop.

```
sync -> begin -> agree -> withhold -> admit -> open -> generate -> take -> forget -> dispatch ahead
```

Invariants: every process delivers its part of the same batch; training gets as many rows as it needs, however many
groups are rejected; and the pool changes only on the event loop of the requests, or while that loop is paused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from ..distributed.quota import SharedQuota
from ..errors import RoundSuspended, ServerError
from ..pool.pool import Pool
from ..pool.samples import Group
from .driver import RolloutDriver
from .dynamic_sampling import DynamicSampling
from .record import Round
from .user_code import result_of


logger = logging.getLogger(__name__)

T = TypeVar("T")


class NewGroup(Protocol):
    """A dataset row that is ready to be admitted."""

    def admit_to(self, pool: Pool) -> None:
        """Admit the group, or only its id if another process generates it."""


class RoundSteps(Protocol):
    """The steps of a round that differ between training, evaluation, simulator and tests, in their order.

    Only `next_groups` has no default. The other defaults are for a single process whose loop runs on the event loop of
    its requests. In training, the loop runs in the training thread, where every step blocks; see [`run_blocking`].
    `pause`, `load`, `verify`, `agree`, `highest`, `recover` and `scatter` are collective calls.
    """

    is_main: bool = True  # whether this process is the first

    def paused(self) -> AbstractContextManager[None]:
        """Keep requests and tools from changing the pool."""
        return nullcontext()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the driver on the event loop of the requests."""
        return await work

    # Sync

    oldest_kept: int | None = None  # oldest policy version whose weights the servers keep, so that nothing is paused

    def prepared(self) -> AbstractContextManager[object]:
        """Do the work of a weight sync that needs no paused server, and release its resources at the end."""
        return nullcontext()

    async def pause(self, *, keeps_weights: bool) -> bool:
        """Stop sending requests, and pause the servers unless they keep the weights of running requests.

        Returns whether requests can be held; if not, they are cut.
        """
        return False

    async def load(self) -> None:
        """Load the weights into the servers."""
        return

    async def verify(self) -> None:
        """Verify the weights, and resume the servers."""
        return

    async def route(self, version: int) -> None:
        """Send requests to the servers that hold the weights of the policy version."""
        return

    # Begin, agree, admit

    def begin(self, version: int) -> None:
        """Prepare the pool for a round, before it enters the round."""
        return

    async def agree(self, pool: Pool) -> None:
        """Learn which groups are finished in any process."""
        return

    async def highest(self, value: int) -> int:
        """The highest value of all processes."""
        return value

    def next_groups(self, count: int) -> Sequence[NewGroup]:
        """The groups of the next dataset rows, at most `count` over all processes."""

    def replacements(self, count: int) -> Sequence[NewGroup]:
        """Groups that replace `count` rejected groups, from rows beyond the plan."""
        return ()

    # Generate

    async def generate(self, driver: RolloutDriver) -> None:
        """Run the round until it may close. Raises the same kind of error in all processes that share a quota."""
        await driver.generate()

    async def recover(self, error: ServerError | RoundSuspended, record: Round) -> None:
        """Wait until all processes can continue an interrupted round, or raise."""
        raise error

    # Take, forget

    def taken(self, done: Round) -> None:
        """Record the groups of this process that were taken for training. The pool is paused meanwhile."""
        return

    async def scatter(self, groups: list[Group], batch: Sequence[int]) -> list[Group]:
        """Exchange groups between processes; returns the parts of the batch that this process trains."""
        return groups

    def forget(self, group_ids: Collection[int]) -> None:
        """Release the rows of groups that have left the pools of all processes."""
        return

    def change_rows(self, count: int) -> int:
        """Plan `count` more rows, or drop rows if negative; returns how many dropped rows are already in the pool."""
        return 0


class RoundLoop:
    """Runs the rounds of one process of a training run, one after the other.

    `quota` is shared by several processes. With `overlap`, requests run between the rounds; with `keeps`, they can
    also continue through a weight sync.
    """

    def __init__(
        self,
        pool: Pool,
        driver: RolloutDriver,
        steps: RoundSteps,
        *,
        quota: SharedQuota | None = None,
        dynamic: DynamicSampling | None = None,
        overlap: bool = False,
        keeps: bool = False,
    ) -> None:
        self.pool, self.driver, self.steps = pool, driver, steps
        self._quota, self._dynamic, self._overlap, self._keeps = quota, dynamic, overlap, keeps

    async def sync(self, version: int) -> None:
        """Sync the weights of a policy version between two rounds. A collective call, as are its steps."""
        with self.steps.prepared():
            await self.quiesce(version)
            await self.steps.load()
            await self.steps.verify()
        await self.steps.route(version)

    async def quiesce(self, version: int) -> None:
        """Stop the requests between two rounds, or hold them on paused servers, so that the weights can change.

        Held requests continue with the weights of `version` when their server resumes. If the servers keep earlier
        weights, nothing is paused, and requests stay on the weights that they started with.
        """
        oldest, bound = self.steps.oldest_kept, self.pool.schedule.max_staleness
        if oldest is not None and bound is not None:
            oldest = max(oldest, version - bound)  # further tokens of older weights would be beyond the bound
        if self._keeps and await self.steps.pause(keeps_weights=oldest is not None):
            await self.steps.run(self.driver.hold(version, oldest))
            await self.steps.highest(0)  # no process loads weights before all have held their requests
        else:
            await self.cut()

    async def cut(self) -> None:
        """Abort the requests between two rounds, in all processes. A collective call."""
        if self._overlap:
            await self.steps.run(self.driver.cut())
            await self.steps.highest(0)

    async def run(self, version: int) -> Round:
        """Fill the pool, and generate until a batch is complete. `version` is the policy version of the weights.

        Returns the round with the groups, or parts of groups, that this process trains. Errors that
        [`RoundSteps.recover`] does not recover from are raised in all processes.
        """
        steps, pool = self.steps, self.pool
        with steps.paused():
            await self._open(version)
        done = None
        while done is None:
            interruption: ServerError | RoundSuspended | None = None
            try:
                await steps.generate(self.driver)
            except (ServerError, RoundSuspended) as error:
                interruption = error
            # In one pause: a group that finishes after the agreement is finished in this process only.
            with steps.paused():
                await self._agree()
                if interruption is None and self._may_close:
                    done = self.driver.take()
                    steps.taken(done)
            if interruption is not None:
                assert self.driver.round is not None
                await steps.recover(interruption, self.driver.round)
            if done is None and pool.has_tools:
                with steps.paused():
                    await steps.agree(pool)  # on the groups that tools have finished meanwhile
                    self.driver.open_round()
        batch, rejected = pool.schedule.delivered, list(pool.schedule.rejected)
        done.groups = await steps.scatter(done.groups, batch)
        steps.forget([*batch, *rejected])
        await self._account_for_rejected()
        if self._overlap:
            await self._dispatch_ahead()
        return done

    async def _open(self, version: int) -> None:
        """Enter the round: begin, agree, withhold, admit, open."""
        steps, pool, schedule = self.steps, self.pool, self.pool.schedule
        steps.begin(version)
        pool.begin_round(version)
        if self._overlap or pool.has_tools:
            await steps.agree(pool)  # on the groups finished since the last round closed
        if self._overlap and (self._dynamic is None or self._dynamic.between_rounds):  # else some may be rejected
            schedule.withhold()
        for group in steps.next_groups(schedule.room):
            group.admit_to(pool)
        self.driver.open_round()

    async def _agree(self) -> None:
        """Agree on the finished groups of all processes, and so on the batch. A collective call."""
        dynamic, quota = self._dynamic, self._quota
        if quota is not None and dynamic is not None:
            quota.publish_rejected()
            # Some processes may have admitted and rejected replacements that others do not know yet. No process gets
            # the highest number before all processes have published theirs.
            replaced = await self.steps.highest(dynamic.replaced)
            quota.refresh()
            while (missing := min(replaced - dynamic.replaced, dynamic.missing(self.pool))) > 0:
                dynamic.replaced += missing
                for group in self.steps.replacements(missing):
                    group.admit_to(self.pool)
                quota.refresh()
        await self.steps.agree(self.pool)
        if quota is not None and self.steps.is_main:
            quota.end_round()  # no process reads it any more

    @property
    def _may_close(self) -> bool:
        """Whether the groups that all processes have agreed on close the round.

        A round that reached its rejection limit may still lack a replacement that is due; then it continues.
        """
        schedule = self.pool.schedule
        all_finished = len(schedule.finished) == len(schedule)  # nothing left to wait for
        return self._dynamic is None or all_finished or self._dynamic.may_close(self.pool)

    async def _account_for_rejected(self) -> None:
        """Hand out another row for every rejected group, so that training ends as planned."""
        if self._dynamic is None:
            return
        unreplaced = len(self.pool.schedule.rejected) - self._dynamic.replaced
        surplus = self.steps.change_rows(unreplaced)
        if unreplaced >= 0:
            return
        # A round filled with rejected groups trains groups whose replacements are already admitted. Near the end of
        # training, the replacements are surplus.
        await self.cut()
        with self.steps.paused():  # tools continue, and their results change the pool
            withdrawn = self.pool.withdraw(surplus)
        self.steps.forget(withdrawn)
        if withdrawn and self.steps.is_main:
            logger.info("%d groups are not trained: training ends before it could use them.", len(withdrawn))

    async def _dispatch_ahead(self) -> None:
        """Fill the pool for the next round, and generate it while this batch is trained."""
        groups = self.steps.next_groups(self.pool.schedule.room_ahead)
        with self.steps.paused():
            for group in groups:
                group.admit_to(self.pool)
        await self.steps.run(self.driver.dispatch_ahead())


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose steps block instead of waiting for an event loop, and return its result."""

    def result() -> T:
        try:
            work.send(None)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        raise RuntimeError("A step waits for an event loop, and none runs here.")

    return result_of(result)  # type: ignore[no-any-return]

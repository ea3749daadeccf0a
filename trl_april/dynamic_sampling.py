"""Dynamic sampling: finished groups are scored while others are still generated, and useless ones are replaced.

A group whose rewards are all equal has no advantage and teaches nothing. DAPO (arXiv 2503.14476, section 3.2) samples
until the batch is full of groups that do. The invariant owned here: the reward functions run on a thread of their own,
one call at a time, each group is scored once, and a call that outlives its round gives its verdicts in the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Protocol

from .pool import Pool
from .types import Group, Score


logger = logging.getLogger(__name__)


class Admissible(Protocol):
    """What can be handed over to a pool; see `trl_april.admission`."""

    def admit_to(self, pool: Pool) -> None:
        """Hand it over to `pool`."""


class DynamicSampling:
    """Gives the verdicts on finished groups, and asks for others in the place of the rejected ones.

    Args:
        score (`Callable[[Sequence[Group]], list[Score]]`):
            Computes the rewards of groups. It may take its time: it runs in a thread, one call at a time. While it
            runs, groups gather that the next call scores together.
        has_signal (`Callable[[Score], bool]`):
            Whether a group with this score is worth training on.
        replace (`Callable[[int], Sequence[Admissible]]`):
            Called in the same thread with the number of groups that were just rejected. Returns as many others.
        max_rejected (`int`):
            Groups rejected in one round, over all processes, at which it is given up: it is filled with rejected ones,
            oldest first.
        executor (`Executor`, *optional*):
            What runs the calls, one at a time. By default a thread.

    Attributes:
        max_rejected (`int`):
            See above.
        replaced (`int`):
            Rejected groups of this round for which others were asked for.
        groups_filled (`int`):
            Rejected groups that filled a round all the same, in all rounds.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Group]], list[Score]],
        has_signal: Callable[[Score], bool],
        replace: Callable[[int], Sequence[Admissible]],
        *,
        max_rejected: int,
        executor: Executor | None = None,
    ) -> None:
        self._score = score
        self._has_signal = has_signal
        self._replace = replace
        self.max_rejected = max_rejected
        self.replaced = 0
        self._thread = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="trl-april-rewards")
        self.groups_filled = 0
        self._scoring: tuple[list[Group], Future[list[Score]]] | None = None

    async def judge(self, pool: Pool) -> bool:
        """Score what is finished, and accept or reject it.

        Returns:
            `bool`: Whether there was anything to judge.

        Raises:
            Whatever a reward function raises.
        """
        if self._scoring is None:
            groups = pool.unscored()
            if not groups:
                return False
            # Trackio keeps its run in a context, which threads do not inherit; TRL logs to it what a reward took.
            self._scoring = groups, self._thread.submit(copy_context().run, self._score, groups)
        groups, call = self._scoring
        # If the round closes meanwhile, the call goes on and the next round finds it here.
        scores = await asyncio.shield(asyncio.wrap_future(call))
        self._scoring = None
        outstanding = {group.group_id for group in pool}
        for group, score in zip(groups, scores, strict=True):
            if group.group_id not in outstanding:
                continue  # withdrawn between the rounds
            if self._has_signal(score):
                pool.accept(group, score)
            else:
                pool.reject(group, score)
        return True

    def begin_round(self) -> None:
        """Count the replacements anew."""
        self.replaced = 0

    def may_close(self, pool: Pool) -> bool:
        """Whether the round can be closed, by its quota or because it is given up."""
        return pool.roster.may_close(filled_with=pool.num_rejected if self._given_up(pool) else 0)

    def missing(self, pool: Pool) -> int:
        """Groups that are to be replaced: those that were rejected and not replaced yet, up to the pool's target.

        Where the target was lowered, or a checkpoint held more groups than it, others are there in their place.
        """
        return min(pool.num_rejected - self.replaced, pool.target - len(pool.roster))

    async def replace(self, pool: Pool) -> bool:
        """Admit others in the place of those that were rejected, if that is worth it.

        Not to be called in a round that closes: there they would only delay the abort, and the next one is filled up
        anyway. What is asked for is also admitted, if need be after a cancellation: a round can be gone on with.

        Returns:
            `bool`: Whether groups were admitted.
        """
        missing = self.missing(pool)
        if missing <= 0 or self._given_up(pool):
            return False
        self.replaced += missing
        call = self._thread.submit(copy_context().run, self._replace, missing)
        try:
            groups = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if call.cancel():  # it waits for a reward function, and has taken no rows yet
                self.replaced -= missing
            else:
                self._admit(pool, await asyncio.wrap_future(call))
            raise
        self._admit(pool, groups)
        return True

    def _admit(self, pool: Pool, groups: Sequence[Admissible]) -> None:
        for group in groups:
            group.admit_to(pool)

    def fill(self, pool: Pool) -> None:
        """Fill a hopeless round with what it has rejected."""
        missing = min(max(0, pool.quota - pool.num_finished), pool.num_rejected)
        if missing and self._given_up(pool):
            logger.warning(
                "%d groups of this round had rewards that are all equal. It is filled with %d of them, which train "
                "nothing. Look at the reward functions and at how hard the prompts are, or raise "
                "max_rejected_groups_per_round, which is %d.",
                pool.num_rejected,
                missing,
                self.max_rejected,
            )
            self.groups_filled += pool.readmit(missing)

    def _given_up(self, pool: Pool) -> bool:
        return pool.num_rejected >= self.max_rejected

    def close(self) -> None:
        """Let go of the thread; a call that runs is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

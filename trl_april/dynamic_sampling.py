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
        replace (`Callable[[int, int], Sequence[Admissible]]`):
            Called in the same thread with the number of groups that were just rejected and the room in the pool.
            Returns the next groups, at most as many as there is room for.
        max_rejected (`int`):
            Groups rejected in one round at which it is given up: it is filled with rejected ones, oldest first.
        executor (`Executor`, *optional*):
            What runs the calls, one at a time. By default a thread.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Group]], list[Score]],
        has_signal: Callable[[Score], bool],
        replace: Callable[[int, int], Sequence[Admissible]],
        *,
        max_rejected: int,
        executor: Executor | None = None,
    ) -> None:
        self._score = score
        self._has_signal = has_signal
        self._replace = replace
        self._max_rejected = max_rejected
        self._thread = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="trl-april-rewards")
        self.groups_filled = 0  # rejected groups that filled a round all the same
        self._scoring: tuple[list[Group], Future[list[Score]]] | None = None

    async def judge(self, pool: Pool) -> bool:
        """Score what is finished, accept or reject it, and admit replacements.

        Returns:
            `bool`: Whether there was anything to judge.

        Raises:
            Whatever a reward function raises.
        """
        if self._scoring is None:
            groups = pool.unscored()
            if not groups:
                return False
            self._scoring = groups, self._thread.submit(self._score, groups)
        groups, call = self._scoring
        # If the round closes meanwhile, the call goes on and the next round finds it here.
        scores = await asyncio.shield(asyncio.wrap_future(call))
        self._scoring = None
        rejected = 0
        outstanding = {group.group_id for group in pool}
        for group, score in zip(groups, scores, strict=True):
            if group.group_id not in outstanding:
                continue  # withdrawn between the rounds
            if self._has_signal(score):
                pool.accept(group, score)
            else:
                pool.reject(group, score)
                rejected += 1
        if pool.num_rejected >= self._max_rejected:
            self._give_up(pool)
        elif rejected and not pool.quota_met:
            # In a round that closes now they would only delay the abort; the next one is filled up anyway. While the
            # quota is not met nothing but an error closes the round, so what is asked for here is also admitted.
            room = pool.room
            for group in await asyncio.wrap_future(self._thread.submit(self._replace, rejected, room)):
                group.admit_to(pool)
        return True

    def _give_up(self, pool: Pool) -> None:
        """Fill a hopeless round with what it has rejected."""
        missing = min(max(0, pool.quota - pool.num_finished), pool.num_rejected)
        if missing:
            logger.warning(
                "%d groups of this round had rewards that are all equal. It is filled with %d of them, which train "
                "nothing. Look at the reward functions and at how hard the prompts are, or raise "
                "max_rejected_groups_per_round, which is %d.",
                pool.num_rejected,
                missing,
                self._max_rejected,
            )
            pool.readmit(missing)
            self.groups_filled += missing

    def close(self) -> None:
        """Let go of the thread; a call that runs is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

"""Dynamic sampling: score finished groups during generation, and replace groups without a learning signal.

A group whose rewards are all equal has no advantage. DAPO (arXiv 2503.14476, section 3.2) samples until the batch is
full of groups that have an advantage. Invariant: reward functions run in a single thread, one call at a time, and each
group is scored once. A call that outlives its round counts in the next round.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

from ..pool.pool import Pool
from ..pool.samples import Group, Score
from .user_code import DaemonThreads


if TYPE_CHECKING:
    from ..data.admission import NewGroup

logger = logging.getLogger(__name__)


class DynamicSampling:
    """Filters finished groups by their rewards, and replaces rejected groups.

    `score` and `replace` run in a thread, one call at a time. Groups that finish during a call of `score` are scored
    together by the next call. `replace` returns as many new groups as were rejected, or fewer if the dataset ends. A
    round whose processes reject `max_rejected` groups is filled with rejected groups, oldest first. Without
    `has_signal` no group is rejected. Only then can groups be scored `between_rounds`: a group rejected between rounds
    would belong to the next round, whose replacements are not planned yet.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Group]], list[Score]],
        has_signal: Callable[[Score], bool] | None,
        replace: Callable[[int], Sequence[NewGroup]],
        *,
        max_rejected: int,
        between_rounds: bool = False,
        executor: Executor | None = None,
    ) -> None:
        assert has_signal is None or not between_rounds
        self._score, self._has_signal, self._replace = score, has_signal, replace
        self.max_rejected, self.between_rounds = max_rejected, between_rounds
        self.is_suspended = False  # whether no group is scored for now
        self.replaced = 0  # rejected groups of the round with a replacement
        self._thread = executor or DaemonThreads("trl-april-rewards", limit=1)
        self._scoring: tuple[list[Group], Future[list[Score]]] | None = None

    async def filter_finished(self, pool: Pool) -> bool:
        """Score finished groups, and accept or reject them. Returns whether there were any."""
        if self._scoring is None:
            groups = [] if self.is_suspended else pool.unscored()
            if not groups:
                return False
            self._scoring = groups, self._thread.submit(self._score, groups)
        groups, call = scoring = self._scoring
        # If the round closes meanwhile, the call continues and the next round awaits it here.
        scores = await asyncio.shield(asyncio.wrap_future(call))
        if self._scoring is not scoring:
            return True  # another task awaited the same call and filtered the groups
        self._scoring = None
        outstanding = {group.group_id for group in pool}
        for group, score in zip(groups, scores, strict=True):
            if group.group_id not in outstanding:
                continue  # withdrawn between the rounds
            if self._has_signal is None or self._has_signal(score):
                pool.accept(group, score)
            else:
                pool.reject(group, score)
        return True

    async def suspend(self) -> None:
        """Score no further groups, and wait for a call in progress, whose scores are taken later."""
        self.is_suspended = True
        if self._scoring is not None:
            await asyncio.wait([asyncio.wrap_future(self._scoring[1])])

    def may_close(self, pool: Pool) -> bool:
        """Whether the quota is met, by rejected groups if the round hit its rejection limit."""
        return pool.schedule.may_close(filled_with=len(pool.schedule.rejected) if self._hit_limit(pool) else 0)

    def missing(self, pool: Pool) -> int:
        """Rejected groups that need a replacement.

        After the target was lowered, or from a checkpoint, a pool may hold more groups than its target. The excess
        groups serve as replacements.
        """
        return min(len(pool.schedule.rejected) - self.replaced, pool.schedule.target - len(pool.schedule))

    async def replace(self, pool: Pool) -> bool:
        """Admit replacements unless the round hit its rejection limit. Returns whether groups were admitted.

        Requested groups are admitted even after a cancellation, since the round may be reopened.
        """
        missing = self.missing(pool)
        if missing <= 0 or self._hit_limit(pool):
            return False
        self.replaced += missing
        call = self._thread.submit(self._replace, missing)
        try:
            groups = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if call.cancel():  # it was queued after a reward function, and has taken no rows yet
                self.replaced -= missing
            else:
                for group in await asyncio.wrap_future(call):
                    group.admit_to(pool)
            raise
        for group in groups:
            group.admit_to(pool)
        return True

    def fill(self, pool: Pool) -> int:
        """Readmit rejected groups to a round that hit its rejection limit, and return how many are in this pool."""
        missing = min(max(0, pool.schedule.quota - len(pool.schedule.finished)), len(pool.schedule.rejected))
        if not missing or not self._hit_limit(pool):
            return 0
        logger.warning(
            "%d groups of this round have equal rewards, and the limit max_rejected_groups_per_round is %d. The batch "
            "is filled with %d of them, which train nothing. Check the reward functions and the difficulty of the "
            "prompts, or raise the limit.",
            len(pool.schedule.rejected),
            self.max_rejected,
            missing,
        )
        return pool.readmit(missing)

    def close(self) -> None:
        """Release the thread without waiting for a call in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _hit_limit(self, pool: Pool) -> bool:
        return len(pool.schedule.rejected) >= self.max_rejected

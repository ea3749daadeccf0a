"""`over_provisioning="auto"` in a training run: what it takes beside the rounds, and when it is computed.

The invariant owned here: a round counts with the time that passed before it, each second once, as training or as
standstill; what is computed meanwhile reads nothing that requests change.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from ..pool import Pool
from ..round import Round
from .factor_chooser import Change, FactorChooser


class AutoFactor:
    """Shows a [`FactorChooser`] the rounds and the time between them, and predicts while the trainer trains.

    Args:
        chooser ([`FactorChooser`]):
            What chooses.
        pool (`Pool`):
            Whose factor it is. It begins with that of the chooser.
    """

    def __init__(self, chooser: FactorChooser, pool: Pool) -> None:
        self._chooser = chooser
        self._pool = pool
        pool.over_provisioning = chooser.factor
        self._thread = ThreadPoolExecutor(1, "trl-april-predictor")
        self._predicting: Future[dict[float, float] | None] | None = None
        self._ended: float | None = None  # when the last round did
        self._standstill = 0.0  # seconds before the present one, in which nothing ran
        self._made_way: float | None = None  # when requests first did, since the last round, for weights to come

    def choose(self) -> Change | None:
        """A round begins. The factor that it is to have, if what was predicted since the last one speaks for another.
        A collective call.
        """
        self._standstill = 0.0 if self._made_way is None else time.monotonic() - self._made_way
        self._made_way = None
        if self._predicting is None:
            return None
        predicted, self._predicting = self._predicting.result(), None
        return self._chooser.decide(predicted)

    def observe(self, done: Round) -> None:
        """Learn from the round that has just delivered its groups. A collective call."""
        # By the round's own times, which are those of the same clock: whatever is done between two belongs there.
        between = 0.0 if self._ended is None else done.started - self._ended
        self._ended = done.started + done.seconds
        self._chooser.observe(
            done,
            [*done.groups, *self._pool],
            train_seconds=max(0.0, between - self._standstill),
            sync_seconds=self._standstill,
        )

    def predict(self) -> None:
        """The round is over, and training begins. Requests may run: nothing of a group is read."""
        self._predicting = self._thread.submit(self._chooser.predict)
        self._made_way = None  # as for a server that was started anew in the round

    def made_way(self) -> None:
        """Requests have ended, or stand still, for weights to come."""
        if self._made_way is None:  # or a sync is done again, or follows that of an evaluation
            self._made_way = time.monotonic()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

"""`over_provisioning="auto"` in a simulation: what chooses in training, by what it would see there.

The invariant owned here: it is told nothing of the scenario but what training would tell it. Neither torch nor HTTP.
"""

from __future__ import annotations

from dataclasses import replace

from ..auto.factor_chooser import FactorChooser
from ..pool import Pool
from ..round import Round, Span
from .engine import SimulatedEngine


class ChosenFactor:
    """Chooses the over-provisioning of a pool while it is simulated.

    Args:
        pool (`Pool`):
            Whose factor it is.
        engine ([`SimulatedEngine`]):
            What generates for it.
        reuses_kv (`bool`):
            Whether resumed samples are spared their prefill.
        overlaps (`bool`):
            Whether requests go on while the trainer trains.
    """

    def __init__(self, pool: Pool, engine: SimulatedEngine, *, reuses_kv: bool, overlaps: bool) -> None:
        self._pool, self._engine = pool, engine
        scenario = engine.scenario
        self._chooser = FactorChooser(
            pool,
            group_size=scenario.group_size,
            max_completion_length=scenario.units(scenario.lengths.longest),
            reuses_kv=reuses_kv,
            overlaps=overlaps,
            max_sequences=scenario.servers * scenario.max_sequences,
        )
        pool.over_provisioning = self._chooser.factor
        self._rounds = 0

    def observe(self, done: Round, opened: float) -> None:
        """Learn from a round that was opened at this time of the clock."""
        scenario = self._engine.scenario
        # The pool's prompts here are of one token each; what is prefilled is the engine's business.
        prompt = scenario.units(scenario.prompt_tokens) - 1
        spans = [replace(self._with_first_token(span, opened), prompt=span.prompt + prompt) for span in done.spans]
        self._chooser.observe(
            replace(done, spans=spans),
            [*done.groups, *self._pool],
            # Before the first round there was neither.
            train_seconds=scenario.train_seconds if self._rounds else 0.0,
            sync_seconds=scenario.sync_seconds if self._rounds else 0.0,
        )
        self._rounds += 1

    def choose(self) -> None:
        """Give the pool the factor of the next round."""
        change = self._chooser.choose()
        if change is not None:
            self._pool.over_provisioning = change.after

    def _with_first_token(self, span: Span, opened: float) -> Span:
        """A stream is one chunk here. In training its first token comes by itself."""
        at = self._engine.first_tokens.get((span.group_id, span.index))
        if span.ran_on or at is None or at - opened < span.began:
            return span
        # A unit of several tokens does not come with the first of them.
        head = min(span.tokens, 1 // self._engine.scenario.quantum)
        return replace(span, first=min(at - opened, span.ended), head=head)

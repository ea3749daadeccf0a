"""The progress bar of a round: nested under the trainer's bar in a terminal, next to it in a notebook."""

from __future__ import annotations

import time
from typing import Any

from tqdm import tqdm
from transformers.utils.import_utils import is_in_notebook

from ..distributed.quota import SharedQuota
from ..pool.pool import Pool
from .driver import RolloutDriver


def notebook_bar() -> Any:
    """A `NotebookProgressBar` for all rounds in a notebook, `None` elsewhere. It shows the last state until closed.

    In a notebook, tqdm's bar needs ipywidgets, and leaves a dead widget for each round.
    """
    if not is_in_notebook():
        return None
    from transformers.utils.notebook import NotebookProgressBar  # needs IPython

    return NotebookProgressBar(1, prefix="Rollout")


class RoundProgress:
    """Shows finished groups of the quota, requests in flight, acting samples and tokens per second in a round.

    With a shared `quota`, groups are counted over all processes, requests and tokens in this process.
    """

    def __init__(
        self,
        pool: Pool,
        driver: RolloutDriver,
        quota: SharedQuota | None = None,
        *,
        disable: bool,
        notebook: Any = None,
    ) -> None:
        self._pool, self._driver, self._quota = pool, driver, quota
        self._notebook = None if disable else notebook
        self._started = time.monotonic()
        self._tokens = pool.counters.tokens_generated
        self._bar = tqdm(
            total=pool.schedule.quota,
            desc="rollout",
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} groups [{elapsed}{postfix}]",
            leave=False,
            disable=disable or notebook is not None or None,  # None: only in a terminal, since it would fill a file
        )
        self.update()

    def update(self) -> None:
        """Draw the current state."""
        schedule, elapsed = self._pool.schedule, time.monotonic() - self._started
        rate = (self._pool.counters.tokens_generated - self._tokens) / elapsed if elapsed else 0.0
        finished = len(schedule.finished) if self._quota is None else self._quota.num_finished
        finished = min(finished, schedule.quota)
        rejected = f", {len(schedule.rejected)} rejected" if len(schedule.rejected) else ""
        of = "" if self._quota is None else " of process 0"
        acting = f", {self._driver.acting} with tools" if self._driver.acting else ""
        text = f"{self._driver.in_flight} in flight{acting}{of}, {rate:,.0f} tok/s{rejected}"
        if self._notebook is None:
            self._bar.n = finished
            self._bar.set_postfix_str(text)
        else:
            self._notebook.value, self._notebook.total = finished, schedule.quota
            self._notebook.label = f"{finished}/{schedule.quota} groups, {text}"
            self._notebook.display()

    def __enter__(self) -> RoundProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.update()  # the notebook keeps this state
        self._bar.close()

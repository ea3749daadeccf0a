"""The progress bar of a round: nested under the trainer's own in a terminal, beside it in a notebook."""

from __future__ import annotations

import time
from typing import Any

from tqdm import tqdm
from transformers.utils.import_utils import is_in_notebook

from .pool import Pool
from .quota import SharedQuota
from .rollout import RolloutDriver


class NotebookBar:
    """As much of tqdm's bar as a round needs, drawn as transformers draws the trainer's bar in a notebook.

    tqdm's own is a widget there: it needs ipywidgets, and every round would leave a dead one behind. All rounds share
    one output of this, which keeps its last state between them, so that what stands below does not jump.
    """

    disable = False

    def __init__(self) -> None:
        self.n = 0
        self._total = 0
        self._output: Any = None  # IPython's handle of what is displayed
        self._shown = ""

    @classmethod
    def if_here(cls) -> NotebookBar | None:
        """One in a notebook, and `None` elsewhere, as transformers tells them apart."""
        return cls() if is_in_notebook() else None

    def begin(self, total: int) -> NotebookBar:
        """Show nothing done of `total` groups."""
        self.n, self._total = 0, total
        self.set_postfix_str("")
        return self

    def set_postfix_str(self, text: str) -> None:
        """Draw the present state, with `text` behind the bar."""
        from transformers.utils.notebook import html_progress_bar  # here, because it needs IPython

        label = ", ".join(part for part in (f"{self.n}/{self._total} groups", text) if part)
        self._show(html_progress_bar(self.n, self._total, "Rollout", label))

    def close(self) -> None:
        """The end of a round, after which its state stays."""

    def remove(self) -> None:
        """The end of training."""
        if self._output is not None:
            self._show("")

    def _show(self, html: str) -> None:
        from IPython.display import HTML, display

        if html == self._shown:
            return
        self._shown = html
        if self._output is None:
            self._output = display(HTML(html), display_id=True)
        else:
            self._output.update(HTML(html))


class RoundProgress:
    """Shows groups done of the quota, requests in flight and tokens per second, as long as a round runs.

    Args:
        pool (`Pool`):
            Pool that the round fills.
        driver (`RolloutDriver`):
            Driver that runs it.
        quota (`SharedQuota`, *optional*):
            Where several processes fill the round. The bar then counts the groups of all, and the requests and tokens
            of this one.
        disable (`bool`):
            Whether to show nothing.
        notebook ([`NotebookBar`], *optional*):
            Bar to use in the place of tqdm's.
    """

    def __init__(
        self,
        pool: Pool,
        driver: RolloutDriver,
        quota: SharedQuota | None = None,
        *,
        disable: bool,
        notebook: NotebookBar | None = None,
    ) -> None:
        self._pool = pool
        self._driver = driver
        self._quota = quota
        self._started = time.monotonic()
        self._tokens = pool.ledger.tokens_generated
        self._bar: Any
        if notebook is None or disable:
            self._bar = tqdm(total=pool.quota, desc="rollout", unit="group", leave=False, disable=disable)
        else:
            self._bar = notebook.begin(pool.quota)

    def update(self) -> None:
        """Draw the present state."""
        if self._bar.disable:
            return
        elapsed = time.monotonic() - self._started
        rate = (self._pool.ledger.tokens_generated - self._tokens) / elapsed if elapsed else 0.0
        finished = self._pool.num_finished if self._quota is None else self._quota.num_finished
        self._bar.n = min(finished, self._pool.quota)
        rejected = f", {self._pool.num_rejected} rejected" if self._pool.num_rejected else ""
        of = "" if self._quota is None else " of process 0"
        self._bar.set_postfix_str(f"{self._driver.in_flight} in flight{of}, {rate:,.0f} tok/s{rejected}")

    def __enter__(self) -> RoundProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.update()  # to what it came to, which may be shown for a while
        self._bar.close()

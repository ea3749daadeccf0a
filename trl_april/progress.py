"""The progress bar of a round, nested under the trainer's own."""

from __future__ import annotations

import time

from tqdm.auto import tqdm

from .pool import Pool
from .quota import SharedQuota
from .rollout import RolloutDriver


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
    """

    def __init__(self, pool: Pool, driver: RolloutDriver, quota: SharedQuota | None = None, *, disable: bool) -> None:
        self._pool = pool
        self._driver = driver
        self._quota = quota
        self._started = time.monotonic()
        self._tokens = pool.tokens_generated
        self._bar = tqdm(total=pool.quota, desc="rollout", unit="group", leave=False, disable=disable)

    def update(self) -> None:
        """Draw the present state."""
        if self._bar.disable:
            return
        elapsed = time.monotonic() - self._started
        rate = (self._pool.tokens_generated - self._tokens) / elapsed if elapsed else 0.0
        finished = self._pool.num_finished if self._quota is None else self._quota.num_finished
        self._bar.n = min(finished, self._pool.quota)
        rejected = f", {self._pool.num_rejected} rejected" if self._pool.num_rejected else ""
        of = "" if self._quota is None else " of process 0"
        self._bar.set_postfix_str(f"{self._driver.in_flight} in flight{of}, {rate:,.0f} tok/s{rejected}")

    def __enter__(self) -> RoundProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

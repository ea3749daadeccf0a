"""Checks of the over-provisioning factor and the staleness bound.

Invariant: with `staleness_policy="wait"`, only combinations pass whose bound a pool can guarantee.
"""

from __future__ import annotations

import math

from ..errors import ConfigError


STALENESS_POLICIES = ("wait", "mask", "ignore")
AUTO = "auto"


def factor_of(over_provisioning: float | str | None) -> float | str:
    """Parse an over-provisioning factor: a number, possibly as text, or `"auto"`."""
    if over_provisioning == AUTO:
        return AUTO
    try:
        # float() accepts a bool, which is surely a mistake here.
        if over_provisioning is not None and not isinstance(over_provisioning, bool):
            return float(over_provisioning)
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"over_provisioning is {over_provisioning!r}; it must be a number of at least 1.0, or {AUTO!r} to have it "
        "chosen during training."
    )


def check_bound(
    over_provisioning: float, max_staleness: int | None, staleness_policy: str, versions_per_round: int = 1
) -> None:
    """Refuse options of [`~trl_april.pool.pool.Pool`] that are out of range, or a bound that `"wait"` cannot keep."""
    if not 1.0 <= over_provisioning < math.inf:
        raise ConfigError(
            f"over_provisioning is {over_provisioning}; it is the number of groups in flight as a factor of those "
            "needed, so it must be finite and at least 1.0 (1.0 is synchronous)."
        )
    if staleness_policy not in STALENESS_POLICIES:
        raise ConfigError(
            f"staleness_policy is {staleness_policy!r}; it must be one of {', '.join(STALENESS_POLICIES)}."
        )
    if max_staleness is None:
        return
    if max_staleness < 0:
        raise ConfigError(
            f"max_staleness is {max_staleness}; it counts policy versions and cannot be negative. Use None to lift "
            "the bound."
        )
    rounds = max_staleness // versions_per_round
    if staleness_policy == "wait" and over_provisioning > rounds + 1:
        raise ConfigError(
            f"over_provisioning is {over_provisioning} with max_staleness={max_staleness} and up to "
            f"{versions_per_round} policy version(s) per round. A group can then wait for {rounds} round(s), so "
            f"over_provisioning must be at most {rounds + 1}. Lower it, or raise max_staleness to at least "
            f"{math.ceil(over_provisioning - 1) * versions_per_round}."
        )

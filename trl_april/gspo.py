"""GSPO as a loss type: what `loss_type="gspo"` stands for among the options that TRL has.

Group Sequence Policy Optimization (arXiv 2507.18071) takes one importance ratio per sequence: the exponential of the
mean log-ratio of its tokens (equation 7). TRL computes just that for its `grpo` aggregation with
`importance_sampling_level="sequence"`, so nothing is reimplemented here. The invariant owned here: TRL's constructor
sees only losses that it knows, and the user's config is afterwards what it was before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any

from trl import GRPOConfig


GSPO = "gspo"
# Section 5.1 of the paper. A ratio per sequence moves far less than one per token, so the clip range is far narrower.
GSPO_EPSILON, GSPO_EPSILON_HIGH = 3e-4, 4e-4


def gspo_options(args: GRPOConfig) -> dict[str, Any]:
    """The options of TRL that `loss_type="gspo"` stands for in `args`.

    A clip bound that was set stays as it is. One that equals TRL's default counts as not set, since a config does not
    remember who wrote a value. With `epsilon` set alone, `epsilon_high` follows it, as everywhere in TRL.
    """
    default = next(option.default for option in fields(GRPOConfig) if option.name == "epsilon")
    assert default is not MISSING
    options: dict[str, Any] = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    if args.epsilon == default:
        options["epsilon"] = GSPO_EPSILON
        if args.epsilon_high is None:
            options["epsilon_high"] = GSPO_EPSILON_HIGH
    return options


@contextmanager
def known_to_trl(args: GRPOConfig) -> Iterator[None]:
    """For TRL's constructor only: `args` with a loss that TRL knows. Saved configs keep the name that was chosen."""
    options = gspo_options(args) if args.loss_type == GSPO else {}
    before = {name: getattr(args, name) for name in options}
    for name, value in options.items():
        setattr(args, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)

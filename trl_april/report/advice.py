"""What to change, in sentences: one small rule each, from the figures of a run.

A threshold is where a change gains more than runs differ by chance: about 5 % of the wall-clock for what costs
nothing, more for what has a price. The invariant owned here: a rule speaks only of what the run tells, and only of
options that exist. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable

from .prediction import Prediction
from .summary import Summary


FEW_ROUNDS = 4  # the pool fills up in the first, and is emptied in the last
HALF_EMPTY = 0.20  # of the wall-clock. A synchronous round of equal lengths has next to nothing of it.
GAIN = 0.05  # predicted; less is within what the model can tell
IDLE = 0.30  # of the wall-clock. Overlap costs some staleness, so it has to be worth it.
AT_BOUND = 0.25  # of the trained tokens. A few belong to the longest completions, and are what the bound is for.
EVEN = 1.5  # 99th percentile of the lengths over their median. Lognormal, with 0.17 as sigma of the logarithm.
SYNC = 0.10  # of the wall-clock
SCORING = 0.15
ABORT = 0.05
REJECTED = 0.5  # of the generated tokens. DAPO's own runs come to that.
SAMPLE_SIZE = 0.6  # of tokens of one age: of ten tokens, four are spent without teaching


def too_few_rounds(summary: Summary) -> str | None:
    """The first rounds fill the pool and the last empty it, so a short run says little of a long one."""
    if summary.rounds >= FEW_ROUNDS:
        return None
    rounds = "1 round is" if summary.rounds == 1 else f"{summary.rounds} rounds are"
    return f"{rounds} too few to say what to change. Let it run for {FEW_ROUNDS} or more, and look again."


def long_tail(summary: Summary, prediction: Prediction | None = None) -> str | None:
    """Rounds that run half empty wait for their longest completions: what over-provisioning is for."""
    factor = summary.over_provisioning
    if summary.half_empty is None or summary.half_empty < HALF_EMPTY or factor is None:
        return None
    if summary.options.get("over_provisioning") == "auto":
        return None  # it is being chosen already
    waits = f"For {summary.half_empty:.0%} of the time a round ran with less than half of its requests in flight"
    if prediction is not None:
        if prediction.factor <= factor or prediction.gain < 1 + GAIN:
            return None
        promise = f"about {prediction.gain:.2f} times the trained tokens per second are predicted"
        return (
            f"{waits}: raise over_provisioning from {factor:g} to {prediction.factor:g} ({promise}), or let it be "
            'chosen with "auto".'
        )
    most = _highest_factor(summary)
    higher = 2.0 if factor < 2 else factor + 1
    if most is not None and factor >= most:
        return (
            f"{waits}, and over_provisioning={factor:g} is the most that max_staleness="
            f"{summary.options['max_staleness']} allows: raise max_staleness, if the reward bears it."
        )
    higher = higher if most is None else min(higher, most)
    return f'{waits}: raise over_provisioning from {factor:g} to {higher:g}, or let it be chosen with "auto".'


def at_the_bound(summary: Summary) -> str | None:
    """Many tokens as old as they may be: more is in flight than the batch can take in time."""
    if summary.at_bound is None or summary.at_bound < AT_BOUND or (summary.over_provisioning or 1.0) <= 1:
        return None
    bound = summary.options["max_staleness"]
    return (
        f"{summary.at_bound:.0%} of the trained tokens are {_versions(bound)} old, the most that "
        f"max_staleness={bound} allows: lower over_provisioning (now {summary.over_provisioning:g}), or raise the "
        "bound if rewards and effective sample size bear it."
    )


def even_lengths(summary: Summary) -> str | None:
    """Completions of about one length have no tail to cut."""
    median, p99 = summary.lengths.get(0.5), summary.lengths.get(0.99)
    if not median or p99 is None or p99 / median >= EVEN:
        return None
    even = (
        f"Lengths are even (99th percentile {p99:,.0f} tokens, median {median:,.0f}), and there is no long tail to "
        "cut: APRIL gains little here."
    )
    if (summary.over_provisioning or 1.0) <= 1:
        return even
    return f"{even} over_provisioning=1.0 would keep every token on-policy."


def trainer_is_slow(summary: Summary) -> str | None:
    """An engine without requests waits for the trainer: requests can go on meanwhile."""
    if summary.engine_idle is None or summary.engine_idle < IDLE:
        return None
    idle = f"The engine had nothing to do for {summary.engine_idle:.0%} of the time"
    if summary.options.get("overlap_generation"):
        return (
            f"{idle} although overlap_generation is on: the trainer is the bottleneck. Give it more devices, or have "
            "more in flight for it (over_provisioning)."
        )
    return f"{idle}, while the trainer worked: set overlap_generation=True, so that requests go on meanwhile."


def sync_is_slow(summary: Summary) -> str | None:
    """The trainer waits while weights travel, and for a part of the time the server does."""
    share = summary.shares.get("sync", 0.0)
    if share < SYNC or summary.sync_seconds is None:
        return None
    took = f"Weight syncs took {share:.0%} of the time ({summary.sync_seconds:.3g} s each)"
    if summary.options.get("weight_sync") == "nccl":
        return f"{took}: a larger generation batch (steps_per_generation) needs fewer."
    return (
        f'{took}: weight_sync="nccl" is faster where trainer and server have GPUs of their own, and for files '
        "weight_sync_dir should be shared memory. A larger generation batch (steps_per_generation) needs fewer."
    )


def scoring_is_slow(summary: Summary) -> str | None:
    """Between the end of a round and the loss, neither the engine nor the optimiser has anything to do."""
    share = summary.shares.get("scoring", 0.0)
    if share < SCORING:
        return None
    return (
        "Scoring the batches (rewards, and log-probabilities of the reference and of the old policy) took "
        f"{share:.0%} of the time: make the slowest reward function faster or asynchronous."
    )


def abort_is_slow(summary: Summary) -> str | None:
    """What is cut should end within one decode step."""
    share = summary.shares.get("abort", 0.0)
    if share < ABORT or summary.abort_seconds is None:
        return None
    return (
        f"After their quota was met, rounds took {summary.abort_seconds:.3g} s to end ({share:.0%} of the time): see "
        "with `trl-april doctor --base-url` how fast the server aborts."
    )


def stale_tokens_are_lost(summary: Summary) -> str | None:
    """Where the policy moves fast, the correction takes old tokens their weight."""
    for name, age in (("age_1", 1), ("age_2", 2), ("age_3+", 3)):
        size = summary.sample_sizes.get(name)
        if size is not None and size < SAMPLE_SIZE:
            older = " and older" if age == 3 else ""
            # A bound below the versions of a round would leave nothing to carry over.
            can_be_bound = age > summary.options.get("versions_per_round", 1)
            remedy = f"lower max_staleness to {age - 1}" if can_be_bound else "lower over_provisioning"
            return (
                f"Tokens {_versions(age)} old{older} have an effective sample size of {size:.2f}: of ten, "
                f"{10 * size:.0f} teach. The policy moves fast; {remedy}, or the learning rate."
            )
    return None


def most_are_rejected(summary: Summary) -> str | None:
    """Groups whose rewards are all equal teach nothing."""
    if summary.rejected < REJECTED:
        return None
    return (
        f"Dynamic sampling rejected {summary.rejected:.0%} of what was generated, because all rewards of a group were "
        "equal: take out prompts that are always or never solved, or raise num_generations."
    )


def connection_is_bad(summary: Summary) -> str | None:
    """Outages and broken streams are got over, but they cost time."""
    if summary.outage_seconds:
        return f"The server was away for {summary.outage_seconds:.3g} s altogether: see its log."
    if summary.broken_streams:
        return f"{summary.broken_streams:.0f} streams broke and were asked for again: see the server's log."
    return None


RULES: tuple[Callable[[Summary], str | None], ...] = (
    at_the_bound,
    trainer_is_slow,
    even_lengths,
    stale_tokens_are_lost,
    sync_is_slow,
    scoring_is_slow,
    abort_is_slow,
    most_are_rejected,
    connection_is_bad,
)


def advice(summary: Summary, prediction: Prediction | None = None) -> list[str]:
    """What to change in a run like this, the most promising first; one sentence that says so if there is nothing."""
    few = too_few_rounds(summary)
    if few is not None:
        return [few]
    if summary.seconds is None:
        found = [rule(summary) for rule in RULES]
        nothing = "The trainer's log alone shows nothing to change; with times there is more to see."
    else:
        found = [long_tail(summary, prediction), *(rule(summary) for rule in RULES)]
        nothing = "Nothing to change: the engine was well used, and what was trained was young enough."
    return [sentence for sentence in found if sentence is not None] or [nothing]


def _highest_factor(summary: Summary) -> float | None:
    """What the staleness bound allows; `None` if there is none."""
    bound = summary.options.get("max_staleness")
    if not isinstance(bound, int) or summary.options.get("staleness_policy") != "wait":
        return None
    return float(bound // int(summary.options.get("versions_per_round", 1)) + 1)


def _versions(count: int) -> str:
    return "1 version" if count == 1 else f"{count} versions"

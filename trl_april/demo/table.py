"""The two runs side by side, as text."""

from .training import Recording


LABEL_WIDTH = 40
COLUMN_WIDTH = 16


def _row(label: str, synchronous: str, april: str, ratio: str = "") -> str:
    return f"{label:<{LABEL_WIDTH}}{synchronous:>{COLUMN_WIDTH}}{april:>{COLUMN_WIDTH}}{ratio:>10}".rstrip()


def _compared(label: str, synchronous: float, april: float, form: str, *, more_is_better: bool) -> str:
    better, worse = (april, synchronous) if more_is_better else (synchronous, april)
    ratio = f"x {better / worse:.2f}" if worse else ""
    return _row(label, form.format(synchronous), form.format(april), ratio)


def comparison(synchronous: Recording, april: Recording) -> str:
    """
    The table of the demo.

    Args:
        synchronous ([`Recording`]):
            The run with `over_provisioning=1.0`.
        april ([`Recording`]):
            The run with more.

    Returns:
        `str`: Lines of text. The last column says how many times better the second run is.
    """
    runs = (synchronous, april)
    rule = "-" * (LABEL_WIDTH + 2 * COLUMN_WIDTH + 10)
    return "\n".join(
        [
            _row("", *(run.name for run in runs), "gain"),
            _row("groups in flight / groups needed", *(f"{run.over_provisioning:g}" for run in runs)),
            _row("optimiser steps", *(str(run.steps) for run in runs)),
            rule,
            _compared(
                "generated tokens per second of rollout",
                *(run.generated_tokens / run.rollout_seconds for run in runs),
                "{:,.0f}",
                more_is_better=True,
            ),
            _compared(
                "trained tokens per second of rollout",
                *(run.trained_tokens / run.rollout_seconds for run in runs),
                "{:,.0f}",
                more_is_better=True,
            ),
            _compared(
                "trained tokens per second in all",
                *(run.trained_tokens / run.seconds for run in runs),
                "{:,.0f}",
                more_is_better=True,
            ),
            _compared(
                "wall-clock per step",
                *(run.seconds / run.steps for run in runs),
                "{:.2f} s",
                more_is_better=False,
            ),
            _compared(
                "    of which rollout",
                *(run.rollout_seconds / run.steps for run in runs),
                "{:.2f} s",
                more_is_better=False,
            ),
            _compared("wall-clock in all", *(run.seconds for run in runs), "{:.0f} s", more_is_better=False),
            rule,
            _row("reward on held-out prompts, before", *(f"{run.reward_before:.3f}" for run in runs)),
            _row("reward on held-out prompts, after", *(f"{run.reward_after:.3f}" for run in runs)),
            _row("answers without a mistake, before", *(f"{run.solved_before:.0%}" for run in runs)),
            _row("answers without a mistake, after", *(f"{run.solved_after:.0%}" for run in runs)),
            rule,
            _row("trained tokens carried over", *(f"{run.carried_tokens / run.trained_tokens:.0%}" for run in runs)),
            _row("staleness of a trained token, mean", *(f"{run.staleness_mean:.2f}" for run in runs)),
            _row("staleness of a trained token, max", *(str(run.staleness_max) for run in runs)),
        ]
    )

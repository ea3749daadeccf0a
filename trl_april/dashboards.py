"""The order in which dashboards show what the trainer logs.

transformers sends every figure on as `train/april/...`, and dashboards sort by name. What belongs together then lies
far apart, and what matters most is nowhere in particular. The invariant owned here: every figure has its place in one
order, the same for every dashboard that can be told one.

- TensorBoard gets it as a layout of its tab "Custom Scalars", where several figures share a chart.
- trackio reads it from the environment of the process that shows the dashboard.
- Weights & Biases keeps the order of panels on its server, out of reach of a run. It makes a section of each prefix.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from .batch import QUANTILES
from .correction import AGES


if TYPE_CHECKING:
    from .trainer import APRILGRPOTrainer

logger = get_logger(__name__)

PREFIX = "train/april/"
PLOT_ORDER = "TRACKIO_PLOT_ORDER"  # https://huggingface.co/docs/trackio/environment_variables

_AGES = [name for name, *_ in AGES]
_QUARTERS = [f"length_q{quarter}" for quarter in range(1, 5)]

# Figures by chart by section, the most telling first.
CHARTS: dict[str, dict[str, list[str]]] = {
    "Throughput": {
        "Tokens per second": ["generated_tokens_per_second", "trained_tokens_per_second"],
        "Tokens per round": ["generated_tokens", "trained_tokens", "overlap_tokens"],
        "Seconds": ["round_seconds", "overlap_seconds", "sync_seconds", "abort_seconds", "outage_seconds"],
    },
    "In flight": {
        "Requests in flight, and aborted": ["in_flight_mean", "aborted_requests"],
        "Groups outstanding, and resumed": ["outstanding", "groups_resumed"],
        "Over-provisioning": ["over_provisioning"],
        "Parked tokens": ["parked_tokens"],
        "Parked bytes": ["parked_bytes"],
    },
    "Staleness": {
        "Age of tokens in policy versions": ["staleness_mean", "staleness_max"],
        "Share of tokens carried over, and over the bound": ["carried_fraction", "over_staleness_fraction"],
        "Policy versions per sample": ["versions_per_sample_max"],
        "Samples wholly over the bound": ["fully_stale_samples"],
    },
    "Lengths": {
        "Mean length, launched and trained": [
            "completions/launched_mean_length",
            "completions/trained_mean_length",
        ],
        "Quantiles of the batch": [f"length_{name}" for name in QUANTILES],
    },
    "Correction": {
        f"{title}, by {kind}": [f"correction/{bucket}/{figure}" for bucket in buckets]
        for title, figure in (
            ("Effective sample size", "effective_sample_size"),
            ("Mean ratio", "mean_ratio"),
            ("Share clipped", "clipped_fraction"),
            ("Share of the tokens", "tokens_fraction"),
        )
        for kind, buckets in (("age", _AGES), ("length", _QUARTERS))
    }
    | {"Carried tokens": ["correction/carried_tokens"]},
    "Dynamic sampling": {
        "Groups rejected, and trained all the same": ["rejected_groups", "filled_groups"],
        "Tokens rejected": ["rejected_tokens"],
    },
    "Broken streams": {
        "Streams": ["broken_streams"],
        "Tokens that can have been lost": ["lost_tokens_bound"],
    },
}


def tensorboard_layout() -> dict[str, dict[str, list[Any]]]:
    """The charts for `SummaryWriter.add_custom_scalars`.

    Returns:
        `dict` of sections, each a `dict` of charts, each `["Multiline", patterns]`. TensorBoard takes a pattern for a
        regular expression that the beginning of a name has to match.
    """
    return {
        f"APRIL: {section}": {
            chart: ["Multiline", [f"{re.escape(PREFIX + name)}$" for name in names]] for chart, names in charts.items()
        }
        for section, charts in CHARTS.items()
    }


def trackio_plot_order() -> str:
    """The order for trackio's variable `TRACKIO_PLOT_ORDER`: names with commas between them.

    The correction's figures are left out. They come last, by name, which is the order of age and length already.
    """
    names = [name for section in CHARTS.values() for chart in section.values() for name in chart]
    return ",".join(PREFIX + name for name in names if not name.startswith("correction/"))


def order_dashboards(trainer: APRILGRPOTrainer) -> None:
    """Give the dashboards that `trainer` reports to their order; one that the user has set stays."""
    trainer.add_callback(_TensorBoardLayout(trainer))
    if "trackio" in trainer.args.report_to:
        # Read when a Space is made, a static one is written, or `trackio.show` is called.
        os.environ.setdefault(PLOT_ORDER, trackio_plot_order())


class _TensorBoardLayout(TrainerCallback):
    """Writes the layout when something is logged for the first time in a training."""

    def __init__(self, trainer: APRILGRPOTrainer) -> None:
        self._trainer = trainer
        self._written = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._written = False  # each training has a file of its own

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Not sooner: a writer may belong to a callback that comes after this one.
        if self._written or not state.is_world_process_zero:
            return
        self._written = True
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                try:
                    callback.tb_writer.add_custom_scalars(tensorboard_layout())
                    callback.tb_writer.flush()
                except Exception as error:  # the writer may be the user's, and a layout is not worth a training
                    logger.warning(f"TensorBoard gets no layout for APRIL's figures and shows them by name: {error!r}")

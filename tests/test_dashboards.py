"""The dashboards: every figure has its place, and TensorBoard gets the layout beside the figures."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pandas
import pytest
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from transformers.integrations import TensorBoardCallback

from tests.serverless import ServerlessTrainer
from tests.test_batch import round_of_a_small_pool
from trl_april.batch import round_metrics
from trl_april.config import APRILGRPOConfig
from trl_april.dashboards import CHARTS, PLOT_ORDER, PREFIX, order_dashboards, tensorboard_layout, trackio_plot_order
from trl_april.pool import Pool
from trl_april.types import FinishReason, Group


pytestmark = pytest.mark.usefixtures("one_thread")

FIGURES = ("tokens_fraction", "mean_ratio", "clipped_fraction", "effective_sample_size")
BUCKETS = ("age_0", "age_1", "age_2", "age_3+", "length_q1", "length_q2", "length_q3", "length_q4")
CORRECTION = {f"correction/{bucket}/{figure}" for bucket in BUCKETS for figure in FIGURES}


def on_the_dashboard() -> list[str]:
    return [name for section in CHARTS.values() for chart in section.values() for name in chart]


def test_every_figure_has_one_place():
    done, pool = round_of_a_small_pool()
    logged = round_metrics(done, pool, sync_seconds=0.0, max_staleness=5).keys()
    assert sorted(on_the_dashboard()) == sorted([*logged, *CORRECTION, "correction/carried_tokens"])


def test_a_pattern_of_the_layout_matches_its_figure_alone():
    """TensorBoard matches from the beginning: without its end, `length_p1` would be `length_p10` as well."""
    patterns = [p for charts in tensorboard_layout().values() for _, chart in charts.values() for p in chart]
    for pattern, name in zip(patterns, on_the_dashboard(), strict=True):
        others = [PREFIX + other + ending for other in on_the_dashboard() for ending in ("", "_more")]
        assert [other for other in others if re.match(pattern, other)] == [PREFIX + name]


# trackio itself is not installed for tests: TRL imports it wherever it is, which would cost every process of them.


def test_trackio_is_told_the_order_unless_the_user_has(monkeypatch):
    added = []
    trainer = SimpleNamespace(add_callback=added.append, args=SimpleNamespace(report_to=["tensorboard"]))
    monkeypatch.setenv(PLOT_ORDER, "")  # so that it is put back
    monkeypatch.delenv(PLOT_ORDER)
    order_dashboards(trainer)
    assert PLOT_ORDER not in os.environ

    trainer.args.report_to.append("trackio")
    order_dashboards(trainer)
    names = os.environ[PLOT_ORDER].split(",")
    assert names[0] == "train/april/generated_tokens_per_second"
    assert {PREFIX + name for name in on_the_dashboard() if not name.startswith("correction/")} == set(names)

    monkeypatch.setenv(PLOT_ORDER, "train/loss")
    order_dashboards(trainer)
    assert os.environ[PLOT_ORDER] == "train/loss"
    assert len(added) == 3


def test_names_of_the_order_can_be_told_apart():
    """Commas are between them, and a `*` would stand for others."""
    assert re.fullmatch(r"[\w/,]+", trackio_plot_order())


# With the real TensorBoard. The groups are handed over, everything from there on is real.


def resumed_groups() -> list[Group]:
    """Two groups of four samples under version 3; of each, one was begun under version 0 and another under 0 and 2."""
    pool = Pool(2, over_provisioning=1.0, max_staleness=None)
    parts = {0: {0: 2, 1: 1}, 2: {1: 3}, 3: {0: 4, 1: 2, 2: 5, 3: 1}}
    for version, lengths in parts.items():
        pool.begin_round(version)
        if not version:
            for group_id in range(2):
                row = {"prompt": f"{group_id}="}
                pool.admit(group_id, row, [5 + group_id, 9], num_generations=4, max_completion_length=12)
        for group in pool:
            for index, length in lengths.items():
                sample = group.samples[index]
                pool.start(sample)
                pool.record(sample, [10 + index] * length, [-1.0] * length)
                if version == 3:
                    pool.finish(sample, FinishReason.STOP)
                else:
                    pool.park(sample)
    return pool.take()


def make_trainer(model_dir, output_dir, **options) -> ServerlessTrainer:
    args = APRILGRPOConfig(
        str(output_dir),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = ServerlessTrainer(
        model=model_dir,
        reward_funcs=lambda completion_ids, **kwargs: [float(len(ids)) for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"{number}="} for number in range(8)]),
    )
    trainer.groups, trainer.version = resumed_groups(), 3
    return trainer


def read_events(folder) -> tuple[Layout | None, dict[str, list[float]]]:
    """The layout and the figures in TensorBoard's file."""
    events = EventAccumulator(str(folder))
    events.Reload()
    layout = None
    if "custom_scalars__config__" in events.Tags()["tensors"]:
        (event,) = events.Tensors("custom_scalars__config__")
        layout = Layout.FromString(event.tensor_proto.string_val[0])
    return layout, {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_figures_and_the_layout(tiny_model_dir, tmp_path):
    trainer = make_trainer(tiny_model_dir, tmp_path, report_to=["tensorboard"])
    trainer.train()
    assert not trainer._logs["extra"]  # columns are for `log_completions` only
    (folder,) = (tmp_path / "runs").iterdir()
    layout, scalars = read_events(folder)
    assert [category.title for category in layout.category] == [f"APRIL: {section}" for section in CHARTS]
    for category, charts in zip(layout.category, CHARTS.values(), strict=True):
        assert [chart.title for chart in category.chart] == list(charts)
    assert "train/april/correction/age_3+/mean_ratio" in scalars and len(scalars["train/loss"]) == 2
    patterns = [tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag]
    for name in scalars:
        assert sum(bool(re.match(pattern, name)) for pattern in patterns) == name.startswith(PREFIX)

    # A second training goes on in the same folder, in a file of its own.
    trainer.train()
    files = sorted(folder.iterdir())
    assert len(files) == 2 and all(read_events(file)[0] == layout for file in files)


class Writer:
    """A user's own writer, which has no layouts."""

    def __init__(self) -> None:
        self.names = set()

    def add_scalar(self, name, value, step):
        self.names.add(name)

    def add_text(self, *args): ...

    def flush(self): ...

    def close(self): ...


def test_a_writer_without_layouts_costs_a_warning_and_not_the_training(tiny_model_dir, tmp_path, caplog):
    trainer = make_trainer(tiny_model_dir, tmp_path, report_to=[])
    writer = Writer()
    trainer.add_callback(TensorBoardCallback(writer))  # comes after ours
    trainer.train()
    assert trainer.state.global_step == 2 and "train/loss" in writer.names
    assert caplog.text.count("TensorBoard gets no layout for APRIL's figures") == 1


# The table of completions


def test_the_table_of_completions_shows_versions_and_how_often_each_was_resumed(
    tiny_model_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "160")  # the terminal's, so that no cell is broken
    options = {"log_completions": True, "num_completions_to_print": 3, "report_to": []}
    trainer = make_trainer(tiny_model_dir, tmp_path, **options)
    trainer.train()
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    expected = [("0,3", 1, 6), ("0,2,3", 2, 6), ("3", 0, 5), ("3", 0, 1)] * 2
    assert list(zip(table["april_versions"], table["april_resumed"], table["completion"].map(len), strict=True)) == (
        expected
    )
    assert table["april_resumed"].dtype == "int64"

    printed = capsys.readouterr().out.split("Step 1")[1].split("Step 2")[0]
    assert "april_versions" in printed and "april_resumed" in printed
    rows = [line.split("│")[2:-2] for line in printed.splitlines() if line.startswith("│ │")]
    # The reward is the length of the completion.
    shown = [(row[5].strip(), int(row[4]), float(row[2])) for row in rows]
    assert len(shown) == 3 and set(shown) <= set(expected)

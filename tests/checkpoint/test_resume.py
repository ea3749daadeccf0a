"""Checkpoints hold the partial samples: resuming on a real server trains every row once and loses no token."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.trainer.test_trainer import DATASET, ROWS, distinct_characters, make_trainer
from trl_april.checkpoint.rollouts import load_rollouts
from trl_april.errors import CheckpointError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group
from trl_april.pool.state import restore


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]

SAVED = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}


def saved_groups(checkpoint: Path, rows: Sequence[dict] = ROWS, **options: bool) -> dict[int, Group]:
    pool = Pool(1, max_staleness=None, **options)
    restore(pool, load_rollouts(checkpoint).pools, read_row=rows.__getitem__)
    return {group.group_id: group for group in pool}


def numbers(groups) -> Counter:
    return Counter(group.row["number"] for group in groups)


def assert_continued(groups: dict[int, Group], trained: list[Group]) -> None:
    """Every sample of a checkpoint is trained with the tokens that it had there, and with their log-probabilities."""
    assert groups
    by_id = {group.group_id: group for group in trained}
    assert groups.keys() <= by_id.keys()
    for group_id, group in groups.items():
        for before, after in zip(group.samples, by_id[group_id].samples, strict=True):
            assert after.token_ids[: len(before)] == before.token_ids
            assert after.logprobs[: len(before)] == before.logprobs
            assert after.versions[: len(before)] == before.versions
            assert len(before) < len(after) or before.finish_reason is after.finish_reason


@pytest.fixture(scope="module")
def whole_run(server, tiny_model_dir, tmp_path_factory, one_thread):
    """Six steps, each with a checkpoint.

    The first three hold groups, even if no round after the first one admits any.
    """
    folder = tmp_path_factory.mktemp("whole_run")
    trainer = make_trainer(server, tiny_model_dir, folder, over_provisioning=4.0, **SAVED)
    trainer.train()
    return trainer


class TestResuming:
    def test_every_row_is_trained_once_and_every_token_kept(self, server, tiny_model_dir, tmp_path, whole_run, caplog):
        """The log continues, too, and names changed options."""
        checkpoint = Path(whole_run.args.output_dir, "checkpoint-3")
        groups = saved_groups(checkpoint)
        parked = sum(group.num_tokens for group in groups.values())
        resumed = make_trainer(server, tiny_model_dir, tmp_path, top_p=0.9)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert [done.version for done in resumed.rounds] == [3, 4, 5]
        before = [group for done in whole_run.rounds[:3] for group in done.groups]
        assert numbers(before + resumed.trained_groups) == numbers(whole_run.trained_groups)
        assert set(numbers(before + resumed.trained_groups).values()) == {1}
        assert_continued(groups, resumed.trained_groups)
        assert len(resumed.pool) == 0
        resumed.pool.check()
        assert f"{len(groups)} prompt groups in flight: {4 * len(groups)} samples (" in caplog.text
        changes = "over_provisioning 4.0 -> 2.0, save_on_signal True -> False, top_p 1.0 -> 0.9."
        assert f" finished), {parked:,} tokens. Changed since: {changes}\n" in caplog.text
        new = [entry for entry in resumed.state.log_history if entry["step"] > 3 and "loss" in entry]
        # Tokens from before the checkpoint are trained, but not counted as generated again.
        trained, generated = (sum(entry[f"april/{kind}_tokens"] for entry in new) for kind in ("trained", "generated"))
        assert trained == generated + parked and parked > 0
        assert new[0]["april/staleness_max"] >= 1

    def test_fewer_steps_than_the_pool_was_filled_for(self, server, tiny_model_dir, tmp_path, whole_run, caplog):
        checkpoint = Path(whole_run.args.output_dir, "checkpoint-3")
        # Without a bound, which smaller batches might not keep.
        resumed = make_trainer(
            server, tiny_model_dir, tmp_path, max_steps=4, per_device_train_batch_size=8, max_staleness=None
        )
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert len(resumed.trained_groups) == 2
        assert "the rest of training can use only 2" in caplog.text

    def test_complete_training_trains_nothing_more(self, server, tiny_model_dir, tmp_path, whole_run, caplog):
        """`Trainer` would do one more step, for which there are no rows."""
        resumed = make_trainer(server, tiny_model_dir, tmp_path)
        output = resumed.train(resume_from_checkpoint=str(Path(whole_run.args.output_dir, "checkpoint-6")))
        assert (output.global_step, resumed.state.global_step, resumed.rounds) == (6, 6, [])
        assert "nothing is left to train" in caplog.text
        for name, parameter in resumed.model.named_parameters():
            assert torch.equal(parameter, whole_run.model.get_parameter(name))


def test_batch_of_several_steps_is_trained_again_from_its_tokens(server, tiny_model_dir, tmp_path):
    """After a checkpoint in its middle. tests/pool/test_state.py makes it anew where its tokens would be too old."""
    options = {
        "per_device_train_batch_size": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 12,
        "max_completion_length": 100, "over_provisioning": 1.5, "staleness_policy": "ignore", **SAVED,
    }  # fmt: skip
    first = make_trainer(server, tiny_model_dir, tmp_path / "first", **options)
    first.train()
    assert len(first.rounds) == 3
    checkpoint = tmp_path / "first" / "checkpoint-6"
    (state,) = load_rollouts(checkpoint).pools
    assert set(state["in_training"]) == {group.group_id for group in first.rounds[1].groups}
    (state,) = load_rollouts(tmp_path / "first" / "checkpoint-8").pools
    assert state["in_training"] == [], "the batch is trained"
    resumed = make_trainer(server, tiny_model_dir, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    # As in stock GRPO, rounds continue from there, and the batch in training comes first, once more.
    assert [done.version for done in resumed.rounds] == [6, 10]
    assert numbers(first.rounds[1].groups).keys() <= numbers(resumed.trained_groups).keys()
    assert set(numbers(first.rounds[0].groups + resumed.trained_groups).values()) == {1}
    assert_continued(saved_groups(checkpoint), resumed.trained_groups)


class TestStock:
    def stock(self, model_dir: str, folder: Path, **options) -> GRPOTrainer:
        args = GRPOConfig(
            str(folder), per_device_train_batch_size=16, num_generations=4, max_completion_length=8, report_to=[],
            bf16=False, disable_tqdm=True, **options,
        )  # fmt: skip
        return GRPOTrainer(model_dir, distinct_characters, args=args, train_dataset=DATASET)

    def test_checkpoint_of_stock_grpo_is_resumed(self, server, tiny_model_dir, tmp_path, whole_run):
        self.stock(tiny_model_dir, tmp_path, max_steps=2, save_steps=2).train()
        resumed = make_trainer(server, tiny_model_dir, tmp_path)
        resumed.train(resume_from_checkpoint=True)
        assert [done.version for done in resumed.rounds] == [2, 3, 4, 5]
        assert sorted(group.group_id for group in resumed.trained_groups) == list(range(8, 24))
        trained = [group.row["number"] for group in sorted(resumed.trained_groups, key=lambda g: g.group_id)]
        in_order = [group.row["number"] for group in sorted(whole_run.trained_groups, key=lambda g: g.group_id)]
        assert trained == in_order[8:]

    def test_stock_grpo_resumes_our_checkpoint(self, tiny_model_dir, tmp_path, whole_run):
        trainer = self.stock(tiny_model_dir, tmp_path, max_steps=6)
        trainer.train(resume_from_checkpoint=str(Path(whole_run.args.output_dir, "checkpoint-4")))
        assert trainer.state.global_step == 6


def test_dataset_with_other_rows_is_refused(server, tiny_model_dir, tmp_path, whole_run):
    """The checkpoint names rows by index, so completions would be scored with the answers of other prompts."""
    rows = [{**row, "prompt": f"{row['number']}-"} for row in ROWS]
    trainer = make_trainer(server, tiny_model_dir, tmp_path, dataset=Dataset.from_list(rows))
    with pytest.raises(CheckpointError, match="has another prompt.*resume with the dataset.*remove the folder"):
        trainer.train(resume_from_checkpoint=str(Path(whole_run.args.output_dir, "checkpoint-3")))


def test_rows_of_a_map_style_dataset_are_not_written(server, tiny_model_dir, tmp_path):
    """So they may have columns that could not be. tests/checkpoint/test_rollouts.py writes rows of a stream."""
    dataset = Dataset.from_list(ROWS).with_transform(lambda rows: {**rows, "thing": [{n} for n in rows["number"]]})
    options = {"max_steps": 3, "max_completion_length": 8, "over_provisioning": 3.0, **SAVED}  # groups are left over
    make_trainer(server, tiny_model_dir, tmp_path, dataset=dataset, **options).train()
    assert load_rollouts(tmp_path / "checkpoint-1") is not None


def test_limit_of_checkpoints_and_model_only_checkpoints(server, tiny_model_dir, tmp_path):
    options = {"max_completion_length": 8, "max_steps": 3, "save_total_limit": 1, "save_only_model": True, **SAVED}
    make_trainer(server, tiny_model_dir, tmp_path, **options).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert not list(tmp_path.glob("checkpoint-*/april"))

"""Checkpoints hold the partial samples: resuming on a real server trains every row once and loses no token."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.test_trainer import DATASET, ROWS, RecordingTrainer, distinct_characters, make_config, make_trainer
from trl_april.checkpoint import is_complete, load_rollouts
from trl_april.errors import AprilError, CheckpointError, ConfigError
from trl_april.pool import Pool
from trl_april.pool_state import restore
from trl_april.types import Group


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]

SAVED = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}


def saved_groups(checkpoint: Path) -> dict[int, Group]:
    pool = Pool(1, max_staleness=None)
    restore(pool, load_rollouts(checkpoint).pools)
    return {group.group_id: group for group in pool}


def numbers(groups) -> Counter:
    return Counter(group.row["number"] for group in groups)


def assert_continued(groups: dict[int, Group], trained: list[Group], *, may_be_none: bool = False) -> None:
    """Every sample of a checkpoint is trained with the tokens that it had there, and with their log-probabilities.

    A round that the surplus of those before it fills admits none, so that in the end there may be none left.
    """
    assert groups or may_be_none
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
    """Six steps, with a checkpoint at each of them.

    So many groups are in flight that there are some in the first three, even if no round admits any after the first.
    """
    folder = tmp_path_factory.mktemp("whole_run")
    trainer = make_trainer(server, tiny_model_dir, folder, over_provisioning=4.0, **SAVED)
    trainer.train()
    return trainer


class TestResuming:
    @pytest.mark.parametrize("step", [1, 3, 5])
    def test_every_row_is_trained_once_and_every_token_kept(self, server, tiny_model_dir, tmp_path, whole_run, step):
        checkpoint = Path(whole_run.args.output_dir, f"checkpoint-{step}")
        groups = saved_groups(checkpoint)
        resumed = make_trainer(server, tiny_model_dir, tmp_path)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert [done.version for done in resumed.rounds] == list(range(step, 6))
        before = [group for done in whole_run.rounds[:step] for group in done.groups]
        assert numbers(before + resumed.trained_groups) == numbers(whole_run.trained_groups)
        assert set(numbers(before + resumed.trained_groups).values()) == {1}
        assert_continued(groups, resumed.trained_groups, may_be_none=step == 5)
        if step < 5:
            assert any(0 < len(sample) for group in groups.values() for sample in group.samples)
        assert len(resumed.pool) == 0
        resumed.pool.check()

    def test_the_log_goes_on(self, server, tiny_model_dir, tmp_path, whole_run):
        checkpoint = Path(whole_run.args.output_dir, "checkpoint-3")
        parked = sum(group.num_tokens for group in saved_groups(checkpoint).values())
        resumed = make_trainer(server, tiny_model_dir, tmp_path)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        new = [entry for entry in resumed.state.log_history if entry["step"] > 3 and "loss" in entry]
        # What was generated before the checkpoint is trained, but is not counted as generated again.
        trained, generated = (sum(entry[f"april/{kind}_tokens"] for entry in new) for kind in ("trained", "generated"))
        assert trained == generated + parked and parked > 0
        assert new[0]["april/staleness_max"] >= 1

    def test_the_options_decide_which_checkpoint(self, server, tiny_model_dir, tmp_path, whole_run):
        """`True` is the last complete one; what was cut short does not count."""
        folder = tmp_path / "out"
        shutil.copytree(whole_run.args.output_dir, folder)
        for torn in (6, 5):
            (folder / f"checkpoint-{torn}" / "trainer_state.json").unlink()
        state = (folder / "checkpoint-4" / "trainer_state.json").read_text()
        (folder / "checkpoint-4" / "trainer_state.json").write_text(state[: len(state) // 2])
        resumed = make_trainer(server, tiny_model_dir, folder)
        resumed.train(resume_from_checkpoint=True)
        assert [done.version for done in resumed.rounds] == [3, 4, 5]
        with pytest.raises(CheckpointError, match="checkpoint-5' is no complete checkpoint.*checkpoint-3"):
            resumed.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
        with pytest.raises(CheckpointError, match="there is no complete checkpoint in"):
            make_trainer(server, tiny_model_dir, tmp_path / "empty").train(resume_from_checkpoint=True)

    def test_more_steps_and_another_bound_than_before(self, server, tiny_model_dir, tmp_path, whole_run):
        """The pool that ends a training is empty, and training longer goes on with the next rows."""
        resumed = make_trainer(server, tiny_model_dir, tmp_path, max_steps=8, over_provisioning=3.0, max_staleness=7)
        resumed.train(resume_from_checkpoint=str(Path(whole_run.args.output_dir, "checkpoint-6")))
        # Which of them first depends on which was finished first.
        assert sorted(group.group_id for group in resumed.trained_groups) == list(range(24, 32))
        assert set(numbers(whole_run.trained_groups + resumed.trained_groups).values()) == {1}

    def test_fewer_steps_than_the_pool_was_filled_for(self, server, tiny_model_dir, tmp_path, whole_run, caplog):
        checkpoint = Path(whole_run.args.output_dir, "checkpoint-3")
        # Without a bound, which smaller batches might not keep.
        resumed = make_trainer(
            server, tiny_model_dir, tmp_path, max_steps=4, per_device_train_batch_size=8, max_staleness=None
        )
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert len(resumed.trained_groups) == 2
        assert "can use 2 of them" in caplog.text
        resumed.pool.check()

    def test_twice_in_a_row_with_one_trainer(self, server, tiny_model_dir, tmp_path):
        trainer = make_trainer(server, tiny_model_dir, tmp_path, max_steps=4, **{**SAVED, "save_steps": 2})
        trainer.train()
        first = [group for done in trainer.rounds[:2] for group in done.groups]
        del trainer.rounds[:]
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert [done.version for done in trainer.rounds] == [2, 3]
        assert set(numbers(first + trainer.trained_groups).values()) == {1}

    def test_epochs_and_a_stream(self, server, tiny_model_dir, tmp_path):
        """Three epochs of two rounds; the pool of a checkpoint holds rows of the next epoch."""
        rows = [{"prompt": f"{number}+", "number": number} for number in range(8)]
        for name, dataset, length in (
            ("map", Dataset.from_list(rows), {"num_train_epochs": 3, "max_steps": -1}),
            ("stream", IterableDataset.from_generator(lambda: iter(rows)), {"max_steps": 6}),
        ):
            options = {
                "dataset": dataset, "max_completion_length": 60, "over_provisioning": 4.0, **length, **SAVED,
            }  # fmt: skip
            trainer = make_trainer(server, tiny_model_dir, tmp_path / name, **options)
            trainer.train()
            for step in (2, 3):
                checkpoint = tmp_path / name / f"checkpoint-{step}"
                groups = saved_groups(checkpoint)
                resumed = make_trainer(server, tiny_model_dir, tmp_path / f"{name}-{step}", **options)
                resumed.train(resume_from_checkpoint=str(checkpoint))
                before = [group for done in trainer.rounds[:step] for group in done.groups]
                assert set(numbers(before + resumed.trained_groups).values()) == {3}
                assert_continued(groups, resumed.trained_groups)

    def test_a_training_that_is_complete_trains_nothing_more(
        self, server, tiny_model_dir, tmp_path, whole_run, caplog
    ):
        """`Trainer` alone would do one step more, for which there are no rows."""
        resumed = make_trainer(server, tiny_model_dir, tmp_path)
        output = resumed.train(resume_from_checkpoint=str(Path(whole_run.args.output_dir, "checkpoint-6")))
        assert (output.global_step, resumed.state.global_step, resumed.rounds) == (6, 6, [])
        assert "nothing is left to train" in caplog.text
        for name, parameter in resumed.model.named_parameters():
            assert torch.equal(parameter, whole_run.model.get_parameter(name))

    def test_rows_need_not_be_read_again(self, server, tiny_model_dir, tmp_path, whole_run):
        """Pinned: the rows of partial samples are in the checkpoint, so those who go on with other data lose none."""
        checkpoint = Path(whole_run.args.output_dir, "checkpoint-3")
        groups = saved_groups(checkpoint)
        other = Dataset.from_list([{"prompt": f"{number}-", "number": 1000 + number} for number in range(48)])
        resumed = make_trainer(server, tiny_model_dir, tmp_path, dataset=other)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_continued(groups, resumed.trained_groups)
        ours = {group.row["number"] for group in groups.values()}
        assert {group.row["number"] for group in resumed.trained_groups if group.row["number"] < 1000} == ours


class TestBatchesOfSeveralSteps:
    """A generation batch that is trained for several optimiser steps, saved in the middle of them."""

    OPTIONS = {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 12,
        "max_completion_length": 100,
        "over_provisioning": 1.5,
        **SAVED,
    }

    @pytest.mark.parametrize(("policy", "over"), [("wait", "too old"), ("ignore", "kept")])
    def test_it_is_trained_again_from_its_tokens_or_anew_where_they_would_be_too_old(
        self, server, tiny_model_dir, tmp_path, policy, over
    ):
        options = {**self.OPTIONS, "staleness_policy": policy}
        trainer = make_trainer(server, tiny_model_dir, tmp_path / "first", **options)
        trainer.train()
        assert len(trainer.rounds) == 3
        checkpoint = tmp_path / "first" / "checkpoint-6"
        (state,) = load_rollouts(checkpoint).pools
        batch = {group.group_id for group in trainer.rounds[1].groups}
        assert set(state["in_training"]) == batch
        resumed = make_trainer(server, tiny_model_dir, tmp_path / "second", **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        # As in stock GRPO: rounds go on from there, so the batch in training comes first and once more.
        assert [done.version for done in resumed.rounds] == [6, 10]
        trained = resumed.trained_groups
        rows = {group.row["number"] for group in trainer.rounds[1].groups}
        assert rows <= {group.row["number"] for group in trained}
        assert set(numbers(trainer.rounds[0].groups + trained).values()) == {1}
        others = {i: group for i, group in saved_groups(checkpoint).items() if i not in batch}
        assert_continued(others, trained)
        again = {i: group for i, group in saved_groups(checkpoint).items() if i in batch}
        if over == "kept":
            assert_continued(again, trained)
        for done in resumed.rounds:
            ages = [done.version - v for g in done.groups for s in g.samples for v in s.versions]
            assert policy == "ignore" or max(ages) <= 5

    def test_at_the_end_of_a_batch_nothing_is_trained_again(self, server, tiny_model_dir, tmp_path):
        trainer = make_trainer(server, tiny_model_dir, tmp_path, **self.OPTIONS)
        trainer.train()
        (state,) = load_rollouts(tmp_path / "checkpoint-8").pools
        assert state["in_training"] == []


class TestStock:
    def stock(self, model_dir: str, folder: Path, **options) -> GRPOTrainer:
        args = GRPOConfig(
            str(folder), per_device_train_batch_size=16, num_generations=4, max_completion_length=8, report_to=[],
            bf16=False, disable_tqdm=True, **options,
        )  # fmt: skip
        return GRPOTrainer(model_dir, distinct_characters, args=args, train_dataset=DATASET)

    def test_a_checkpoint_of_stock_grpo_is_resumed(self, server, tiny_model_dir, tmp_path, whole_run):
        self.stock(tiny_model_dir, tmp_path, max_steps=2, save_steps=2).train()
        resumed = make_trainer(server, tiny_model_dir, tmp_path)
        resumed.train(resume_from_checkpoint=True)
        assert [done.version for done in resumed.rounds] == [2, 3, 4, 5]
        assert sorted(group.group_id for group in resumed.trained_groups) == list(range(8, 24))
        trained = [group.row["number"] for group in sorted(resumed.trained_groups, key=lambda g: g.group_id)]
        in_order = [group.row["number"] for group in sorted(whole_run.trained_groups, key=lambda g: g.group_id)]
        assert trained == in_order[8:]

    def test_stock_grpo_resumes_ours(self, server, tiny_model_dir, tmp_path, whole_run):
        checkpoint = Path(whole_run.args.output_dir, "checkpoint-4")
        trainer = self.stock(tiny_model_dir, tmp_path, max_steps=6)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 6

    def test_our_trainer_with_april_off_resumes_both(self, tiny_model_dir, tmp_path, whole_run):
        checkpoint = Path(whole_run.args.output_dir, "checkpoint-4")
        args = make_config(type("S", (), {"base_url": None}), tmp_path, use_vllm=False, max_completion_length=8)
        trainer = RecordingTrainer(tiny_model_dir, distinct_characters, args=args, train_dataset=DATASET)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 6


class TestDynamicSampling:
    def test_scores_and_rejections_go_on(self, server, tiny_model_dir, tmp_path):
        def every_third(completions, number, log_extra=None, **kwargs):
            rewards = distinct_characters(completions)
            if log_extra is not None:
                log_extra("number", list(number))
            # No two alike, or a useful group could be rejected, too.
            return [
                reward + index / 1000 if n % 3 else 0.0
                for index, (reward, n) in enumerate(zip(rewards, number, strict=True))
            ]

        options = {
            "dynamic_sampling": True, "max_completion_length": 60, "reward": every_third, "over_provisioning": 4.0,
            **SAVED,
        }  # fmt: skip
        trainer = make_trainer(server, tiny_model_dir, tmp_path / "first", **options)
        trainer.train()
        for step in (2, 4):
            checkpoint = tmp_path / "first" / f"checkpoint-{step}"
            (state,) = load_rollouts(checkpoint).pools
            resumed = make_trainer(server, tiny_model_dir, tmp_path / f"{step}", **options)
            resumed.train(resume_from_checkpoint=str(checkpoint))
            before = [group for done in trainer.rounds[:step] for group in done.groups]
            trained = before + resumed.trained_groups
            assert len(trained) == 24 and set(numbers(trained).values()) == {1}
            assert all(group.row["number"] % 3 for group in trained)
            assert resumed.pool.ledger.groups_rejected >= state["groups_rejected"]
            useful = {i: g for i, g in saved_groups(checkpoint).items() if g.row["number"] % 3}
            assert_continued(useful, resumed.trained_groups, may_be_none=step == 4)
            assert len(resumed.pool) == 0

    def test_other_reward_functions_score_again(self, server, tiny_model_dir, tmp_path):
        options = {"dynamic_sampling": True, "max_completion_length": 60, **SAVED}
        make_trainer(server, tiny_model_dir, tmp_path, max_steps=3, **options).train()
        two = [distinct_characters, distinct_characters]
        resumed = make_trainer(server, tiny_model_dir, tmp_path / "second", reward=two, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.state.global_step == 6


class TestRefusals:
    @pytest.fixture
    def checkpoint(self, whole_run, tmp_path) -> Path:
        return Path(shutil.copytree(Path(whole_run.args.output_dir, "checkpoint-3"), tmp_path / "checkpoint-3"))

    def test_another_number_of_generations(self, server, tiny_model_dir, tmp_path, checkpoint):
        # Without a bound, which batches of fewer groups might not keep.
        trainer = make_trainer(server, tiny_model_dir, tmp_path, num_generations=8, max_staleness=None)
        with pytest.raises(CheckpointError, match="has 4 samples, and num_generations is 8.*remove the folder"):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        shutil.rmtree(checkpoint / "april")
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 6

    def test_a_bound_that_cannot_be_kept(self, server, tiny_model_dir, tmp_path, checkpoint):
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, over_provisioning=1.0, max_staleness=0, per_device_train_batch_size=8
        )
        with pytest.raises(CheckpointError, match="cannot all be trained within a staleness of 0"):
            trainer.train(resume_from_checkpoint=str(checkpoint))

    def test_damage_is_found_before_anything_is_loaded(self, server, tiny_model_dir, tmp_path, checkpoint):
        (path,) = (checkpoint / "april").glob("pool-*")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        trainer = make_trainer(server, tiny_model_dir, tmp_path)
        with pytest.raises(CheckpointError, match=f"{path.name} is damaged: .*Resume from an earlier checkpoint"):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 0 and trainer.pool is None

    def test_a_column_that_cannot_be_written(self, server, tiny_model_dir, tmp_path):
        class Unwritable:
            pass

        dataset = Dataset.from_list(ROWS)
        dataset.set_transform(lambda rows: {**rows, "thing": [Unwritable() for _ in rows["prompt"]]})
        trainer = make_trainer(server, tiny_model_dir, tmp_path, dataset=dataset, max_steps=1, **SAVED)
        with pytest.raises(ConfigError, match="Column 'thing' of the training dataset holds a .*Unwritable"):
            trainer.train()
        trainer = make_trainer(server, tiny_model_dir, tmp_path, dataset=dataset, max_steps=1, max_completion_length=8)
        trainer.train()  # nothing is saved, so nothing has to be written

    def test_refusals_are_errors_of_ours(self):
        assert issubclass(CheckpointError, AprilError) and issubclass(CheckpointError, ValueError)


class TestTheFolder:
    def test_a_complete_one_is_not_written_over(self, server, tiny_model_dir, tmp_path):
        """Saved a second time at one step, as at an epoch's end, the weights in it are those that they are."""

        class Again(TrainerCallback):
            def on_save(self, args, state, control, **kwargs):
                trainer.save_model = trainer._save_optimizer_and_scheduler = fail
                state.log_history.append({"step": state.global_step, "noted": "since"})
                trainer._save_checkpoint(trainer.model, trial=None)

        def fail(*args, **kwargs):
            raise AssertionError("it is written over")

        options = {"max_steps": 1, "max_completion_length": 8, "callbacks": [Again()], **SAVED}
        trainer = make_trainer(server, tiny_model_dir, tmp_path, **options)
        trainer.train()
        assert is_complete(tmp_path / "checkpoint-1")
        assert "noted" in (tmp_path / "checkpoint-1" / "trainer_state.json").read_text()
        assert not list((tmp_path / "checkpoint-1").glob("*.tmp"))

    def test_one_file_per_process_and_an_index(self, whole_run):
        checkpoint = Path(whole_run.args.output_dir, "checkpoint-2")
        folder = checkpoint / "april"
        index = json.loads((folder / "index.json").read_text())
        handed_out = 2 * 4 + len(saved_groups(checkpoint))
        assert (index["format"], index["processes"], index["source"]["handed_out"]) == (2, 1, handed_out)
        assert sorted(path.name for path in folder.iterdir()) == [
            "index.json", f"pool-{index['save_id']}-00000-of-00001.safetensors",
        ]  # fmt: skip

    def test_limits_and_model_only_checkpoints(self, server, tiny_model_dir, tmp_path):
        options = {"max_completion_length": 8, "max_steps": 3, **SAVED}
        make_trainer(server, tiny_model_dir, tmp_path / "limit", save_total_limit=1, **options).train()
        assert [path.name for path in (tmp_path / "limit").glob("checkpoint-*")] == ["checkpoint-3"]
        make_trainer(server, tiny_model_dir, tmp_path / "model", save_only_model=True, **options).train()
        assert not list((tmp_path / "model").glob("checkpoint-*/april"))

"""The trainer on the real server: what training with partial rollouts must keep, run for real."""

from __future__ import annotations

import _thread
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import requests
import torch
from datasets import Dataset, IterableDataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from tests.weight_folders import left_of, weight_folders
from trl_april.auto.factor_chooser import FactorChooser
from trl_april.config import APRILGRPOConfig
from trl_april.dashboards import tensorboard_layout
from trl_april.errors import ConfigError, ServerError
from trl_april.report import read_run
from trl_april.request import RequestMaker
from trl_april.rollout import RolloutDriver
from trl_april.server import LocalServer
from trl_april.server_load import server_load
from trl_april.trainer import APRILGRPOTrainer


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]


def rows_of(count: int) -> Dataset:
    return Dataset.from_list([{"prompt": f"{number}+{number}=", "number": number} for number in range(count)])


DATASET = rows_of(48)
ROWS = DATASET.to_list()


def distinct_characters(completions, **kwargs) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


class RecordingTrainer(APRILGRPOTrainer):
    """Keeps every batch, and the weights of every policy version."""

    def __init__(self, *args, **kwargs) -> None:
        self.rounds = []
        self.weights = {}
        super().__init__(*args, **kwargs)

    def _run_round(self):
        done = super()._run_round()
        self.rounds.append(done)
        self.weights[done.version] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return done

    @property
    def trained_groups(self):
        return [group for done in self.rounds for group in done.groups]


def make_config(server: LocalServer, output_dir: Path, **options) -> APRILGRPOConfig:
    defaults = {
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 200,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "disable_tqdm": True,
    }
    return APRILGRPOConfig(str(output_dir), vllm_server_base_url=server.base_url, **{**defaults, **options})


def make_trainer(
    server, model_dir, output_dir, *, dataset=DATASET, reward=distinct_characters, trainer_class=None, **options
):
    trainer_options = {
        name: options.pop(name) for name in ("callbacks", "eval_dataset", "peft_config") if name in options
    }
    return (trainer_class or RecordingTrainer)(
        model=model_dir,
        reward_funcs=reward,
        args=make_config(server, output_dir, **options),
        train_dataset=dataset,
        **trainer_options,
    )


def running_requests(server: LocalServer) -> int:
    """Requests that the server runs or has queued, by its own account."""
    load = server_load(requests, server.base_url, timeout=10)
    return load.running + load.waiting


def wait_until_idle(server: LocalServer, seconds: float = 10) -> int:
    deadline = time.monotonic() + seconds
    while running_requests(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    return running_requests(server)


@pytest.fixture(scope="module")
def long_run(server, tiny_model_dir, tmp_path_factory, one_thread):
    """One run with samples of three policy versions and more, used by several tests."""
    trainer = make_trainer(
        server,
        tiny_model_dir,
        tmp_path_factory.mktemp("long_run"),
        over_provisioning=5.0,  # many wait for long
        max_completion_length=500,
        max_steps=10,
    )
    trainer.train()
    return trainer


class TestConservation:
    def test_the_pool_is_empty_when_max_steps_is_reached(self, long_run):
        assert len(long_run.pool) == 0
        assert long_run.pool.ledger.groups_taken == 10 * 4

    def test_every_generated_token_is_trained(self, long_run):
        trained = sum(group.num_tokens for group in long_run.trained_groups)
        assert trained == long_run.pool.ledger.tokens_taken == long_run.pool.ledger.tokens_generated
        assert trained == sum(done.generated_tokens for done in long_run.rounds)

    def test_no_group_is_trained_twice(self, long_run):
        assert sorted(group.group_id for group in long_run.trained_groups) == list(range(40))

    def test_something_was_carried_over(self, long_run):
        # Otherwise the other tests would prove nothing.
        assert sum(done.carried_tokens for done in long_run.rounds) > 0
        assert sum(done.aborted_requests for done in long_run.rounds) > 0


class TestRunLog:
    def test_the_folder_tells_what_happened(self, long_run):
        """The log of rounds in `output_dir`, which is written without any option."""
        run = read_run(long_run.args.output_dir)
        assert run.has_log and run.notes == []
        assert run.options["quota"] == 4 and run.options["over_provisioning"] == 5.0
        assert [one.version for one in run.rounds] == [done.version for done in long_run.rounds]
        assert [step.step for step in run.steps] == list(range(1, 11))
        for read, done in zip(run.rounds, long_run.rounds, strict=True):
            assert sum(read.ages.values()) == sum(group.num_tokens for group in done.groups)
            assert read.metrics["generated_tokens"] == done.generated_tokens
            assert sum(read.launched_lengths.values()) <= done.requests
            assert read.generation[1] - read.generation[0] == pytest.approx(done.seconds, abs=1e-4)
        logged = [entry["reward"] for entry in long_run.state.log_history if "loss" in entry]
        assert [one.reward for one in run.rounds] == pytest.approx(logged)
        # Sync, round, scoring and the trainer's step come one after the other.
        spans = [span for one in run.rounds for span in (one.sync, one.generation, one.scoring)]
        spans = sorted([*spans, *(span for step in run.steps for span in step.training)])
        assert all(begin >= end - 1e-4 for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
        sizes = [one.metrics["correction/age_0/effective_sample_size"] for one in run.rounds[:1]]
        assert sizes == pytest.approx([1.0], abs=1e-3)


class TestLogProbabilities:
    def test_samples_span_three_versions(self, long_run):
        versions = [
            len({segment.version for segment in sample.segments})
            for group in long_run.trained_groups
            for sample in group.samples
        ]
        assert max(versions) >= 3

    def test_recorded_equal_those_of_the_tagged_version(self, long_run, tiny_model_dir):
        """To 1e-4 in float32, for every token, under the weights of the version that its segment is tagged with."""
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
        parameters = dict(model.named_parameters())
        compared = 0
        for version, weights in long_run.weights.items():
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(weights[name])
            for group in long_run.trained_groups:
                for sample in group.samples:
                    here = torch.tensor([v == version for v in sample.versions])
                    if not here.any():
                        continue
                    prompt, completion = torch.tensor(group.prompt_ids), torch.tensor(sample.token_ids.tolist())
                    with torch.no_grad():
                        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
                    expected = logits.log_softmax(-1).gather(-1, completion[:, None]).squeeze(-1)
                    recorded = torch.tensor(sample.logprobs.tolist())
                    assert (expected - recorded)[here].abs().max() < 1e-4
                    compared += int(here.sum())
        assert compared == long_run.pool.ledger.tokens_taken

    def test_versions_differ_by_more_than_the_tolerance(self, long_run):
        """The test above means something: the same tokens under the version after differ."""
        differences = [
            entry["sampling/sampling_logp_difference/max"]
            for entry in long_run.state.log_history
            if entry.get("april/staleness_max", 0) > 0
        ]
        assert differences and max(differences) > 1e-2

    def test_on_policy_tokens_need_no_correction(self, long_run):
        first = long_run.state.log_history[0]
        assert first["april/staleness_max"] == 0
        assert first["sampling/sampling_logp_difference/max"] < 1e-4


class TestStaleness:
    def test_wait_keeps_the_bound_of_one(self, server, tiny_model_dir, tmp_path):
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, max_staleness=1, over_provisioning=2.0, max_completion_length=300
        )
        trainer.train()
        ages = [
            done.version - segment.version
            for done in trainer.rounds
            for group in done.groups
            for sample in group.samples
            for segment in sample.segments
        ]
        assert max(ages) == 1  # reached, and not passed
        assert len(trainer.pool) == 0

    def test_a_batch_of_many_steps_lowers_over_provisioning(self, server, tiny_model_dir, tmp_path, caplog):
        """4 optimiser steps per generation batch age a waiting group by 4 versions: with a bound of 5 it waits "
        "once."""
        trainer = make_trainer(
            server,
            tiny_model_dir,
            tmp_path,
            per_device_train_batch_size=4,
            steps_per_generation=4,
            over_provisioning=3.0,
            max_steps=12,
            max_completion_length=60,
        )
        trainer.train()
        assert "over_provisioning is lowered from 3.0 to 2" in caplog.text
        assert trainer.pool.target == 8
        assert len(trainer.rounds) == 3 and len(trainer.pool) == 0
        assert [done.version for done in trainer.rounds] == [0, 4, 8]

    def test_auto_changes_between_rounds_and_says_so(self, server, tiny_model_dir, tmp_path, caplog):
        caplog.set_level("INFO", logger="trl_april.session")
        trainer = make_trainer(server, tiny_model_dir, tmp_path, over_provisioning="auto", max_steps=10)
        trainer.train()
        factors = [done.over_provisioning for done in trainer.rounds]
        logged = [entry["april/over_provisioning"] for entry in trainer.state.log_history if "loss" in entry]
        assert logged == factors
        assert factors[:3] == [2.0] * 3
        assert 1.0 <= min(factors) and max(factors) <= 6.0
        said = re.findall(r"over_provisioning changes from ([\d.]+) to ([\d.]+): predicted", caplog.text)
        changes = [pair for pair in zip(factors, factors[1:], strict=False) if pair[0] != pair[1]]
        assert [(float(old), float(new)) for old, new in said] == changes
        assert len(trainer.pool) == 0

    def test_auto_without_a_limit_of_the_completions(self, server, tiny_model_dir, tmp_path, monkeypatch):
        """It is the server's context then. And for the connections of all that may be in flight there is room."""
        room = []
        monkeypatch.setattr("trl_april.session.make_room", lambda connections: room.append(connections) or 10**6)
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, over_provisioning="auto", max_completion_length=None, max_steps=5
        )
        trainer.train()
        assert len(trainer.rounds) == 5 and len(trainer.pool) == 0 and room == [8 * 4]

    def test_auto_predicts_while_the_trainer_trains(self, server, tiny_model_dir, tmp_path, monkeypatch):
        """The first prediction waits for a training step, which would not come if the trainer waited for it."""
        trainer = make_trainer(server, tiny_model_dir, tmp_path, over_provisioning="auto", max_steps=4)
        trains, predicted = threading.Event(), []
        predict, training_step = FactorChooser.predict, trainer.training_step

        def beside_the_training(self):
            assert trains.wait(60)
            predicted.append(predict(self))
            return predicted[-1]

        def step(*args, **kwargs):
            trains.set()
            return training_step(*args, **kwargs)

        monkeypatch.setattr(FactorChooser, "predict", beside_the_training)
        monkeypatch.setattr(trainer, "training_step", step)
        trainer.train()
        assert predicted[:2] == [None, None] and all(predicted[2].values()), "after three rounds it is time to choose"
        assert not [thread for thread in threading.enumerate() if "trl-april-predictor" in thread.name]


class TestSameRowsAsStock:
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_synchronous_batches_are_those_of_the_data_loader(self, server, tiny_model_dir, tmp_path, shuffle):
        """With over_provisioning=1.0 each batch has just the rows that stock GRPO would generate for."""
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, over_provisioning=1.0, shuffle_dataset=shuffle, max_completion_length=8
        )
        asked = []
        stock = trainer._generate_and_score_completions

        def remember(inputs):
            asked.append([row["prompt"] for row in inputs[::4]])
            return stock(inputs)

        trainer._generate_and_score_completions = remember
        trainer.train()
        assert asked == [[group.row["prompt"] for group in done.groups] for done in trainer.rounds]

    def test_two_epochs_train_every_row_twice(self, server, tiny_model_dir, tmp_path):
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, dataset=DATASET.select(range(12)), max_steps=-1, num_train_epochs=2,
            max_completion_length=40,
        )  # fmt: skip
        trainer.train()
        assert Counter(group.row["number"] for group in trainer.trained_groups) == dict.fromkeys(range(12), 2)
        assert len(trainer.pool) == 0

    def test_a_stream_of_unknown_length(self, server, tiny_model_dir, tmp_path):
        dataset = IterableDataset.from_generator(lambda: iter(ROWS[:10]))
        trainer = make_trainer(server, tiny_model_dir, tmp_path, dataset=dataset, max_steps=5, max_completion_length=8)
        trainer.train()
        assert len(trainer.trained_groups) == 20 and len(trainer.pool) == 0
        # 10 rows hold two batches of 4; the rest of an epoch is dropped, as in stock GRPO.
        assert max(Counter(group.row["number"] for group in trainer.trained_groups).values()) <= 3


class TestDropIn:
    def test_everything_around_the_rollouts_works_as_in_stock(self, server, tiny_model_dir, tmp_path):
        """Evaluation, callbacks, extra dataset columns, log_completions, gradient accumulation, async rewards."""
        seen = []

        class Steps(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                seen.append(state.global_step)
                folder = tmp_path / f"checkpoint-of-my-own-{state.global_step}"
                folder.mkdir()
                trainer._session.save(folder)
                assert not trainer._session._in_training, "what this step has trained would be trained again"

        async def numbers_arrive(prompts, completions, number, completion_ids, trainer_state, log_metric, **kwargs):
            assert [f"{n}+{n}=" for n in number] == prompts
            assert all(isinstance(ids, list) and ids for ids in completion_ids)
            log_metric("my_metric", 3.0)
            return [len(completion) / 10 for completion in completions]

        trainer = make_trainer(
            server,
            tiny_model_dir,
            tmp_path,
            reward=[distinct_characters, numbers_arrive],
            reward_weights=[1.0, 0.5],
            callbacks=[Steps()],
            eval_dataset=DATASET.select(range(2)),
            eval_strategy="steps",
            eval_steps=2,
            per_device_eval_batch_size=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=4,
            max_completion_length=30,
            log_completions=True,
            report_to=["tensorboard"],
            beta=0.1,
        )
        trainer.train()
        assert seen == [1, 2, 3, 4]
        assert len(trainer.rounds) == 4 and len(trainer.pool) == 0
        training = [entry for entry in trainer.state.log_history if "loss" in entry]
        evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
        assert len(training) == 4 and len(evaluations) == 2
        assert all(entry["my_metric"] == 3.0 and "kl" in entry for entry in training)
        assert not any(key.startswith("eval_april") for entry in evaluations for key in entry)
        self.look_at_the_completions(tmp_path / "completions", trainer.rounds)
        self.look_at_tensorboard(tmp_path / "runs")

    def look_at_the_completions(self, folder, rounds):
        """Steps 1 and 3 show the training batch. At 2 and 4 an evaluation of half as many completions came last."""
        files = sorted(folder.glob("*.parquet"))
        tables = [pandas.read_parquet(file) for file in files]
        assert len(tables) == 4
        for table, done in zip(tables, rounds, strict=True):
            samples = [sample for group in done.groups for sample in group.samples]
            versions = [",".join(map(str, sorted(set(sample.versions)))) for sample in samples]
            resumed = [len(sample.segments) - 1 for sample in samples]
            if done.version % 2:
                versions, resumed = versions[8:] + [""] * 8, resumed[8:] + [0] * 8
            assert list(table["april_versions"]) == versions
            assert list(table["april_resumed"]) == resumed
            assert table.dtypes.equals(tables[0].dtypes)

    def look_at_tensorboard(self, folder):
        (run,) = folder.iterdir()
        events = EventAccumulator(str(run))
        events.Reload()
        patterns = [p for charts in tensorboard_layout().values() for _, chart in charts.values() for p in chart]
        ours = [name for name in events.Tags()["scalars"] if name.startswith("train/april/")]
        assert "train/april/trained_tokens_per_second" in ours
        for name in ours:
            assert sum(bool(re.match(pattern, name)) for pattern in patterns) == 1, name
        assert "custom_scalars__config__" in events.Tags()["tensors"]

    def test_conversational_prompts(self, server, tiny_model_dir, tmp_path):
        dataset = Dataset.from_list(
            [{"prompt": [{"role": "user", "content": row["prompt"]}], "number": row["number"]} for row in ROWS]
        )

        def has_one_message(prompts, completions, **kwargs):
            assert all(len(completion) == 1 and completion[0]["role"] == "assistant" for completion in completions)
            return [float(len(completion[0]["content"])) for completion in completions]

        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, dataset=dataset, reward=has_one_message, max_steps=2,
            max_completion_length=30,
        )  # fmt: skip
        trainer.train()
        tokenizer = trainer.processing_class
        for group in trainer.trained_groups:
            expected = tokenizer.apply_chat_template(group.row["prompt"], add_generation_prompt=True, tokenize=False)
            assert tokenizer.decode(group.prompt_ids) == expected

    def test_a_subclass_goes_on_with_the_rows_of_the_batch(self, server, tiny_model_dir, tmp_path):
        """As in stock, where the i-th of the inputs is what the i-th completion answers."""
        seen = []

        class Watching(RecordingTrainer):
            def _generate_and_score_completions(self, inputs):
                batch = super()._generate_and_score_completions(inputs)
                seen.append([row["number"] for row in inputs])
                return batch

        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, trainer_class=Watching, max_steps=4, max_completion_length=40
        )
        trainer.train()
        assert seen == [[g.row["number"] for g in done.groups for _ in g.samples] for done in trainer.rounds]
        assert any(sample.segments[0].version < done.version
                   for done in trainer.rounds for g in done.groups for sample in g.samples)  # fmt: skip

    def test_lora_adapters(self, server, tiny_model_dir, tmp_path):
        """The merged weights reach the server: the canary and the on-policy log-probabilities agree."""
        from peft import LoraConfig

        trainer = make_trainer(
            server,
            tiny_model_dir,
            tmp_path,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"),
            over_provisioning=1.0,
            max_steps=3,
            max_completion_length=30,
            disable_dropout=True,
        )
        trainer.train()
        training = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(training) == 3
        assert all(entry["sampling/sampling_logp_difference/max"] < 1e-4 for entry in training)

    def test_checkpoints_are_written_and_resumed(self, server, tiny_model_dir, tmp_path):
        options = {"max_steps": 4, "max_completion_length": 20, "save_strategy": "steps", "save_steps": 2}
        make_trainer(server, tiny_model_dir, tmp_path, **options).train()
        assert (tmp_path / "README.md").exists()  # the model card, which names APRIL
        resumed = make_trainer(server, tiny_model_dir, tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert [done.version for done in resumed.rounds] == [2, 3]
        assert resumed.state.global_step == 4 and len(resumed.pool) == 0

    def test_training_twice_with_one_trainer(self, server, tiny_model_dir, tmp_path):
        trainer = make_trainer(server, tiny_model_dir, tmp_path, max_steps=2, max_completion_length=30)
        trainer.train()
        trainer.train()
        assert len(trainer.rounds) == 4 and len(trainer.pool) == 0
        (second_start,) = [entry for entry in trainer.state.log_history if entry["step"] == 1 and "loss" in entry]
        assert second_start["april/staleness_max"] == 0
        assert second_start["sampling/sampling_logp_difference/max"] < 1e-4

    def test_a_second_interrupt_while_it_closes_leaves_nothing_behind(
        self, server, tiny_model_dir, tmp_path, monkeypatch
    ):
        """Of a notebook whose cell is stopped twice, and then run again."""
        trainer = make_trainer(server, tiny_model_dir, tmp_path, max_steps=2, max_completion_length=30)
        close = RolloutDriver.close

        async def interrupted(driver):
            await close(driver)
            raise RuntimeError("as Ctrl-C would")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="as Ctrl-C would"):
            patch.setattr(RolloutDriver, "close", interrupted)
            trainer.train()
        assert not [thread for thread in threading.enumerate() if thread.name == "trl-april-rollouts"]
        del trainer.rounds[:]
        trainer.train()
        assert [done.version for done in trainer.rounds] == [0, 1]

    def test_an_evaluation_after_training_has_the_weights_of_the_moment(
        self, server, tiny_model_dir, tmp_path, monkeypatch
    ):
        """They may be those of the best model, which has been loaded since."""
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, max_steps=1, max_completion_length=8, eval_dataset=rows_of(4),
            eval_strategy="steps", eval_steps=1,
        )  # fmt: skip
        trainer.train()
        synced = []
        sync = trainer.vllm_generation.sync_weights
        monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: synced.append(sync()))
        trainer.evaluate()
        trainer.evaluate()
        assert len(synced) == 1

    def test_nothing_of_ours_outlives_training(self, server, tiny_model_dir, tmp_path):
        before = weight_folders()  # somebody else's
        trainer = make_trainer(server, tiny_model_dir, tmp_path, max_steps=1, max_completion_length=8)
        trainer.train()
        assert not [thread for thread in threading.enumerate() if thread.name == "trl-april-rollouts"]
        assert not left_of(weight_folders() - before)


class CountingReward:
    """Differs within the group of an even number, and is equal within that of an odd one."""

    def __init__(self) -> None:
        self.scored = Counter()

    def __call__(self, completions, number, log_extra, log_metric, **kwargs) -> list[float]:
        self.scored.update(number)
        log_extra("row", list(number))
        log_metric("calls", 1.0)
        return [0.0 if value % 2 else float(index) for index, value in enumerate(number)]


def all_equal(completions, **kwargs) -> list[float]:
    return [1.0] * len(completions)


@pytest.fixture(scope="module")
def dynamic_run(server, tiny_model_dir, tmp_path_factory):
    """A training in which half of the rows are rejected, and its reward function."""
    reward = CountingReward()
    trainer = make_trainer(
        server, tiny_model_dir, tmp_path_factory.mktemp("dynamic"), dynamic_sampling=True, reward=reward,
        log_completions=True, num_completions_to_print=0,
    )  # fmt: skip
    trainer.train()
    return trainer, reward


class TestDynamicSampling:
    def test_every_trained_group_has_differing_rewards(self, dynamic_run):
        trainer, _ = dynamic_run
        assert len(trainer.trained_groups) == 6 * 4
        for group in trainer.trained_groups:
            assert group.row["number"] % 2 == 0
            assert len({rewards[0] for rewards in group.score.rewards}) > 1
        logged = [entry["frac_reward_zero_std"] for entry in trainer.state.log_history if "reward" in entry]
        assert logged == [0] * 6

    def test_no_sample_is_scored_twice(self, dynamic_run):
        """Four samples per row; the 24 trained rows and as many rejected ones, which are all in one epoch."""
        trainer, reward = dynamic_run
        assert set(reward.scored.values()) == {4}
        assert len(reward.scored) == trainer.pool.ledger.groups_taken + trainer.pool.ledger.groups_rejected

    def test_rows_are_accounted_for(self, dynamic_run):
        trainer, _ = dynamic_run
        pool = trainer.pool
        assert len(pool) == 0
        assert pool.ledger.groups_rejected >= 0.3 * pool.ledger.groups_admitted
        assert pool.ledger.groups_admitted == pool.ledger.groups_taken + pool.ledger.groups_rejected
        assert pool.ledger.tokens_generated == pool.ledger.tokens_taken + pool.ledger.tokens_rejected
        logged = [entry for entry in trainer.state.log_history if "april/rejected_groups" in entry]
        assert sum(entry["april/rejected_groups"] for entry in logged) == pool.ledger.groups_rejected

    def test_what_the_reward_function_logs_belongs_to_the_trained_samples(self, dynamic_run):
        trainer, _ = dynamic_run
        expected = [group.row["number"] for group in trainer.trained_groups for _ in group.samples]
        assert list(trainer._logs["extra"]["row"])[-16:] == expected[-16:]
        assert any("calls" in entry for entry in trainer.state.log_history)

    def test_the_table_of_completions_has_the_versions_of_the_trained_samples(self, dynamic_run):
        trainer, _ = dynamic_run
        files = sorted(Path(trainer.args.output_dir).glob("completions/*.parquet"))
        table = pandas.concat(map(pandas.read_parquet, files))
        samples = [sample for group in trainer.trained_groups for sample in group.samples]
        assert list(table["april_resumed"]) == [len(sample.segments) - 1 for sample in samples]
        assert list(table["april_versions"]) == [",".join(map(str, sorted(set(s.versions)))) for s in samples]
        assert table["april_resumed"].max() > 0

    def test_rewards_are_those_of_stock_for_the_same_completions(self, dynamic_run):
        trainer, _ = dynamic_run
        trained = trainer.trained_groups[-4:]
        assert list(trainer._logs["rewards"]["CountingReward"])[-16:] == [
            rewards[0] for group in trained for rewards in group.score.rewards
        ]

    def test_asynchronous_and_several_reward_functions(self, server, tiny_model_dir, tmp_path):
        async def parity(completions, number, **kwargs) -> list[float | None]:
            return [None if value % 2 else float(index) for index, value in enumerate(number)]

        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, dynamic_sampling=True, reward=[parity, all_equal], max_steps=2,
            reward_weights=[2.0, 1.0],
        )  # fmt: skip
        trainer.train()
        assert all(group.row["number"] % 2 == 0 for group in trainer.trained_groups)
        assert len(trainer.pool) == 0

    def test_a_reward_model(self, server, tiny_model_dir, tmp_path):
        model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
        model.save_pretrained(tmp_path / "reward")
        AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "reward")
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path / "out", dynamic_sampling=True, reward=str(tmp_path / "reward"),
            max_steps=2, max_completion_length=20,
        )  # fmt: skip
        trainer.train()
        assert len(trainer.trained_groups) == 8 and len(trainer.pool) == 0
        # What TRL itself computes for the last batch, all groups in one call.
        groups = trainer.rounds[-1].groups
        prompts = [group.row["prompt"] for group in groups for _ in group.samples]
        ids = [sample.token_ids.tolist() for group in groups for sample in group.samples]
        completions = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        rows = [group.row for group in groups for _ in group.samples]
        expected = trainer._calculate_rewards(rows, prompts, completions, ids)
        scored = torch.tensor([rewards for group in groups for rewards in group.score.rewards])
        assert torch.allclose(scored, expected, atol=1e-5)

    def test_a_hopeless_round_is_filled_and_training_ends_with_an_empty_pool(
        self, server, tiny_model_dir, tmp_path, caplog
    ):
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, dynamic_sampling=True, max_rejected_groups_per_round=4, max_steps=2,
            reward=all_equal, max_completion_length=20,
        )  # fmt: skip
        trainer.train()
        assert "filled with 4 of them" in caplog.text
        assert len(trainer.trained_groups) == 8
        assert len(trainer.pool) == 0
        trainer.pool.check()

    def test_a_reward_function_that_raises(self, server, tiny_model_dir, tmp_path):
        def broken(completions, **kwargs):
            raise ZeroDivisionError("mine")

        trainer = make_trainer(server, tiny_model_dir, tmp_path, dynamic_sampling=True, reward=broken)
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            trainer.train()
        assert any(entry.name == "broken" for entry in caught.traceback)  # the user's own line
        assert wait_until_idle(server) == 0

    def test_a_slow_reward_function_does_not_stop_the_other_requests(
        self, server, tiny_model_dir, tmp_path, monkeypatch
    ):
        """It sleeps for 2 s a call; what runs beside it goes on until the quota is met."""

        class Stops(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop = True

        def slow(completions, **kwargs):
            time.sleep(2.0)
            return [float(index) for index in range(len(completions))]

        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, dynamic_sampling=True, reward=slow, max_steps=3, max_staleness=None,
            over_provisioning=3.0, max_completion_length=3000, generation_kwargs={"ignore_eos": True},
            per_device_train_batch_size=4, callbacks=[Stops()],
        )  # fmt: skip

        def request(maker, group, sample, version):
            """The first group is done at once, the others would run for seconds."""
            length = 8 if group.group_id == 0 else 3000
            return replace(make_request(maker, group, sample, version), max_tokens=length - len(sample))

        make_request = RequestMaker.make
        monkeypatch.setattr(RequestMaker, "make", request)
        trainer.train()
        (done,) = trainer.rounds
        assert [len(sample) for sample in done.groups[0].samples] == [8] * 4
        # Generated while the reward function slept, and cut when it was done.
        lengths = [len(sample) for group in trainer.pool for sample in group.samples]
        assert len(lengths) == 8 and all(8 < length < 3000 for length in lengths)


class TestMaskPolicy:
    def test_old_tokens_leave_the_loss_and_their_samples_keep_their_reward(self, server, tiny_model_dir, tmp_path):
        batches = []

        class Trainer(RecordingTrainer):
            def _generate_and_score_completions(self, inputs):
                batches.append(super()._generate_and_score_completions(inputs))
                return batches[-1]

        trainer = Trainer(
            model=tiny_model_dir,
            reward_funcs=distinct_characters,
            args=make_config(
                server, tmp_path, staleness_policy="mask", max_staleness=0, over_provisioning=3.0, max_steps=5
            ),
            train_dataset=DATASET,
        )
        trainer.train()
        masked = 0
        for done, batch in zip(trainer.rounds, batches, strict=True):
            samples = [sample for group in done.groups for sample in group.samples]
            for row, sample in enumerate(samples):
                young = torch.tensor([version == done.version for version in sample.versions])
                kept = batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))[row, : len(sample)].bool()
                assert torch.equal(kept, young)
                masked += int((~young).sum())
            rewards = torch.tensor(list(trainer._logs["rewards"]["distinct_characters"])[-16:])
            assert len(rewards) == 16 and not rewards.isnan().any()
        assert masked > 0
        stale = [entry["april/over_staleness_fraction"] for entry in trainer.state.log_history if "reward" in entry]
        assert max(stale) > 0


class TestLosses:
    def test_gspo_on_partial_rollouts(self, server, tiny_model_dir, tmp_path):
        trainer = make_trainer(server, tiny_model_dir, tmp_path, loss_type="gspo", max_steps=3)
        trainer.train()
        assert trainer.args.loss_type == "gspo"
        assert (trainer.loss_type, trainer.importance_sampling_level) == ("grpo", "sequence")
        assert (trainer.epsilon_low, trainer.epsilon_high) == (3e-4, 4e-4)
        assert len(trainer.pool) == 0

    def test_the_correction_is_logged_by_age_and_length(self, long_run):
        logged = {key for entry in long_run.state.log_history for key in entry}
        for bucket in ("age_0", "age_1", "length_q1", "length_q4"):
            for figure in ("tokens_fraction", "mean_ratio", "clipped_fraction", "effective_sample_size"):
                assert f"april/correction/{bucket}/{figure}" in logged

    def test_a_mode_that_masks_most_carried_tokens_is_told_once(self, server, tiny_model_dir, tmp_path, caplog):
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, vllm_importance_sampling_mode="sequence_mask",
            vllm_importance_sampling_clip_max=1.0001, vllm_importance_sampling_clip_min=0.9999,
        )  # fmt: skip
        trainer.train()
        assert caplog.text.count("of the carried tokens of this batch") == 1


class TestMetrics:
    def test_every_promised_metric_is_logged(self, long_run):
        training = [entry for entry in long_run.state.log_history if "loss" in entry]
        promised = {
            "round_seconds", "abort_seconds", "sync_seconds", "generated_tokens", "trained_tokens",
            "generated_tokens_per_second", "trained_tokens_per_second", "in_flight_mean", "groups_resumed",
            "aborted_requests", "carried_fraction", "staleness_mean", "staleness_max", "over_staleness_fraction",
            "versions_per_sample_max", "outstanding", "parked_tokens", "parked_bytes", "fully_stale_samples",
            "rejected_groups", "rejected_tokens", "filled_groups", "correction/carried_tokens",
            "completions/launched_mean_length", "completions/trained_mean_length", "broken_streams",
            "lost_tokens_bound", "outage_seconds", "overlap_tokens", "overlap_seconds",
            "length_p10", "length_p25", "length_p50", "length_p75", "length_p90", "length_p99", "over_provisioning",
        }  # fmt: skip
        for entry in training:
            logged = {key.removeprefix("april/") for key in entry if key.startswith("april/")}
            # Which ages there are depends on the batch.
            assert {key for key in logged if not re.match("correction/(age|length)", key)} == promised

    def test_figures_agree_with_the_batches(self, long_run):
        training = [entry for entry in long_run.state.log_history if "loss" in entry]
        for entry, done in zip(training, long_run.rounds, strict=True):
            tokens = sum(group.num_tokens for group in done.groups)
            assert entry["april/trained_tokens"] == tokens
            assert entry["april/carried_fraction"] == pytest.approx(done.carried_tokens / tokens)
            assert entry["completions/mean_length"] == pytest.approx(entry["april/completions/trained_mean_length"])
            assert entry["april/parked_bytes"] == 8 * entry["april/parked_tokens"]


class TestBadInput:
    def test_a_reward_function_that_raises(self, server, tiny_model_dir, tmp_path):
        """The traceback is the user's, nothing is left running, and the next run works."""

        def raises(completions, **kwargs):
            raise ZeroDivisionError("mine")

        trainer = make_trainer(server, tiny_model_dir, tmp_path, reward=raises)
        with pytest.raises(ZeroDivisionError, match="mine"):
            trainer.train()
        assert wait_until_idle(server) == 0
        assert trainer.rollout_func is None
        again = make_trainer(server, tiny_model_dir, tmp_path, max_steps=1, max_completion_length=8)
        again.train()
        assert len(again.pool) == 0

    def test_ctrl_c_in_the_middle_of_a_round(self, server, tiny_model_dir, tmp_path, sigint):
        """Requests are aborted, what they had generated is kept, and the pool is whole."""
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, max_completion_length=3000, generation_kwargs={"ignore_eos": True}
        )

        def interrupt():
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if trainer.pool is not None and trainer.pool.ledger.tokens_generated > 500:
                    return _thread.interrupt_main()
                time.sleep(0.02)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert wait_until_idle(server) == 0
        trainer.pool.check()
        assert trainer.pool.tokens_held > 500
        states = {sample.state.value for group in trainer.pool for sample in group.samples}
        assert "parked" in states and "running" not in states

    def test_a_prompt_longer_than_the_context(self, server, tiny_model_dir, tmp_path):
        dataset = Dataset.from_list([{"prompt": "1" * 4000} for _ in range(8)])
        trainer = make_trainer(server, tiny_model_dir, tmp_path, dataset=dataset)
        with pytest.raises(ConfigError, match="has 4000 tokens.*context of 4096 tokens leaves 3896"):
            trainer.train()
        assert wait_until_idle(server) == 0

    def test_a_context_shorter_than_the_completion(self, server, tiny_model_dir, tmp_path):
        with pytest.raises(ConfigError, match="context of 4096 tokens.*max_completion_length=4096"):
            make_trainer(server, tiny_model_dir, tmp_path, max_completion_length=4096)

    def test_another_model_is_served(self, server, tiny_model_dir, tmp_path):
        from tests.tiny import save_tiny_model

        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        model.config.num_hidden_layers, model.config.layer_types = 1, model.config.layer_types[:1]
        model.model.layers = model.model.layers[:1]
        other = save_tiny_model(tmp_path / "other")
        model.save_pretrained(other)
        with pytest.raises(ConfigError, match="num_hidden_layers=2.*num_hidden_layers=1"):
            make_trainer(server, other, tmp_path)

    def test_a_server_that_is_not_there(self, tiny_model_dir, tmp_path):
        class Nowhere:
            base_url = "http://127.0.0.1:9"

        with pytest.raises(ServerError, match="127.0.0.1:9 within 0.5 s.*trl-april serve"):
            make_trainer(Nowhere, tiny_model_dir, tmp_path, vllm_server_timeout=0.5)

    def test_options_that_a_cut_cannot_preserve(self, server, tiny_model_dir, tmp_path):
        with pytest.raises(ConfigError, match="stop=.*straddles"):
            make_trainer(server, tiny_model_dir, tmp_path, generation_kwargs={"stop": ["END"]})

    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            (Dataset.from_list([]), "rows, but one generation batch needs"),
            (Dataset.from_list([{"question": "1"}] * 8), "no `prompt`"),
            (IterableDataset.from_generator(lambda: iter([])), "empty"),
        ],
    )
    def test_datasets_that_cannot_be_trained_on(self, server, tiny_model_dir, tmp_path, dataset, message):
        with pytest.raises(ConfigError, match=message):
            make_trainer(server, tiny_model_dir, tmp_path, dataset=dataset)

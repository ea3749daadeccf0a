"""Training with partial rollouts on the real server."""

import _thread
import re
import threading
import time
from collections import Counter
from pathlib import Path

import pandas
import pytest
import requests
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from tests.support.weight_folders import left_of, weight_folders
from trl_april.commands.report import read_run
from trl_april.config import APRILGRPOConfig
from trl_april.rollout.driver import RolloutDriver
from trl_april.server.local import LocalServer
from trl_april.server.traffic import server_load
from trl_april.trainer import APRILGRPOTrainer
from trl_april.tuning import admission_control


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
        self.surplus_shares = []
        super().__init__(*args, **kwargs)

    def _april_run_round(self):
        done = super()._april_run_round()
        self.rounds.append(done)
        self.surplus_shares.append(self.pool.schedule.surplus_share)
        self.weights[done.version] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return done

    @property
    def trained_groups(self):
        return [group for done in self.rounds for group in done.groups]


def make_config(server: LocalServer, output_dir: Path, **options) -> APRILGRPOConfig:
    defaults = {
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 120,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "over_provisioning": 2.0,
        "max_staleness": 5,
        "overlap_generation": False,  # most tests look at one round after the other
        "resume_kv": "recompute",
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
    """Requests that the server runs or has queued."""
    load = server_load(requests, server.base_url, timeout=10)
    return load.running + load.waiting


def wait_until_idle(server: LocalServer, seconds: float = 10) -> int:
    deadline = time.monotonic() + seconds
    while running_requests(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    return running_requests(server)


def wait_for_tokens(trainer: RecordingTrainer, tokens: int = 500) -> None:
    """Wait until the new round has generated so many tokens."""
    before = trainer.pool.counters.tokens_generated
    while trainer.pool.counters.tokens_generated < before + tokens:
        time.sleep(0.01)


def check_logprobs(trainer: RecordingTrainer, more_inputs=lambda trainer, group, sample: {}) -> int:
    """Compare each token's log-probability with its version's weights, to 1e-4 in float32; returns their number.

    `more_inputs` are further arguments of the model for a sample, such as its images.
    """
    compared = 0
    for version, weights in trainer.weights.items():
        trainer.model.load_state_dict(weights, strict=False)
        for group in trainer.trained_groups:
            for sample in group.samples:
                here = torch.tensor([one == version for one in sample.versions])  # `None`: of a tool
                if not here.any():
                    continue
                prompt_ids = group.prompt_ids_of(sample)
                ids, start = torch.tensor([[*prompt_ids, *sample.token_ids]]), len(prompt_ids)
                more = more_inputs(trainer, group, sample)
                with torch.no_grad():
                    logits = trainer.model(input_ids=ids, **more).logits[0, start - 1 : -1].float()
                expected = logits.log_softmax(-1).gather(-1, ids[0, start:, None]).squeeze(-1)
                difference = (expected - torch.tensor(sample.logprobs))[here].abs().max()
                assert difference < 1e-4, (group.group_id, sample.index, version)
                compared += int(here.sum())
    return compared


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


def test_every_generated_token_is_trained_once(long_run):
    assert len(long_run.pool) == 0
    assert sorted(group.group_id for group in long_run.trained_groups) == list(range(40))
    trained = sum(group.num_tokens for group in long_run.trained_groups)
    assert trained == long_run.pool.counters.tokens_taken == long_run.pool.counters.tokens_generated
    assert trained == sum(done.generated_tokens for done in long_run.rounds)


def test_fewer_groups_are_in_flight_as_training_ends(long_run):
    """Over a quarter of ten rounds."""
    assert long_run.surplus_shares == [1.0] * 8 + [0.5, 0.0]


def test_the_run_log_holds_every_round(long_run):
    """The log of rounds in `output_dir`, which is written without any option."""
    run = read_run(long_run.args.output_dir)
    assert run.notes == []
    assert run.options["quota"] == 4 and run.options["over_provisioning"] == 5.0
    assert [one.version for one in run.rounds] == [done.version for done in long_run.rounds]
    assert [step.step for step in run.steps] == list(range(1, 11))
    for read, done in zip(run.rounds, long_run.rounds, strict=True):
        assert sum(read.ages.values()) == sum(group.num_tokens for group in done.groups)
        assert read.generation[1] - read.generation[0] == pytest.approx(done.seconds, abs=1e-4)
    logged = [entry["reward"] for entry in long_run.state.log_history if "loss" in entry]
    assert [one.reward for one in run.rounds] == pytest.approx(logged)
    # Sync, round, scoring and the trainer's step come one after the other.
    traces = [trace for one in run.rounds for trace in (one.sync, one.generation, one.scoring)]
    traces = sorted([*traces, *(trace for step in run.steps for trace in step.training)])
    assert all(begin >= end - 1e-4 for (_, end), (begin, _) in zip(traces, traces[1:], strict=False))
    for one in run.rounds:  # TRL computes log-probabilities first
        assert one.scoring[0] < one.reward_calls[0] < one.reward_calls[1] <= one.scoring[1]


class TestLogProbabilities:
    def test_recorded_log_probabilities_are_those_of_the_tagged_version(self, long_run):
        """Of samples that mix versions, which differ by more than the tolerance."""
        assert check_logprobs(long_run) == long_run.pool.counters.tokens_taken
        samples = [sample for group in long_run.trained_groups for sample in group.samples]
        assert max(len(sample.segments) for sample in samples) >= 3
        first, *later = [entry for entry in long_run.state.log_history if "loss" in entry]
        assert first["april/staleness_max"] == 0 and first["sampling/sampling_logp_difference/max"] < 1e-4
        assert max(entry["sampling/sampling_logp_difference/max"] for entry in later) > 1e-2


def test_auto_changes_the_factor_between_rounds(server, tiny_model_dir, tmp_path, monkeypatch, caplog):
    """Without `max_completion_length`, the context is the limit. Connections are reserved for the highest factor."""
    caplog.set_level("INFO", logger="trl_april.rollout.training_steps")
    room = []
    monkeypatch.setattr("trl_april.session.reserve_connections", lambda number, *_: room.append(number) or 10**6)
    monkeypatch.setattr(admission_control, "ROUNDS", 1)
    trainer = make_trainer(server, tiny_model_dir, tmp_path, over_provisioning="auto", max_completion_length=None)
    trainer.train()
    factors = [done.over_provisioning for done in trainer.rounds]
    assert factors[:5] == [3.0] * 4 + [3.5], "after four rounds it is time to choose"
    assert factors == [e["april/over_provisioning"] for e in trainer.state.log_history if "loss" in e]
    changes = [pair for pair in zip(factors, factors[1:], strict=False) if pair[0] != pair[1]]
    said = re.findall(r"over_provisioning changes from ([\d.]+) to ([\d.]+): ", caplog.text)
    assert [(float(old), float(new)) for old, new in said] == changes
    assert len(trainer.pool) == 0 and room == [12 * 4]


class TestDropIn:
    def test_everything_around_the_rollouts_works_as_in_stock(self, server, tiny_model_dir, tmp_path):
        """Evaluation, callbacks, extra dataset columns, log_completions, gradient accumulation, async rewards."""
        seen, inputs_of = [], []

        class Watching(RecordingTrainer):
            def _generate_and_score_completions(self, inputs):
                batch = super()._generate_and_score_completions(inputs)
                if self.model.training:  # as in stock, the i-th of the inputs is what the i-th completion answers
                    inputs_of.append([row["number"] for row in inputs])
                return batch

        class Steps(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                seen.append(state.global_step)
                folder = tmp_path / f"checkpoint-of-my-own-{state.global_step}"
                folder.mkdir()
                trainer._april_session.save(folder)
                assert not trainer._april_session.steps.in_training, (
                    "what this step has trained would be trained again"
                )

        async def numbers_arrive(prompts, completions, number, completion_ids, trainer_state, log_metric, **kwargs):
            assert [f"{n}+{n}=" for n in number] == prompts
            assert all(isinstance(ids, list) and ids for ids in completion_ids)
            log_metric("my_metric", 3.0)
            return [len(completion) / 10 for completion in completions]

        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, trainer_class=Watching,
            reward=[distinct_characters, numbers_arrive], reward_weights=[1.0, 0.5],
            callbacks=[Steps()], eval_dataset=DATASET.select(range(2)), eval_strategy="steps", eval_steps=2,
            per_device_eval_batch_size=8, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=4,
            max_completion_length=30, log_completions=True, report_to=["tensorboard"], beta=0.1,
        )  # fmt: skip
        trainer.train()
        assert seen == [1, 2, 3, 4]
        assert inputs_of == [[g.row["number"] for g in done.groups for _ in g.samples] for done in trainer.rounds]
        assert len(trainer.rounds) == 4 and len(trainer.pool) == 0
        training = [entry for entry in trainer.state.log_history if "loss" in entry]
        evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
        assert len(training) == 4 and len(evaluations) == 2
        assert all(entry["my_metric"] == 3.0 and "kl" in entry for entry in training)
        assert not any(key.startswith("eval_april") for entry in evaluations for key in entry)
        self.look_at_the_completions(tmp_path / "completions", trainer.rounds)

    def look_at_the_completions(self, folder, rounds):
        """Steps 1 and 3 show the training batch. At 2 and 4 an evaluation of half as many completions came last."""
        files = sorted(folder.glob("*.parquet"))
        tables = [pandas.read_parquet(file) for file in files]
        assert len(tables) == 4
        for table, done in zip(tables, rounds, strict=True):
            samples = [sample for group in done.groups for sample in group.samples]
            versions = [",".join(str(segment.version) for segment in sample.segments) for sample in samples]
            if done.version % 2:
                versions = versions[8:] + [""] * 8
            assert list(table["versions"]) == versions
            assert table.dtypes.equals(tables[0].dtypes)

    def test_training_again_after_an_interrupted_close(self, server, tiny_model_dir, tmp_path, monkeypatch):
        """As in a notebook whose cell is stopped twice and run again. No thread and no weight file is left."""
        before = weight_folders()  # of other processes
        trainer = make_trainer(server, tiny_model_dir, tmp_path, max_steps=2, max_completion_length=30)
        close = RolloutDriver.close

        async def interrupted(driver):
            await close(driver)
            raise RuntimeError("as Ctrl-C would")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="as Ctrl-C would"):
            patch.setattr(RolloutDriver, "close", interrupted)
            trainer.train()
        assert not [thread for thread in threading.enumerate() if thread.name == "trl-april-rollouts"]
        assert not left_of(weight_folders() - before)
        del trainer.rounds[:]
        trainer.train()
        assert [done.version for done in trainer.rounds] == [0, 1] and len(trainer.pool) == 0
        (second_start,) = [entry for entry in trainer.state.log_history if entry["step"] == 1 and "loss" in entry]
        assert second_start["april/staleness_max"] == 0
        assert second_start["sampling/sampling_logp_difference/max"] < 1e-4
        # An evaluation uses the current weights: the best model may have been loaded since.
        synced = []
        sync = trainer.vllm_generation.sync_weights
        monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: synced.append(sync()))
        for _ in range(2):
            trainer.evaluate(rows_of(4))
        assert len(synced) == 1


class CountingReward:
    """Rewards differ in groups of even numbers and are equal in groups of odd ones."""

    def __init__(self) -> None:
        self.scored = Counter()

    def __call__(self, completions, number, log_extra, log_metric, **kwargs) -> list[float]:
        self.scored.update(number)
        log_extra("row", list(number))
        log_metric("calls", 1.0)
        return [0.0 if value % 2 else float(index) for index, value in enumerate(number)]


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
    def test_rows_are_accounted_for(self, dynamic_run):
        """Half of the rows teach nothing. No sample is scored twice."""
        trainer, reward = dynamic_run
        counters = trainer.pool.counters
        assert len(trainer.trained_groups) == 6 * 4 and len(trainer.pool) == 0
        assert set(reward.scored.values()) == {4}
        assert len(reward.scored) == counters.groups_admitted == counters.groups_taken + counters.groups_rejected
        assert counters.groups_rejected >= 0.3 * counters.groups_admitted
        assert counters.tokens_generated == counters.tokens_taken + counters.tokens_rejected
        logged = [entry for entry in trainer.state.log_history if "april/rejected_groups" in entry]
        assert sum(entry["april/rejected_groups"] for entry in logged) == counters.groups_rejected
        assert [entry["frac_reward_zero_std"] for entry in logged] == [0] * 6
        assert any("calls" in entry for entry in logged)

    def test_logs_are_those_of_the_trained_samples(self, dynamic_run):
        trainer, _ = dynamic_run
        samples = [sample for group in trainer.trained_groups for sample in group.samples]
        numbers = [group.row["number"] for group in trainer.trained_groups for _ in group.samples]
        rewards = [one[0] for group in trainer.trained_groups for one in group.score.rewards]
        assert not any(number % 2 for number in numbers)
        assert list(trainer._logs["extra"]["row"])[-16:] == numbers[-16:]
        assert list(trainer._logs["rewards"]["CountingReward"])[-16:] == rewards[-16:]
        files = sorted(Path(trainer.args.output_dir).glob("completions/*.parquet"))
        table = pandas.concat(map(pandas.read_parquet, files))
        assert list(table["versions"]) == [",".join(str(s.version) for s in sample.segments) for sample in samples]
        assert table["versions"].str.contains(",").any()

    def test_a_reward_model_and_an_asynchronous_reward_function(self, server, tiny_model_dir, tmp_path):
        async def parity(completions, number, **kwargs) -> list[float | None]:
            return [None if value % 2 else float(index) for index, value in enumerate(number)]

        model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
        model.save_pretrained(tmp_path / "reward")
        AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "reward")
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path / "out", dynamic_sampling=True, reward=[str(tmp_path / "reward"), parity],
            max_steps=2, max_completion_length=20, reward_weights=[2.0, 1.0],
        )  # fmt: skip
        trainer.train()
        assert len(trainer.trained_groups) == 8 and len(trainer.pool) == 0
        # TRL computes the same for the last batch, all groups in one call.
        groups = trainer.rounds[-1].groups
        rows = [group.row for group in groups for _ in group.samples]
        ids = [sample.token_ids.tolist() for group in groups for sample in group.samples]
        completions = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        expected = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], completions, ids)
        scored = torch.tensor([rewards for group in groups for rewards in group.score.rewards])
        assert torch.allclose(scored[:, 0], expected[:, 0], atol=1e-5)


def test_every_promised_metric_is_logged(long_run):
    """One of each source. tests/project/test_docs.py compares the list of all with the documentation."""
    training = [entry for entry in long_run.state.log_history if "loss" in entry]
    promised = ("round_seconds", "sync_seconds", "sync_mismatch", "outage_seconds", "correction/carried_tokens")
    for entry, done in zip(training, long_run.rounds, strict=True):
        assert entry.keys() >= {f"april/{name}" for name in promised}
        tokens = sum(group.num_tokens for group in done.groups)
        assert entry["april/trained_tokens"] == tokens
        assert entry["april/carried_fraction"] == pytest.approx(done.carried_tokens / tokens)
        assert entry["completions/mean_length"] == pytest.approx(entry["april/completions/trained_mean_length"])
    logged = {key for entry in training for key in entry}
    assert logged >= {f"april/correction/{bucket}/mean_ratio" for bucket in ("age_0", "age_1", "length_q1")}


def test_ctrl_c_in_the_middle_of_a_round(server, tiny_model_dir, tmp_path, sigint):
    """Requests are aborted and their tokens kept."""
    trainer = make_trainer(
        server, tiny_model_dir, tmp_path, max_completion_length=3000, generation_kwargs={"ignore_eos": True}
    )

    def interrupt():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if trainer.pool is not None and trainer.pool.counters.tokens_generated > 500:
                return _thread.interrupt_main()
            time.sleep(0.02)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert wait_until_idle(server) == 0
    trainer.pool.check()
    assert trainer.pool.counters.tokens_held > 500
    states = {sample.state.value for group in trainer.pool for sample in group.samples}
    assert "parked" in states and "running" not in states

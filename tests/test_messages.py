"""What a user is told where no other test looks at the words: each message is provoked, and says what to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import torch
from datasets import Dataset
from torch.distributed import distributed_c10d

from tests.serverless import ServerlessTrainer
from tests.tiny import build_model
from trl_april import applies, server
from trl_april.admission import Admission
from trl_april.config import APRILGRPOConfig, AprilOptions
from trl_april.demo.run import run_demo
from trl_april.demo.settings import QUICK
from trl_april.errors import CheckpointError, ConfigError, PoolError, ServerError, WeightSyncError
from trl_april.peers import _abort_process_group
from trl_april.server_address import warn_if_exposed
from trl_april.simulator.step_time import read_step_time
from trl_april.types import Group
from trl_april.weight_sync import ServerGeneration


ROWS = Dataset.from_list([{"prompt": "1+1="}] * 8)


def config(**options) -> APRILGRPOConfig:
    options = {"per_device_train_batch_size": 8, "num_generations": 4, **options}
    return APRILGRPOConfig("out", use_cpu=True, bf16=False, report_to=[], **options)


# Options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_rejected_groups_per_round": 1}, "max_rejected_groups_per_round is 1, .* may need 2 .*at least 2"),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_truncate"},
            "vllm_importance_sampling_mode is 'sequence_truncate', but loss_type='vespo' needs 'token_truncate'",
        ),
    ],
)
def test_options_that_do_not_go_together(options, words):
    args = config(**options)
    with pytest.raises(ConfigError, match=words):
        applies.check_arguments(args, AprilOptions.of(args), ROWS)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_for_an_answer(seconds):
    args = config(vllm_server_timeout=seconds)
    with pytest.raises(ConfigError, match=f"vllm_server_timeout is {seconds}; every answer .* Leave it at 240 s"):
        applies.check_arguments(args, AprilOptions.of(args), ROWS)


def test_a_mode_that_leaves_out_what_april_keeps(caplog):
    args = config(vllm_importance_sampling_mode="sequence_mask")
    applies.check_arguments(args, AprilOptions.of(args), ROWS)
    assert "'sequence_mask', which leaves out samples" in caplog.text and "'token_truncate' is" in caplog.text


def test_a_reward_model_in_shards():
    trainer = SimpleNamespace(is_fsdp_enabled=True, is_deepspeed_enabled=False, reward_funcs=[torch.nn.Linear(1, 1)])
    with pytest.raises(ConfigError, match="shards over 2 processes.*Serve the reward model.*dynamic_sampling=False"):
        applies.check_scoring(trainer, SimpleNamespace(count=2), overridden=False)
    applies.check_scoring(trainer, SimpleNamespace(count=1), overridden=False)


# Checkpoints


def trainer_that_resumes():
    return SimpleNamespace(
        num_generations=4,
        model=build_model(),
        vllm_generation=SimpleNamespace(facts=SimpleNamespace(max_model_len=30)),
    )


@pytest.mark.parametrize(
    ("samples", "token_id", "longest", "words"),
    [
        (2, 5, 20, "Group 7 of the checkpoint has 2 samples, and num_generations is 4. Resume with"),
        (4, 50, 20, "Group 7 of the checkpoint holds token id 50, and the model has a vocabulary of 50. Resume with"),
        (
            4,
            5,
            29,
            "has a prompt of 2 tokens and completions of up to 29, and the server's context is 30",
        ),
    ],
)
def test_partial_samples_that_do_not_fit_this_training(samples, token_id, longest, words):
    trainer = trainer_that_resumes()
    trainer.model.config.vocab_size = 50
    group = Group.fresh(7, {"prompt": "1+"}, [1, token_id], samples, longest, born=0)
    with pytest.raises(CheckpointError, match=f"{words}.*or remove the folder"):
        Admission(trainer, None, None).resume([group], [], ["prompt"])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_column_that_rows_of_the_checkpoint_do_not_have(elsewhere):
    group = Group.fresh(7, {"prompt": "1+", "answer": 2}, [1, 5], 4, 20, born=0)
    here, there = ([], [group]) if elsewhere else ([group], [])
    with pytest.raises(CheckpointError, match="Group 7 of the .* has no column 'level', 'unit', .*or remove the f"):
        Admission(trainer_that_resumes(), None, None).resume(here, there, ["prompt", "level", "unit"])


def test_a_column_that_the_dataset_has_no_more_is_left_out():
    """TRL takes the columns of a batch from its first row, and asks each row for them."""
    here, elsewhere = (Group.fresh(number, {"prompt": "1+", "answer": 2}, [1, 5], 4, 20, born=0) for number in (7, 8))
    admission = Admission(trainer_that_resumes(), None, None)
    admission.resume([here], [elsewhere], ["prompt"])
    assert here.row == {"prompt": "1+"} == admission.row_of(8)


def test_partial_samples_that_cannot_be_resumed(tiny_model_dir, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PoolError("The pool states hold a group twice.")

    monkeypatch.setattr("trl_april.trainer.RolloutSession", refuse)
    args = APRILGRPOConfig(
        str(tmp_path), per_device_train_batch_size=8, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True
    )
    trainer = ServerlessTrainer(tiny_model_dir, lambda completions, **kwargs: [0.0], args, ROWS)
    trainer._checkpoints = SimpleNamespace(take_rollouts=lambda: None, resumed_from="out/checkpoint-3")
    trainer._stop = None
    with pytest.raises(
        CheckpointError,
        match="partial samples in out/checkpoint-3 cannot be resumed. The pool states hold a group twice. Resume from "
        "another checkpoint, or remove the folder `april` from this one",
    ):
        trainer._open_session()


# The server


def test_a_server_that_was_not_started():
    local = server.LocalServer("m")
    for ask in ("base_url", "pid", "log_path"):
        with pytest.raises(ServerError, match="Call start.., or use it in a with block"):
            getattr(local, ask)
    with pytest.raises(ServerError, match="The server does not run. Call start"):
        local.wait_until_healthy()


def test_processes_of_a_server_that_nothing_ends(monkeypatch, caplog):
    monkeypatch.setattr(server, "end_session", lambda session, grace: [SimpleNamespace(pid=4711)])
    server._end(SimpleNamespace(pid=1, poll=lambda: 0), None)
    assert "could not be ended: 4711. They keep their memory and ports: end them by hand" in caplog.text


@pytest.mark.parametrize(("host", "exposed"), [("0.0.0.0", 1), ("somewhere", 1), ("127.0.0.1", 0), ("localhost", 0)])
def test_a_server_that_others_reach(host, exposed, caplog):
    warn_if_exposed(host)
    assert caplog.text.count(f"binds to {host}. Its development endpoints run commands for everybody") == exposed


class Synced(ServerGeneration):
    """A server that answers what the test says, and nothing else of it."""

    weight_sync, base_url, _keeps_cache = "filesystem", "http://there", False

    def __init__(self, **answers) -> None:
        self._answers = answers

    def _post(self, path, body=None):
        return self._answers.get(path, {})

    def _get(self, path):
        return self._answers[path]


def test_a_server_that_somebody_else_syncs_too():
    generation = Synced(weight_info={"weight_version": "12"})
    with pytest.raises(WeightSyncError, match="weight version '12' after the sync of 3.*a server of its own"):
        generation._stamp_and_resume(3)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (requests.ConnectionError("refused"), ServerError, "failed at /weight_info in the weight sync: refused"),
        (SimpleNamespace(status_code=500, text="dead"), WeightSyncError, "answered 500 to /weight_info .*sync: dead"),
    ],
)
def test_a_server_that_fails_in_the_weight_sync(answer, error, words):
    class Session:
        def request(self, *args, **kwargs):
            if isinstance(answer, Exception):
                raise answer
            return answer

    generation = Synced()
    generation.session, generation.server_timeout = Session(), 1.0
    with pytest.raises(error, match=f"{words}.*Its log says more.*set weight_sync_dir"):
        ServerGeneration._get(generation, "weight_info")


def test_a_prefix_cache_that_is_not_reset(monkeypatch, caplog):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    Synced(reset_prefix_cache={"success": False})._reset_prefix_cache()
    assert "http://there could not reset its prefix cache" in caplog.text and "Nothing of this" in caplog.text


def test_collective_calls_that_cannot_be_ended(monkeypatch, caplog):
    def refuse():
        raise RuntimeError("not with gloo")

    monkeypatch.setattr(distributed_c10d, "_abort_process_group", refuse)
    _abort_process_group()
    assert "The process group could not be aborted: not with gloo" in caplog.text


# The demo, the simulator


def test_the_demo_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib, which is not installed.*pip install"):
        run_demo(QUICK, output_dir=tmp_path, seed=0, keep_server_log=False)


def test_a_report_of_the_doctor_that_is_not_there():
    with pytest.raises(ConfigError, match="nowhere.json cannot be read .No such file.*the file that doctor wrote"):
        read_step_time(Path("nowhere.json"))

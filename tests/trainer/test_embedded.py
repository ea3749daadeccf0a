"""A trainer without a server: it starts its own, which is started again if it dies and ends with the trainer."""

import gc
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from tests.server.test_process import wait_for
from tests.support.preloaded import launch_preloaded
from tests.support.tiny import build_model, build_tokenizer
from tests.trainer.test_keep import check_mixed, note_starts
from tests.trainer.test_trainer import RecordingTrainer, distinct_characters, rows_of
from trl_april.config import APRILGRPOConfig
from trl_april.server.process import session_members


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]


def test_training_without_a_server_starts_one(tiny_model_dir, tmp_path, monkeypatch):
    """The shortest call there is. Each row is trained once per epoch, and the server ends with the trainer."""
    monkeypatch.chdir(tmp_path)  # for the default folder of the output
    trainer = RecordingTrainer(model=tiny_model_dir, reward_funcs=distinct_characters, train_dataset=rows_of(4))
    trainer.train()
    assert Counter(group.row["number"] for group in trainer.trained_groups) == dict.fromkeys(range(4), 3)
    assert trainer._april_options.resume_kv == "keep"
    pid = trainer._april_server.pid
    assert session_members(pid)
    del trainer
    gc.collect()
    assert not session_members(pid)


class EngineKilledTrainer(RecordingTrainer):
    """Its engine is killed in a round and in a weight sync."""

    def __init__(self, *args, **kwargs) -> None:
        self.kills: list[threading.Thread] = []
        self.num_killed = 0
        super().__init__(*args, **kwargs)

    def _april_run_round(self):
        step, server = self.state.global_step, self.vllm_generation.servers.first
        if step == 0:  # later rounds may be complete as they begin
            self.kill_when(lambda: self.pool is not None and self.pool.counters.tokens_generated > 100)
        elif step == 2:
            self.kill_when(lambda: server.life.state == "loading" or server.version == "2")
        return super()._april_run_round()

    def kill_when(self, is_time: Callable[[], bool]) -> None:
        def run() -> None:
            wait_for(is_time, seconds=300)
            (engine,) = [p for p in session_members(self._april_server.pid) if "EngineCore" in p.name()]
            engine.kill()
            self.num_killed += 1

        self.kills.append(threading.Thread(target=run))
        self.kills[-1].start()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_training_survives_the_deaths_of_its_engine(tiny_model_dir, tmp_path, monkeypatch):
    """The server of a model object starts without its weights: the first sync brings them, and the sync after a death.

    Rows are trained as often as in stock GRPO.
    """
    args = APRILGRPOConfig(
        str(tmp_path), max_steps=4, num_generations=4, per_device_train_batch_size=8, max_completion_length=300,
        use_cpu=True, bf16=False, report_to=[], learning_rate=1e-2, save_strategy="no", vllm_mode="colocate",
        generation_kwargs={"ignore_eos": True}, over_provisioning=3.0, overlap_generation=True, resume_kv="keep",
    )  # fmt: skip
    starts, model = note_starts(monkeypatch), build_model(tie_word_embeddings=True)
    trainer = EngineKilledTrainer(model, distinct_characters, args, rows_of(4), processing_class=build_tokenizer())
    trainer.train()
    for thread in trainer.kills:
        thread.join()
    assert trainer.num_killed == 2 and sum(done.outages for done in trainer.rounds) >= 1
    assert len(trainer.pool) == 0
    assert Counter(group.row["number"] for group in trainer.trained_groups) == dict.fromkeys(range(4), 2)
    check_mixed(trainer, tiny_model_dir, starts)  # after a death, keys and values are computed anew
    trainer._april_server.stop()


@pytest.mark.long
def test_several_processes_share_the_server_of_the_first(forker, tiny_model_dir, tmp_path):
    runs = [{"name": "shared", "kind": "train", "options": {"max_steps": 3, "vllm_server_base_url": None}}]
    launched = launch_preloaded(forker, 2, runs, tmp_path, model=tiny_model_dir, url="", timeout=400)
    first, second = launched.results("shared", 2)
    assert launched.output.count(": starting on the CPU") == 1
    assert len(first["rounds"]) == len(second["rounds"]) == 3
    wait_for(lambda: not session_members(first["server"]) and not session_members(launched.session))

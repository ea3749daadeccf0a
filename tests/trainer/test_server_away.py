"""A server that stays away: training writes a checkpoint and resumes from it."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import requests

from tests.checkpoint.test_resume import assert_continued, saved_groups
from tests.support.proxy import Proxy
from tests.trainer.test_trainer import DATASET, make_trainer, wait_for_tokens, wait_until_idle
from trl_april.bridge.evaluation import Evaluation
from trl_april.errors import ServerError


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(400)]


def test_training_stops_with_a_checkpoint_if_the_server_stays_away(server, tiny_model_dir, tmp_path):
    """The server is unreachable, then back without its weights. `test_embedded.py` kills one."""
    proxy = Proxy(server.base_url)
    reached = SimpleNamespace(base_url=proxy.url)
    options = {"max_completion_length": 400, "generation_kwargs": {"ignore_eos": True}, "over_provisioning": 1.5}
    trainer = make_trainer(
        reached, tiny_model_dir, tmp_path, save_strategy="steps", save_steps=100, vllm_server_timeout=4.0, **options,
    )  # fmt: skip
    run_round = trainer._april_run_round

    def break_off_in_round():
        wait_for_tokens(trainer)
        proxy.break_off()

    def run_round_and_break_off():
        if trainer.state.global_step == 2:
            threading.Thread(target=break_off_in_round).start()
        return run_round()

    trainer._april_run_round = run_round_and_break_off
    with pytest.raises(ServerError, match="has not answered for .* s, which is more than vllm_server_timeout=4"):
        trainer.train()
    trained = trainer.trained_groups
    groups = saved_groups(tmp_path / "checkpoint-2")
    partial = sum(group.num_tokens for group in groups.values())
    assert partial > 0 and len(groups) == 6

    assert wait_until_idle(server) == 0
    requests.post(f"{server.base_url}/update_weight_version", json={"new_version": "default"}, timeout=10)
    proxy.come_back()
    resumed = make_trainer(reached, tiny_model_dir, tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_continued(groups, resumed.trained_groups)
    assert set(Counter(group.row["number"] for group in trained + resumed.trained_groups).values()) == {1}
    assert len(trained + resumed.trained_groups) == 24


@pytest.mark.long
def test_evaluation_ends_training_with_a_checkpoint_if_the_server_stays_away(
    server, tiny_model_dir, tmp_path, monkeypatch
):
    proxy = Proxy(server.base_url)
    trainer = make_trainer(
        SimpleNamespace(base_url=proxy.url), tiny_model_dir, tmp_path, save_strategy="steps", save_steps=100,
        vllm_server_timeout=4.0, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
        eval_dataset=DATASET.select(range(2)),
    )  # fmt: skip
    generate = Evaluation.generate

    def break_off_and_generate(*args, **kwargs):
        proxy.break_off()
        return generate(*args, **kwargs)

    monkeypatch.setattr(Evaluation, "generate", break_off_and_generate)
    with pytest.raises(ServerError, match="has not answered for .* s, which is more than vllm_server_timeout=4"):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "april").is_dir()

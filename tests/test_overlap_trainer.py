"""Overlap and the reuse of KV blocks on the real server: nothing lost, exact versions, exact log-probabilities."""

from __future__ import annotations

import copy
import signal
import threading
from pathlib import Path

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, DynamicCache, TrainerCallback

from tests.test_outages import check_logprobs
from tests.test_resume import SAVED, assert_continued, numbers, saved_groups
from tests.test_trainer import make_trainer, rows_of, running_requests, wait_until_idle
from trl_april.rollout import RolloutDriver
from trl_april.session import RolloutSession


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]

BLOCK = 128  # tokens of a KV block of vLLM on a CPU


def counter(server, name: str) -> float:
    """A counter of the server, by its own account."""
    text = requests.get(f"{server.base_url}/metrics", timeout=10).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def reused_tokens(server) -> float:
    return counter(server, "vllm:prefix_cache_hits_total")


@pytest.fixture(scope="module")
def overlapped(server, tiny_model_dir, tmp_path_factory, one_thread):
    """A run with overlap that evaluates and saves on its way, and what the server ran when each step ended."""
    running = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            running.append(running_requests(server))

    trainer = make_trainer(
        server,
        tiny_model_dir,
        tmp_path_factory.mktemp("overlapped"),
        over_provisioning=4.0,
        overlap_generation=True,
        max_completion_length=1000,
        max_steps=10,
        eval_strategy="steps",
        eval_steps=4,
        per_device_eval_batch_size=16,
        eval_dataset=rows_of(4),
        callbacks=[Look()],
        **SAVED,
    )
    trainer.train()
    return trainer, running


class TestOverlap:
    def test_requests_run_while_the_trainer_trains(self, overlapped):
        trainer, running = overlapped
        assert sum(count > 0 for count in running) >= len(running) // 2
        assert sum(done.overlap_tokens for done in trainer.rounds) > 0

    def test_every_token_is_trained_once(self, overlapped, server):
        trainer, _ = overlapped
        assert len(trainer.pool) == 0 and wait_until_idle(server) == 0
        assert sorted(group.group_id for group in trainer.trained_groups) == list(range(40))
        assert set(numbers(trainer.trained_groups).values()) == {1}
        tokens = sum(group.num_tokens for group in trainer.trained_groups)
        assert tokens == trainer.pool.ledger.tokens_generated == trainer.pool.ledger.tokens_taken
        assert tokens == sum(done.generated_tokens + done.overlap_tokens for done in trainer.rounds)

    def test_log_probabilities_are_those_of_the_tagged_version(self, overlapped):
        """So no segment has run on over a weight sync, not even over that of an evaluation."""
        trainer, _ = overlapped
        assert max(len(s.segments) for group in trainer.trained_groups for s in group.samples) >= 2
        check_logprobs(trainer)

    def test_the_bound_holds(self, overlapped):
        trainer, _ = overlapped
        ages = [
            done.version - s.segments[0].version for done in trainer.rounds for g in done.groups for s in g.samples
        ]
        assert 1 <= max(ages) <= trainer.args.max_staleness

    def test_it_is_evaluated(self, overlapped):
        trainer, _ = overlapped
        evaluated = {entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry}
        assert {4, 8} <= evaluated

    @pytest.mark.parametrize("step", [2, 7])
    def test_a_checkpoint_holds_what_had_arrived(self, server, tiny_model_dir, tmp_path, overlapped, step):
        trainer, _ = overlapped
        checkpoint = Path(trainer.args.output_dir, f"checkpoint-{step}")
        resumed = make_trainer(
            server,
            tiny_model_dir,
            tmp_path,
            over_provisioning=4.0,
            overlap_generation=True,
            max_completion_length=1000,
            max_steps=10,
        )
        resumed.train(resume_from_checkpoint=str(checkpoint))
        groups = saved_groups(checkpoint)
        assert_continued(groups, resumed.trained_groups)
        before = [group for done in trainer.rounds[:step] for group in done.groups]
        assert len(before + resumed.trained_groups) == 40
        assert set(numbers(before + resumed.trained_groups).values()) == {1}
        assert len(resumed.pool) == 0

    def test_nothing_ends_between_agreeing_on_a_round_and_taking_it(
        self, server, tiny_model_dir, tmp_path, monkeypatch
    ):
        """What ended there would be finished in one process only, and perhaps older than what the others deliver."""
        trainer = make_trainer(server, tiny_model_dir, tmp_path, overlap_generation=True, max_steps=2)
        may_close, take, passed = RolloutSession._may_close, RolloutDriver.take, []

        def agree(session):
            session._loop.call(lambda: passed.append(True))
            return may_close(session)

        def take_then(driver):
            assert not passed
            return take(driver)

        def begin(session, version):
            passed.clear()
            return open_round(session, version)

        open_round = RolloutSession._open_round
        monkeypatch.setattr(RolloutSession, "_may_close", agree)
        monkeypatch.setattr(RolloutSession, "_open_round", begin)
        monkeypatch.setattr(RolloutDriver, "take", take_then)
        trainer.train()
        assert passed and len(trainer.rounds) == 2

    def test_several_rounds_in_a_step_share_their_requests(self, server, tiny_model_dir, tmp_path):
        """Without a sync in between, nothing is cut."""
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, overlap_generation=True, gradient_accumulation_steps=2,
            steps_per_generation=1, max_steps=3,
        )  # fmt: skip
        trainer.train()
        assert len(trainer.rounds) == 6 and len(trainer.pool) == 0
        assert all(done.aborted_requests == 0 for done in trainer.rounds[1::2])

    def test_dynamic_sampling(self, server, tiny_model_dir, tmp_path):
        def every_third(completions, number, **kwargs):
            return [float(i) if n % 3 else 0.0 for i, n in enumerate(number)]

        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, overlap_generation=True, dynamic_sampling=True, reward=every_third,
            max_completion_length=60,
        )  # fmt: skip
        trainer.train()
        trained = trainer.trained_groups
        assert len(trained) == 24 and set(numbers(trained).values()) == {1}
        assert all(group.row["number"] % 3 for group in trained)
        assert len(trainer.pool) == 0 and trainer.pool.ledger.groups_rejected > 0

    def test_nothing_runs_on_after_an_error_of_the_trainer(self, server, tiny_model_dir, tmp_path):
        class Fails(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                raise RuntimeError("out of memory, say")

        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, overlap_generation=True, over_provisioning=2.0,
            max_completion_length=600, generation_kwargs={"ignore_eos": True}, callbacks=[Fails()],
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train()
        assert wait_until_idle(server) == 0
        trainer.pool.check()

    def test_a_signal_in_training_keeps_everything(self, server, tiny_model_dir, tmp_path, sigint):
        """What runs beside the training is cut and is in the checkpoint."""

        class Stops(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    signal.raise_signal(signal.SIGINT)

        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, overlap_generation=True, save_on_signal=True, callbacks=[Stops()],
            max_completion_length=400, generation_kwargs={"ignore_eos": True},
        )  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert threading.current_thread() is threading.main_thread() and wait_until_idle(server) == 0
        held = sum(group.num_tokens for group in saved_groups(tmp_path / "checkpoint-2").values())
        assert held == trainer.pool.tokens_held > 0


class TestReuse:
    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, server, tiny_model_dir, tmp_path_factory, one_thread):
        """A run of each kind, and the tokens that the server took from its cache in each."""
        runs = {}
        for resume_kv in ("recompute", "reuse"):
            before = reused_tokens(server)
            trainer = make_trainer(
                server,
                tiny_model_dir,
                tmp_path_factory.mktemp(resume_kv),
                resume_kv=resume_kv,
                over_provisioning=5.0,
                max_completion_length=700,
                max_steps=10,
            )
            trainer.train()
            runs[resume_kv] = trainer, reused_tokens(server) - before
        return runs

    def test_resumed_samples_find_their_blocks(self, runs):
        assert runs["recompute"][1] == 0
        trainer, reused = runs["reuse"]
        resumed = [
            sum(segment.length for segment in sample.segments[:i])
            for group in trainer.trained_groups
            for sample in group.samples
            for i in range(1, len(sample.segments))
        ]
        # Whole blocks of what was there, but for the last token of all.
        assert reused >= 0.5 * sum((tokens // BLOCK) * BLOCK for tokens in resumed) > 0

    def test_recorded_are_those_of_the_mixture(self, runs, tiny_model_dir):
        """The tokens after a cut continue on blocks of the weights before it, and on nothing else of them."""
        trainer, _ = runs["reuse"]
        models = {
            version: AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
            for version in trainer.weights
        }
        for version, model in models.items():
            model.load_state_dict(trainer.weights[version], strict=False)
        compared = 0
        for group in trainer.trained_groups:
            for sample in group.samples:
                recorded = torch.tensor(sample.logprobs.tolist())
                off = [
                    (self.mixed(models, group, sample, step_under_way=under_way) - recorded).abs().max()
                    for under_way in (False, True)
                ]
                assert min(off) < 1e-4
                compared += bool((self.alone(models, group, sample) - recorded).abs().max() > 1e-3)
        assert compared > 0  # without reuse they would have been others

    def mixed(self, models, group, sample, *, step_under_way):
        """Log-probabilities of the completion under each segment's weights, on the blocks that were there.

        `step_under_way` is whether the server computed the last token before a cut, too, although the one that it
        sampled from it never came. Where the cut is at the end of a block, that block was full, and whoever resumes
        there computes it anew, since its last token is asked for. From then on the server has that block twice, and
        finds the older one.
        """
        ids = torch.tensor([[*group.prompt_ids, *sample.token_ids]])
        cache, end, found = DynamicCache(), len(group.prompt_ids), []
        for segment in sample.segments:
            begin, end = end, end + segment.length
            full = cache.get_seq_length() // BLOCK * BLOCK
            cached = min((begin - 1) // BLOCK * BLOCK, full)
            own = copy.deepcopy(cache) if cached else DynamicCache()
            own.crop(cached)
            with torch.no_grad():
                logits = models[segment.version](ids[:, cached:end], past_key_values=own, use_cache=True).logits[0]
            found.append(self.chosen(logits[begin - 1 - cached : -1], ids[0, begin:end]))
            for mine, older in zip(own.layers, cache.layers, strict=False):
                mine.keys[..., cached:full, :] = older.keys[..., cached:full, :]
                mine.values[..., cached:full, :] = older.values[..., cached:full, :]
            own.crop(end if step_under_way else end - 1)
            cache = own
        return torch.cat(found)

    def alone(self, models, group, sample):
        """Log-probabilities of the completion under each segment's weights, if those had computed all before it."""
        ids = torch.tensor([[*group.prompt_ids, *sample.token_ids]])
        end, found = len(group.prompt_ids), []
        for segment in sample.segments:
            begin, end = end, end + segment.length
            with torch.no_grad():
                logits = models[segment.version](ids[:, :end]).logits[0]
            found.append(self.chosen(logits[begin - 1 : -1], ids[0, begin:end]))
        return torch.cat(found)

    def chosen(self, logits, token_ids):
        return logits.log_softmax(-1).gather(-1, token_ids[:, None]).squeeze(-1)

    def test_both_together(self, server, tiny_model_dir, tmp_path):
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, resume_kv="reuse", overlap_generation=True, max_completion_length=500,
            eval_strategy="steps", eval_steps=2, eval_dataset=rows_of(4), per_device_eval_batch_size=16,
        )  # fmt: skip
        trainer.train()
        assert len(trainer.trained_groups) == 24 and set(numbers(trainer.trained_groups).values()) == {1}
        assert len(trainer.pool) == 0 and wait_until_idle(server) == 0

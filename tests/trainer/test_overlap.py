"""Overlap and the reuse of KV blocks on the real server: nothing lost, exact versions, exact log-probabilities."""

from dataclasses import replace

import pytest
import requests
from transformers import TrainerCallback

from tests.trainer.test_trainer import check_logprobs, make_trainer, wait_until_idle
from trl_april.engine.protocol import RequestMaker


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]

BLOCK = 128  # tokens of a KV block of vLLM on a CPU


def counter(server, name: str) -> float:
    """A counter from the server's metrics."""
    text = requests.get(f"{server.base_url}/metrics", timeout=10).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def reused_tokens(server) -> float:
    return counter(server, "vllm:prefix_cache_hits_total")


def limit_lengths(monkeypatch, length) -> None:
    """Completions that ignore the end token have `length(group_id)` tokens."""
    make = RequestMaker.make

    def limited(maker, group, sample, version):
        return replace(make(maker, group, sample, version), max_tokens=length(group.group_id) - len(sample))

    monkeypatch.setattr(RequestMaker, "make", limited)


class TestOverlap:
    def test_several_rounds_in_a_step_share_their_requests(self, server, tiny_model_dir, tmp_path):
        """Without a sync between them, no request is aborted."""
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, overlap_generation=True, gradient_accumulation_steps=2,
            steps_per_generation=1, max_steps=3,
        )  # fmt: skip
        trainer.train()
        assert len(trainer.rounds) == 6 and len(trainer.pool) == 0
        assert all(done.aborted_requests == 0 for done in trainer.rounds[1::2])

    def test_no_request_outlives_an_error_of_the_trainer(self, server, tiny_model_dir, tmp_path):
        class Fails(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                raise RuntimeError("out of memory, say")

        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, overlap_generation=True, over_provisioning=2.0,
            max_completion_length=300, generation_kwargs={"ignore_eos": True}, callbacks=[Fails()],
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train()
        assert wait_until_idle(server) == 0
        trainer.pool.check()


class TestKeysAndValues:
    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, server, tiny_model_dir, tmp_path_factory, one_thread):
        """A run of each kind with overlap, and the server's prefix-cache hits in tokens."""
        runs = {}
        for kv in ("recompute", "reuse"):
            before = reused_tokens(server)
            trainer = make_trainer(
                server, tiny_model_dir, tmp_path_factory.mktemp(kv), resume_kv=kv, overlap_generation=True,
                over_provisioning=2.0, max_completion_length=800, generation_kwargs={"ignore_eos": True}, max_steps=2,
            )  # fmt: skip
            # When the first batch of four groups is finished, the others have whole blocks, and far to go.
            with pytest.MonkeyPatch.context() as patch:
                limit_lengths(patch, lambda group_id: 200 if group_id < 4 else 800)
                trainer.train()
            runs[kv] = trainer, reused_tokens(server) - before
        return runs

    def test_log_probabilities_of_recomputed_blocks_are_those_of_the_tagged_version(self, runs):
        """Requests run while the trainer trains, and none of them through a weight sync."""
        trainer, _ = runs["recompute"]
        assert sum(done.overlap_tokens for done in trainer.rounds) > 0 == len(trainer.pool)
        assert check_logprobs(trainer) == trainer.pool.counters.tokens_generated

    def test_resumed_samples_find_their_blocks(self, runs):
        recomputed, reused = runs["recompute"]
        assert reused == 0 and sum(done.carried_tokens for done in recomputed.rounds) > 0
        trainer, reused = runs["reuse"]
        resumed = [
            sum(segment.length for segment in sample.segments[:i])
            for group in trainer.trained_groups
            for sample in group.samples
            for i in range(1, len(sample.segments))
        ]
        # Whole blocks of what was there, but for the last token of all.
        assert reused >= 0.5 * sum((tokens // BLOCK) * BLOCK for tokens in resumed) > 0

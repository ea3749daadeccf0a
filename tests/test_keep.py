"""Requests that live through a weight sync on the real server: no cut, exact versions, exact log-probabilities."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.test_overlap_trainer import counter
from tests.test_resume import SAVED, assert_continued, numbers, saved_groups
from tests.test_trainer import make_trainer, rows_of, wait_until_idle
from trl_april.auto.server_speed import StepTimes
from trl_april.engine import GenerationRequest
from trl_april.errors import ServerError
from trl_april.generated_tokens import PATH
from trl_april.sampling import sampling_options
from trl_april.server_pause import ServerPause
from trl_april.vllm_engine import VLLMEngine


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]


def mixed(models, group, sample):
    """Log-probabilities of the completion, each segment under its own weights behind keys and values of the others.

    When the weights change, the last token has been sampled and its keys and values have not been computed yet.
    """
    ids = torch.tensor([[*group.prompt_ids, *sample.token_ids]])
    past, end, found = DynamicCache(), len(group.prompt_ids), []
    for segment in sample.segments:
        begin, end = end, end + segment.length
        cached = past.get_seq_length()
        assert cached == (begin - 1 if found else 0)
        with torch.no_grad():
            logits = models[segment.version](ids[:, cached : end - 1], past_key_values=past, use_cache=True).logits[0]
        found.append(logits[begin - 1 - cached :].log_softmax(-1).gather(-1, ids[0, begin:end, None]).squeeze(-1))
    return torch.cat(found)


@pytest.fixture(scope="module")
def kept(server, tiny_model_dir, tmp_path_factory, one_thread):
    """A run in which requests live through syncs, evaluated and saved on its way."""
    trainer = make_trainer(
        server, tiny_model_dir, tmp_path_factory.mktemp("kept"), resume_kv="keep", overlap_generation=True,
        over_provisioning=4.0, max_completion_length=500, max_steps=10, eval_strategy="steps", eval_steps=4,
        per_device_eval_batch_size=16, eval_dataset=rows_of(4), **SAVED,
    )  # fmt: skip
    trainer.failed = fail_once_while_paused(trainer.vllm_generation, server, ServerError("The connection was reset."))
    trainer.train()
    return trainer


def fail_once_while_paused(generation, server, error: Exception) -> list[bool]:
    """Let the server's answer to new weights be lost. Returns where it is noted that it was."""
    answer, failed = generation._answer, []

    def fail(method, path, *args, **options):
        if path == "collective_rpc" and not failed:
            if requests.get(f"{server.base_url}/is_paused", timeout=10).json()["is_paused"]:  # or nothing ran
                failed.append(True)
                raise error
        return answer(method, path, *args, **options)

    generation._answer = fail
    return failed


class TestKept:
    def test_nothing_is_cut(self, kept):
        assert sum(done.aborted_requests for done in kept.rounds) == 0
        assert max(len(s.segments) for group in kept.trained_groups for s in group.samples) >= 3

    def test_every_token_is_trained_once(self, kept, server):
        assert kept.failed, "a sync was to be done again, and requests to live through that, too"
        assert len(kept.pool) == 0 and wait_until_idle(server) == 0
        assert sorted(group.group_id for group in kept.trained_groups) == list(range(40))
        assert set(numbers(kept.trained_groups).values()) == {1}
        tokens = sum(group.num_tokens for group in kept.trained_groups)
        assert tokens == kept.pool.ledger.tokens_generated == kept.pool.ledger.tokens_taken

    def test_every_token_has_the_version_that_sampled_it(self, kept, tiny_model_dir):
        """To the token, also in the middle of what is streamed as one chunk."""
        models = {}
        for version, weights in kept.weights.items():
            models[version] = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
            models[version].load_state_dict(weights, strict=False)
        inside = 0
        for group in kept.trained_groups:
            for sample in group.samples:
                recorded = torch.tensor(sample.logprobs.tolist())
                assert (mixed(models, group, sample) - recorded).abs().max() < 1e-4
                first = sample.segments[0].length
                inside += len(sample.segments) > 1 and first % 64 != 1
        assert inside > 0

    @pytest.mark.parametrize("step", [3, 4])
    def test_a_checkpoint_holds_what_had_arrived(self, server, tiny_model_dir, tmp_path, kept, step):
        """Also one that was written behind an evaluation, whose sync the requests have lived through."""
        checkpoint = Path(kept.args.output_dir, f"checkpoint-{step}")
        resumed = make_trainer(
            server, tiny_model_dir, tmp_path, resume_kv="keep", overlap_generation=True, over_provisioning=4.0,
            max_completion_length=500, max_steps=10,
        )  # fmt: skip
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_continued(saved_groups(checkpoint), resumed.trained_groups)
        before = [group for done in kept.rounds[:step] for group in done.groups]
        assert set(numbers(before + resumed.trained_groups).values()) == {1} and len(resumed.pool) == 0

    def test_auto_learns_from_rounds_that_open_with_requests_running(self, server, tiny_model_dir, tmp_path):
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, resume_kv="keep", overlap_generation=True, over_provisioning="auto",
            # They run on: what is trained is short beside what is generated meanwhile.
            max_completion_length=1000, max_steps=6, generation_kwargs={"ignore_eos": True},
            per_device_train_batch_size=4,
        )  # fmt: skip
        trainer.train()
        times = StepTimes()
        for done in trainer.rounds:
            if any(span.ran_on for span in done.spans):
                times.observe(done.spans, reuses_kv=True)
        assert times.is_known and times.curve(8) > 0
        assert sum(done.aborted_requests for done in trainer.rounds) == 0
        assert set(numbers(trainer.trained_groups).values()) == {1} and len(trainer.pool) == 0

    def test_the_bound_holds(self, kept):
        ages = [done.version - s.segments[0].version for done in kept.rounds for g in done.groups for s in g.samples]
        assert 1 <= max(ages) <= kept.args.max_staleness


async def completion(engine: VLLMEngine, request: GenerationRequest, begun: asyncio.Event):
    """All of a stream."""
    tokens, reason = 0, None
    async for chunk in engine.generate(request):
        tokens, reason = tokens + len(chunk.token_ids), chunk.finish_reason
        begun.set()
    return tokens, reason


@pytest.fixture
def engine(server):
    model = requests.get(f"{server.base_url}/v1/models", timeout=10).json()["data"][0]["id"]
    sampling = sampling_options(
        temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, stop_token_ids=(),
        generation_kwargs={"ignore_eos": True},
    )  # fmt: skip
    yield VLLMEngine(server.base_url, model, sampling, stream_interval=1000)
    requests.post(f"{server.base_url}/resume", timeout=10)
    assert wait_until_idle(server) == 0


class TestEndpoint:
    def test_it_counts_what_a_cut_then_delivers(self, server, engine):
        """Streamed was one token of each; an abort on the paused server brings the others, which is what `hold` does
        where it cannot hold."""

        async def run():
            wanted = [GenerationRequest(f"counted-{i}", [5, 6, 7 + i], 0, 2000, "salt") for i in range(5)]
            begun = [asyncio.Event() for _ in wanted]
            tasks = [asyncio.create_task(completion(engine, r, b)) for r, b in zip(wanted, begun, strict=True)]
            for event in begun:
                await event.wait()
            name = "vllm:generation_tokens_total"
            before = await asyncio.to_thread(counter, server, name)
            async with asyncio.timeout(60):
                while await asyncio.to_thread(counter, server, name) < before + 100:
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(requests.post, f"{server.base_url}/pause?mode=keep&clear_cache=false", timeout=10)
            names = [request.request_id for request in wanted]
            first = await engine.generated([*names, "counted-never"])
            await asyncio.sleep(0.2)
            assert await engine.generated(names[:2]) == {name: first[name] for name in names[:2]}
            await engine.abort(names)
            found = dict(zip(names, await asyncio.gather(*tasks), strict=True))
            await engine.close()
            return first, found

        generated, found = asyncio.run(run())
        assert found == {name: (count, "abort") for name, count in generated.items()}
        assert min(generated.values()) > 10

    def test_a_request_that_arrives_in_the_pause_has_generated_nothing(self, server, engine):
        async def run():
            await asyncio.to_thread(requests.post, f"{server.base_url}/pause?mode=keep&clear_cache=false", timeout=10)
            late = asyncio.create_task(
                completion(engine, GenerationRequest("late", [5, 6, 7], 0, 30, "salt"), asyncio.Event())
            )
            while not (generated := await engine.generated(["late"])):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(requests.post, f"{server.base_url}/resume", timeout=10)
            found = await late
            await engine.close()
            return generated, found

        assert asyncio.run(run()) == ({"late": 0}, (30, "length"))

    def test_a_server_that_goes_on_is_not_counted(self, server, engine):
        async def run():
            with pytest.raises(ServerError, match="409.*is not paused"):
                await engine.generated(["any"])
            await engine.close()

        asyncio.run(run())


# One round's requests after the other's, each longer than the trainer's step: something runs in every sync but one.
ONE_AFTER_THE_OTHER = {
    "over_provisioning": 1.0,
    "max_completion_length": 1000,
    "per_device_train_batch_size": 4,
    "generation_kwargs": {"ignore_eos": True},
    "max_steps": 2,
}


class TestServers:
    def test_one_that_cannot_say_has_its_requests_cut(self, server, tiny_model_dir, tmp_path, monkeypatch, caplog):
        """As one that somebody has started without us: said once, and trained as with "reuse"."""
        monkeypatch.setattr("trl_april.server_pause.PATH", PATH + "-that-is-not-there")
        with caplog.at_level(logging.WARNING, "trl_april"):
            trainer = make_trainer(
                server, tiny_model_dir, tmp_path, resume_kv="keep", overlap_generation=True, **ONE_AFTER_THE_OTHER
            )
            trainer.train()
        assert caplog.text.count("resume_kv='keep' is not possible") == 1
        assert sum(done.aborted_requests for done in trainer.rounds) > 0
        assert set(numbers(trainer.trained_groups).values()) == {1} and len(trainer.pool) == 0

    def test_one_that_cannot_be_paused_has_its_requests_cut(self, server, tiny_model_dir, tmp_path, monkeypatch):
        monkeypatch.setattr(ServerPause, "begin", lambda pause: False)
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, resume_kv="keep", overlap_generation=True, **ONE_AFTER_THE_OTHER
        )
        trainer.train()
        assert sum(done.aborted_requests for done in trainer.rounds) > 0
        assert set(numbers(trainer.trained_groups).values()) == {1} and len(trainer.pool) == 0

    @pytest.mark.parametrize(
        ("places", "waiting", "each"), [(4, 0, 1), (None, None, 1), (5, None, 0)], ids=["full", "mute", "one free"]
    )
    def test_one_that_is_full_has_a_place_for_the_canary(
        self, server, tiny_model_dir, tmp_path, places, waiting, each
    ):
        """All but one run on where four run: the sync would wait for the end of one of them otherwise."""
        trainer = self.full(server, tiny_model_dir, tmp_path, places, waiting)
        trainer.train()
        assert trainer.synced_beside == [4 - each]
        assert sum(done.aborted_requests for done in trainer.rounds) == each
        assert set(numbers(trainer.trained_groups).values()) == {1} and len(trainer.pool) == 0

    def test_one_that_has_preempted_requests_has_all_cut(self, server, tiny_model_dir, tmp_path):
        """They come before the canary, whatever else is cut."""
        trainer = self.full(server, tiny_model_dir, tmp_path, 256, 17)
        trainer.train()
        assert sum(done.aborted_requests for done in trainer.rounds) == 4 and trainer.synced_beside == []
        assert set(numbers(trainer.trained_groups).values()) == {1} and len(trainer.pool) == 0

    def full(self, server, model_dir, output_dir, places, waiting):
        """A trainer of such a server; it notes how many requests each sync has let run on."""
        trainer = make_trainer(
            server, model_dir, output_dir, resume_kv="keep", overlap_generation=True, **ONE_AFTER_THE_OTHER
        )
        generation = trainer.vllm_generation
        generation.facts = replace(generation.facts, max_sequences=places)
        generation.requests_waiting = lambda: waiting
        pause, trainer.synced_beside = generation.pause, []

        def noted() -> bool:
            trainer.synced_beside.append(trainer._session.driver.in_flight)
            return pause()

        generation.pause = noted
        return trainer

    @pytest.mark.parametrize("resume_kv", ["keep", "reuse", "recompute"])
    def test_one_that_was_left_paused_is_resumed(self, server, tiny_model_dir, tmp_path, caplog, resume_kv):
        """By a training that was killed in a sync; whatever the next one does."""
        requests.post(f"{server.base_url}/pause?mode=keep&clear_cache=false", timeout=10).raise_for_status()
        # If it were not, the first completion would be waited for in vain.
        rescue = threading.Timer(60.0, requests.post, [f"{server.base_url}/resume"])
        rescue.start()
        began = time.monotonic()
        with caplog.at_level(logging.WARNING, "trl_april"):
            make_trainer(server, tiny_model_dir, tmp_path, resume_kv=resume_kv, overlap_generation=True)
        rescue.cancel()
        assert "is paused. It is resumed." in caplog.text and time.monotonic() - began < 60
        assert requests.get(f"{server.base_url}/is_paused", timeout=10).json() == {"is_paused": False}

    def test_a_sync_that_fails_leaves_none_paused(self, server, tiny_model_dir, tmp_path):
        trainer = make_trainer(
            server, tiny_model_dir, tmp_path, resume_kv="keep", overlap_generation=True, **ONE_AFTER_THE_OTHER
        )
        fail_once_while_paused(trainer.vllm_generation, server, ValueError("that cannot be loaded"))
        with pytest.raises(ValueError, match="that cannot be loaded"):
            trainer.train()
        assert requests.get(f"{server.base_url}/is_paused", timeout=10).json() == {"is_paused": False}
        assert wait_until_idle(server) == 0

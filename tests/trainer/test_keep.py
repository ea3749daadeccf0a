"""Requests that survive a weight sync on the real server: exact versions and log-probabilities."""

from collections import defaultdict
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.checkpoint.test_resume import SAVED, assert_continued, numbers, saved_groups
from tests.trainer.test_overlap import limit_lengths
from tests.trainer.test_trainer import make_trainer, rows_of, wait_until_idle
from trl_april.engine.vllm import VLLMEngine
from trl_april.errors import ServerError
from trl_april.server.command_line import GENERATED_TOKENS_PATH as PATH


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]

BLOCK_SIZE = 128  # of vLLM on a CPU, in tokens


def mixed(models, group, sample, starts=()):
    """Log-probabilities of the completion, each segment under its own weights behind keys and values of the others.

    When the weights change, the last token has been sampled and its keys and values have not been computed yet.
    `starts` has where each request began, and whether its server had the blocks of the request before. What these do
    not hold is computed anew.
    """
    ids, prompt = torch.tensor([[*group.prompt_ids, *sample.token_ids]]), len(group.prompt_ids)
    # Only full blocks are held, and the last token of a request is always computed.
    held = {prompt + at: has_blocks * ((prompt + at - 1) // BLOCK_SIZE * BLOCK_SIZE) for at, has_blocks in starts}
    past, end, found = DynamicCache(), prompt, []
    for segment in sample.segments:
        begin, end = end, end + segment.length
        for left, right in pairwise([begin, *sorted(place for place in held if begin < place < end), end]):
            cached = held.get(left, left - 1) if found else 0
            if not cached:
                past = DynamicCache()
            elif cached < past.get_seq_length():
                past.crop(cached - past.get_seq_length())
            assert past.get_seq_length() == cached
            with torch.no_grad():
                logits = models[segment.version](ids[:, cached : right - 1], past_key_values=past, use_cache=True)
            logprobs = logits.logits[0, left - 1 - cached :].log_softmax(-1)
            found.append(logprobs.gather(-1, ids[0, left:right, None]).squeeze(-1))
    return torch.cat(found)


def check_mixed(trainer, model_dir, starts=None) -> int:
    """Compare each token's log-probability with [`mixed`], to 1e-4 in float32; returns the segments in mid-chunk."""
    models = {}
    for version, weights in trainer.weights.items():
        models[version] = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        models[version].load_state_dict(weights, strict=False)
    inside = 0
    for group in trainer.trained_groups:
        for sample in group.samples:
            recorded = torch.tensor(sample.logprobs.tolist())
            began = (starts or {}).get(sample.key, ())
            wrong = ((mixed(models, group, sample, began) - recorded).abs() >= 1e-4).nonzero()
            assert not len(wrong), (sample.key, sample.segments, began, f"wrong from token {int(wrong[0])} on")
            first = sample.segments[0].length
            inside += len(sample.segments) > 1 and first % 64 != 1
    return inside


def note_starts(monkeypatch) -> dict[tuple[int, int], list[tuple[int, bool]]]:
    """Where the requests of each sample begin, from now on, and whether the server has the blocks of the one before.

    A server has them unless it died in between, or is another one. Requests are cut and resumed on the same server
    where the check of a weight sync needs a free slot.
    """
    starts, holders, generate = defaultdict(list), {}, VLLMEngine.generate

    async def noted(engine, request):
        sample = request.sample.key
        starts[sample].append((request.generated, holders.pop(sample, None) is engine))
        try:
            async with aclosing(generate(engine, request)) as stream:
                async for chunk in stream:
                    if chunk.finish_reason is not None:
                        holders[sample] = engine
                    yield chunk
        except ServerError:
            for key in [key for key, holder in holders.items() if holder is engine]:
                del holders[key]
            raise

    monkeypatch.setattr(VLLMEngine, "generate", noted)
    return starts


@pytest.fixture(scope="module")
def kept(server, tiny_model_dir, tmp_path_factory, one_thread):
    """A run whose requests survive weight syncs, with evaluation and checkpoints. The first group survives several."""
    trainer = make_trainer(
        server, tiny_model_dir, tmp_path_factory.mktemp("kept"), resume_kv="keep", overlap_generation=True,
        over_provisioning=4.0, max_completion_length=400, generation_kwargs={"ignore_eos": True}, max_steps=10,
        eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=16, eval_dataset=rows_of(4), **SAVED,
    )  # fmt: skip
    trainer.failed = fail_once_while_paused(trainer.vllm_generation, server, ServerError("The connection was reset."))
    with pytest.MonkeyPatch.context() as patch:
        limit_lengths(patch, lambda group_id: 30 + 20 * (group_id % 10) if group_id else 400)
        trainer.train()
    return trainer


def fail_once_while_paused(generation, server, error: Exception) -> list[bool]:
    """Lose the server's answer to new weights; returns a list of lost answers."""
    answer, failed = generation.server.request, []

    def fail(method, path, *args, **options):
        if path == "collective_rpc" and not failed:
            if requests.get(f"{server.base_url}/is_paused", timeout=10).json()["is_paused"]:  # or nothing ran
                failed.append(True)
                raise error
        return answer(method, path, *args, **options)

    generation.server.request = fail
    return failed


class TestKept:
    def test_no_request_is_aborted(self, kept):
        assert sum(done.aborted_requests for done in kept.rounds) == 0
        # Some request lived through a sync; how many of them depends on the speed of server and trainer.
        assert max(len(s.segments) for group in kept.trained_groups for s in group.samples) > 1

    def test_every_token_is_trained_once_within_the_bound(self, kept, server):
        assert kept.failed, "a sync was to be done again, and requests to live through that, too"
        assert len(kept.pool) == 0 and wait_until_idle(server) == 0
        assert sorted(group.group_id for group in kept.trained_groups) == list(range(40))
        assert set(numbers(kept.trained_groups).values()) == {1}
        tokens = sum(group.num_tokens for group in kept.trained_groups)
        assert tokens == kept.pool.counters.tokens_generated == kept.pool.counters.tokens_taken
        ages = [done.version - s.segments[0].version for done in kept.rounds for g in done.groups for s in g.samples]
        assert 1 <= max(ages) <= kept.args.max_staleness

    def test_every_token_has_the_version_that_sampled_it(self, kept, tiny_model_dir):
        """To the token, also in the middle of what is streamed as one chunk."""
        assert check_mixed(kept, tiny_model_dir) > 0

    def test_a_checkpoint_holds_every_arrived_token(self, server, tiny_model_dir, tmp_path, kept):
        """It was written after an evaluation, whose weight sync the requests survived."""
        checkpoint = Path(kept.args.output_dir, "checkpoint-4")
        resumed = make_trainer(
            server, tiny_model_dir, tmp_path, resume_kv="keep", overlap_generation=True, over_provisioning=4.0,
            max_completion_length=400, max_steps=10,
        )  # fmt: skip
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_continued(saved_groups(checkpoint), resumed.trained_groups)
        before = [group for done in kept.rounds[:4] for group in done.groups]
        assert set(numbers(before + resumed.trained_groups).values()) == {1} and len(resumed.pool) == 0


def test_requests_are_aborted_without_the_middleware(server, tiny_model_dir, tmp_path, monkeypatch, caplog):
    """A server started by other means: a warning, and training as with "reuse"."""
    monkeypatch.setattr("trl_april.server.traffic.GENERATED_TOKENS_PATH", PATH + "-that-is-not-there")
    # The first step is short beside the completions of the second one, which run in its weight sync.
    limit_lengths(monkeypatch, lambda group_id: 1000 if group_id else 8)
    trainer = make_trainer(
        server, tiny_model_dir, tmp_path, resume_kv="keep", overlap_generation=True, over_provisioning=1.0,
        max_completion_length=1000, per_device_train_batch_size=4, generation_kwargs={"ignore_eos": True}, max_steps=2,
    )  # fmt: skip
    trainer.train()
    assert caplog.text.count("resume_kv='keep' is not possible") == 1
    assert sum(done.aborted_requests for done in trainer.rounds) > 0
    assert set(numbers(trainer.trained_groups).values()) == {1} and len(trainer.pool) == 0

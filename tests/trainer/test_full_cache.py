"""A real server whose KV cache is full: it preempts requests, which live through weight syncs all the same."""

import math
from itertools import accumulate

import pytest

from tests.trainer.test_keep import note_starts
from tests.trainer.test_overlap import counter
from tests.trainer.test_trainer import make_trainer, rows_of, wait_until_idle
from trl_april.server.local import LocalServer


pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]

BLOCKS = 40  # of 128 tokens
LENGTH = 500


@pytest.fixture(scope="module")
def small(tiny_model_dir):
    flags = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--num-gpu-blocks-override"]
    with LocalServer(tiny_model_dir, vllm_args=[*flags, str(BLOCKS)], quiet=True) as server:
        yield server


def test_requests_live_through_syncs_while_others_are_preempted(small, tiny_model_dir, tmp_path, monkeypatch):
    starts = note_starts(monkeypatch)
    preemptions = counter(small, "vllm:num_preemptions_total")
    trainer = make_trainer(
        small, tiny_model_dir, tmp_path, dataset=rows_of(48), resume_kv="keep", overlap_generation=True,
        over_provisioning=4.0, max_completion_length=LENGTH, max_steps=12, generation_kwargs={"ignore_eos": True},
    )  # fmt: skip
    trainer.train()
    assert counter(small, "vllm:num_preemptions_total") > preemptions
    samples = [sample for group in trainer.trained_groups for sample in group.samples]
    assert len(samples) == 48 * 4 and all(len(sample) == LENGTH for sample in samples)
    kept = 0  # changes of the version within a request
    for sample in samples:
        ends = [*accumulate(segment.length for segment in sample.segments)][:-1]
        kept += len({*ends} - {begin for begin, _ in starts[sample.key]})
    # A server that is full keeps what it decodes, not what waits for memory.
    assert kept > 7 * len(trainer.rounds)
    assert all(math.isfinite(value) for sample in samples for value in sample.logprobs)
    assert len(trainer.pool) == 0 and wait_until_idle(small) == 0

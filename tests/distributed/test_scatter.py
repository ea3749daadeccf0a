"""Which process trains which samples of a batch, and groups in messages. Packing itself is tested in tests/pool."""

import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_april.distributed.scatter import Shard, from_message, shards, to_message
from trl_april.errors import ConfigError, PoolError
from trl_april.pool.budget import Budget
from trl_april.pool.samples import FinishReason, Group, Sample, SampleState, Score, Segment


@st.composite
def batches(draw) -> tuple[list[int], int, int]:
    """Ids of a batch, samples per group, and a number of processes that divides the samples."""
    num_generations, num_processes = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    least = num_processes // math.gcd(num_processes, num_generations)
    count = least * draw(st.integers(1, 4))
    batch = draw(st.lists(st.integers(0, 10_000), min_size=count, max_size=count, unique=True))
    return sorted(batch), num_generations, num_processes


@given(batches())
def test_shards_are_equal_slices_of_the_list_of_samples(case):
    batch, num_generations, num_processes = case
    whole = [(group_id, index) for group_id in batch for index in range(num_generations)]
    size = len(whole) // num_processes
    found = [[(s.group_id, k) for s in part for k in range(s.first, s.stop)] for part in shards(*case)]
    assert found == [whole[process * size : (process + 1) * size] for process in range(num_processes)]
    assert all(0 <= s.first < s.stop <= num_generations for part in shards(*case) for s in part)


def test_samples_that_do_not_divide_evenly_are_refused():
    with pytest.raises(PoolError, match="9 samples do not divide into equal shards for 2 processes"):
        shards(range(3), 3, 2)


def make_sample(length: int, index: int = 0) -> Sample:
    sample = Sample(1, index, array("i", range(length)), array("f", [-0.5] * length), [Segment(0, length)])
    sample.state, sample.finish_reason = SampleState.FINISHED, FinishReason.STOP
    return sample


def make_group(*lengths: int, **fields: object) -> Group:
    samples = [make_sample(length, index) for index, length in enumerate(lengths)]
    return Group(1, {"prompt": "row 1"}, [5, 6], Budget(10), 0, samples, **fields)


def rows_here(group_id: int) -> dict[str, str]:
    return {"prompt": f"row {group_id}", "read": "here"}


def test_shard_arrives_with_its_samples_and_rewards_and_the_row_read_here():
    """Rewards are handed to TRL sample by sample, so a shard must not bring those of other samples."""
    group = make_group(1, 2, 3, score=Score([[0.0], [math.nan], [2.0]], {"größe": ["Zürich 東京", Path("a/b"), None]}))
    (arrived,) = from_message(to_message([Shard(1, 1, 3).of(group)]), rows_here)
    assert [(s.index, len(s), s.logprobs, s.segments) for s in arrived.samples] == [
        (s.index, len(s), s.logprobs, s.segments) for s in group.samples[1:]
    ]
    assert repr(arrived.score) == repr(Score([[math.nan], [2.0]], {"größe": ["a/b", None]}))
    assert (arrived.row, arrived.prompt_ids) == (rows_here(1), group.prompt_ids)
    assert len(group.samples) == len(group.score.rewards) == 3, "the group itself is unchanged"


def test_rows_do_not_travel():
    group = make_group(3)
    group.row = {"prompt": "secret", "answer": object()}
    message, row_here = to_message([group]), {"prompt": "secret", "answer": object()}
    assert b"secret" not in message
    (arrived,) = from_message(message, lambda group_id: row_here)
    assert arrived.row is row_here


def test_process_that_reads_other_rows_is_told_so():
    """Otherwise completions would be scored with the answers of other prompts."""
    with pytest.raises(ConfigError, match=r"read another row 1 .*do not split it by process"):
        from_message(to_message([make_group(3)]), lambda group_id: {"prompt": "other"})


def test_message_of_a_wrong_length_is_refused():
    """A log-probability too few or too many would shift all that follow to other tokens."""
    message = to_message([make_group(3, 2), make_group(1)])
    for wrong in (message[:-4], message[:-8], message[:-24], message[:-28], message + bytes(4), message + bytes(40)):
        with pytest.raises(PoolError, match="values are announced|belong to none of them|malformed"):
            from_message(wrong, rows_here)
    assert len(from_message(message, rows_here)) == 2

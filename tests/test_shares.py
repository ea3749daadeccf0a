"""Who trains which samples of a batch, and groups on their way from one process to another."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_april.errors import ConfigError, PoolError
from trl_april.shares import Part, from_message, owner_of, part_of, shares, to_message
from trl_april.types import FinishReason, Group, Sample, SampleState, Score, Segment


# Shares


def samples_of(parts: Sequence[Part]) -> list[tuple[int, int]]:
    return [(part.group_id, index) for part in parts for index in range(part.first, part.stop)]


def test_shares_by_hand():
    """Two groups end at the boundary between two processes, one straddles it."""
    assert shares([2, 3, 7], 4, 2) == [[Part(2, 0, 4), Part(3, 0, 2)], [Part(3, 2, 4), Part(7, 0, 4)]]
    assert shares([5, 6], 2, 2) == [[Part(5, 0, 2)], [Part(6, 0, 2)]]


def test_a_group_of_more_samples_than_a_share_is_trained_by_several_processes():
    assert shares([9], 6, 3) == [[Part(9, 0, 2)], [Part(9, 2, 4)], [Part(9, 4, 6)]]


@st.composite
def batches(draw) -> tuple[list[int], int, int]:
    """Ids of a batch, samples per group, and a number of processes that divides the samples."""
    num_generations, num_processes = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    least = num_processes // math.gcd(num_processes, num_generations)
    count = least * draw(st.integers(1, 4))
    batch = draw(st.lists(st.integers(0, 10_000), min_size=count, max_size=count, unique=True))
    return sorted(batch), num_generations, num_processes


@given(batches())
@settings(deadline=None)
def test_shares_are_equal_runs_of_the_batch(case):
    """Disjoint, complete, equal and in the order of the batch: the parts are the slices of the list of samples."""
    batch, num_generations, num_processes = case
    dealt = shares(batch, num_generations, num_processes)
    whole = [(group_id, index) for group_id in batch for index in range(num_generations)]
    share = len(whole) // num_processes
    assert len(dealt) == num_processes
    for process, parts in enumerate(dealt):
        assert samples_of(parts) == whole[process * share : (process + 1) * share]
        assert all(0 <= part.first < part.stop <= num_generations for part in parts)
        assert len({part.group_id for part in parts}) == len(parts)


@given(batches())
@settings(deadline=None)
def test_one_process_trains_the_whole_batch(case):
    batch, num_generations, _ = case
    assert shares(batch, num_generations, 1) == [[Part(group_id, 0, num_generations) for group_id in batch]]


@pytest.mark.parametrize(("count", "num_generations", "num_processes"), [(3, 3, 2), (1, 4, 8), (5, 2, 4)])
def test_samples_that_cannot_be_dealt_out_equally_are_refused(count, num_generations, num_processes):
    with pytest.raises(PoolError, match=f"{count * num_generations} samples .* {num_processes} processes"):
        shares(range(count), num_generations, num_processes)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_the_groups_go_round_among_the_processes(num_processes):
    assert [owner_of(k, num_processes) for k in range(3 * num_processes)] == 3 * list(range(num_processes))


# Groups in a message


BITS = st.integers(-(2**31), 2**31 - 1)
LOGPROBS = st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)
SHOWN = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False))
REWARDS = st.one_of(st.just(math.nan), st.floats(allow_nan=False))


@st.composite
def finished_samples(draw, group_id: int, index: int, born: int) -> Sample:
    sample = Sample(group_id, index)
    version = born
    for length in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
        version += draw(st.integers(0, 2))
        token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
        sample.segment_open = False
        sample.append(token_ids, draw(st.lists(LOGPROBS, min_size=length, max_size=length)), version)
    sample.segment_open = False
    sample.state, sample.finish_reason = SampleState.FINISHED, draw(st.sampled_from(FinishReason))
    return sample


@st.composite
def finished_groups(draw, group_id: int) -> Group:
    born, count = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    samples = [draw(finished_samples(group_id, index, born)) for index in range(count)]
    prompt_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
    group = Group(group_id, {"prompt": f"row {group_id}"}, prompt_ids, draw(st.integers(9, 99)), born, samples)
    if draw(st.booleans()):
        columns = st.dictionaries(st.text(), st.lists(SHOWN, min_size=count, max_size=count), max_size=2)
        functions = draw(st.integers(1, 2))
        rewards = [[draw(REWARDS) for _ in range(functions)] for _ in range(count)]
        group.score = Score(rewards, draw(columns))
    return group


@st.composite
def groups_to_send(draw) -> list[Group]:
    return [draw(finished_groups(3 * number + 1)) for number in range(draw(st.integers(0, 3)))]


def everything(group: Group) -> tuple:
    """All of a group but its row, with log-probabilities and rewards as bits, so that NaN and -0.0 can be compared."""
    score = group.score and ([array("d", rewards).tobytes() for rewards in group.score.rewards], group.score.extra)
    samples = [
        (
            (s.group_id, s.index, s.state, s.finish_reason, s.segment_open, s.segments),
            (s.token_ids.typecode, s.token_ids.tolist(), s.logprobs.typecode, s.logprobs.tobytes()),
        )
        for s in group.samples
    ]
    return group.group_id, group.prompt_ids, group.max_completion_length, group.born, samples, score


def rows_here(group_id: int) -> dict[str, str]:
    return {"prompt": f"row {group_id}", "read": "here"}


@given(groups_to_send())
@settings(deadline=None)
def test_what_was_sent_arrives(groups):
    """Several segments, scores with NaN, columns of any text: all of it, bit by bit, with the row read here."""
    arrived = from_message(to_message(groups), rows_here)
    assert [everything(group) for group in arrived] == [everything(group) for group in groups]
    assert [group.row for group in arrived] == [rows_here(group.group_id) for group in groups]
    for group in arrived:
        assert all(isinstance(sample.finish_reason, FinishReason) for sample in group.samples)


@given(group=finished_groups(4), data=st.data())
@settings(deadline=None)
def test_parts_of_a_group_arrive_as_parts(group, data):
    """Parts that are sent one by one are together the group, each sample at its own index."""
    cut = data.draw(st.integers(0, len(group.samples)))
    parts = [part_of(group, Part(4, 0, cut)), part_of(group, Part(4, cut, len(group.samples)))]
    arrived = [from_message(to_message([part]), rows_here)[0] for part in parts]
    assert [sample for part in arrived for sample in everything(part)[4]] == everything(group)[4]
    assert [sample.index for part in arrived for sample in part.samples] == list(range(len(group.samples)))
    assert [len(part.samples) for part in arrived] == [cut, len(group.samples) - cut]


@given(st.lists(BITS, min_size=1, max_size=20))
def test_log_probabilities_keep_their_bits(bits):
    """Whatever float32 the engine has sent, subnormal or -0.0: it is what the correction works on."""
    logprobs = array("f", array("i", bits).tobytes())
    sample = make_sample(len(bits))
    sample.logprobs = logprobs
    ((arrived,),) = [group.samples for group in from_message(to_message([make_group(sample)]), rows_here)]
    assert arrived.logprobs.tobytes() == logprobs.tobytes() == array("i", bits).tobytes()


def make_sample(length: int, index: int = 0) -> Sample:
    sample = Sample(1, index, array("i", range(length)), array("f", [-0.5] * length), [Segment(0, length)])
    sample.state, sample.finish_reason = SampleState.FINISHED, FinishReason.STOP
    return sample


def make_group(*samples: Sample, **fields: object) -> Group:
    return Group(1, {"prompt": "row 1"}, [5, 6], 10, 0, list(samples), **fields)


def test_a_part_has_its_samples_and_leaves_the_group_as_it_was():
    group = make_group(make_sample(1, 0), make_sample(2, 1), make_sample(3, 2))
    part = part_of(group, Part(1, 1, 3))
    assert [sample.index for sample in part.samples] == [1, 2]
    assert (part.row, part.prompt_ids, part.born) == (group.row, group.prompt_ids, group.born)
    assert [sample.index for sample in group.samples] == [0, 1, 2]


def test_a_part_has_the_rewards_of_its_samples():
    """Rewards are handed to TRL sample by sample, so a part must not bring those of samples that are elsewhere."""
    score = Score([[0.0], [1.0], [2.0]], {"note": ["a", "b", "c"]})
    group = make_group(make_sample(1, 0), make_sample(2, 1), make_sample(3, 2), score=score)
    part = part_of(group, Part(1, 1, 3))
    assert part.score == Score([[1.0], [2.0]], {"note": ["b", "c"]})
    assert group.score == Score([[0.0], [1.0], [2.0]], {"note": ["a", "b", "c"]})


def test_rows_do_not_travel():
    """Nor does a prompt, but for a digest of it."""
    here, there = make_group(make_sample(3)), make_group(make_sample(3))
    here.row, there.row = {"prompt": "secret", "answer": object()}, {"prompt": "secret"}
    assert to_message([here]) == to_message([there])
    assert b"secret" not in to_message([here])


@pytest.mark.parametrize("prompt", ["other", [{"role": "user", "content": "row 1"}]])
def test_processes_that_read_other_rows_are_told_so(prompt):
    """Or completions would be scored with somebody else's answers."""
    message = to_message([make_group(make_sample(3))])
    with pytest.raises(ConfigError, match=r"has read another row 1 .*do not split it by process"):
        from_message(message, lambda group_id: {"prompt": prompt})


def test_a_prompt_is_compared_and_not_its_tokens():
    """A chat template may have the date in it, and it may be another day, or another tokenizer since a checkpoint."""
    group = make_group(make_sample(3))
    group.row = {"prompt": [{"role": "user", "content": "hi"}]}
    (arrived,) = from_message(to_message([group]), lambda group_id: {"prompt": [{"content": "hi", "role": "user"}]})
    assert arrived.prompt_ids == group.prompt_ids


def test_what_reward_functions_log_arrives_as_it_is_shown():
    score = Score([[1.0]], {"größe": ["Zürich 東京 \U0001f600"], "where": [Path("a/b")]})
    (arrived,) = from_message(to_message([make_group(make_sample(1), score=score)]), rows_here)
    assert arrived.score == Score([[1.0]], {"größe": ["Zürich 東京 \U0001f600"], "where": ["a/b"]})


def test_a_message_of_a_wrong_length_is_refused():
    """One log-probability too few or too many would shift all that follow to other tokens."""
    message = to_message([make_group(make_sample(3, 0), make_sample(2, 1)), make_group(make_sample(1))])
    for wrong in (message[:-4], message[:-8], message[:-24], message[:-28], message + bytes(4), message + bytes(40)):
        with pytest.raises(PoolError, match="values are announced|belong to none of them|malformed"):
            list(from_message(wrong, rows_here))
    assert len(list(from_message(message, rows_here))) == 2


def test_no_beginning_of_a_message_passes_for_the_whole():
    message = to_message([make_group(make_sample(3, 0), make_sample(2, 1))])
    passed = []
    for length in range(len(message)):
        try:
            passed.append(list(from_message(message[:length], rows_here)))
        except Exception:
            continue
    assert passed == []

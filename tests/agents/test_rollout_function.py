"""Rollout functions: the turns of a sample, wherever its requests are cut, and from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from accelerate import PartialState
from PIL import Image

from tests.support.tool_calling import END, HEADER, ToolScript, encode
from trl_april.agents.rollout_function import RolloutTurns
from trl_april.errors import ConfigError
from trl_april.pool.budget import Budget
from trl_april.pool.samples import Conversation, FinishReason, Group, Sample, Segment
from trl_april.rollout.user_code import UserCode


PROMPT = encode("<|im_start|>user\nq<|im_end|>\n") + HEADER
FOLLOW_UP = encode("\n<|im_start|>user\nAre you sure?<|im_end|>\n") + HEADER
BUDGET = 200
TURNS = [["Yes." + END, "Quite." + END, "Sure." + END], ["Perhaps." + END, "x" * 400], ["y" * 400]]


async def ask_again(prompt, engine, row):
    token_ids, turns = [*engine.prompt_ids], []
    while not turns or (turns[-1].finish_reason == "stop" and len(turns) < 3):
        turns.append(await engine.generate(token_ids))
        token_ids += [*turns[-1].token_ids, *FOLLOW_UP]
    return {"answers": [len(turn.token_ids) for turn in turns], "logprobs": sum(sum(turn.logprobs) for turn in turns)}


@pytest.fixture
def acts():
    """Makes a `RolloutTurns` of a rollout function."""
    made = []
    PartialState()  # for log messages

    def make(rollout):
        made.append(RolloutTurns(rollout, lambda prompt: [*PROMPT], UserCode()))
        return made[-1]

    yield make
    for act in made:
        act.close()


def new_group(budget=BUDGET, turns=TURNS, context_length=4000):
    samples = [Sample(0, index, conversation=Conversation(awaits_reset=True)) for index in range(len(turns))]
    return Group(0, {"prompt": "q"}, [], Budget(budget, context_length), 0, samples)


def play(act, group, piece, *, most=None, turns=TURNS):
    """Generate in requests of at most `piece` tokens, until all samples are complete or have made `most` of them."""
    script = ToolScript(turns)
    for sample in group.samples:
        conversation, made = sample.conversation, 0
        if conversation.awaits_reset:
            conversation.prompt_ids, conversation.awaits_reset = act(group, sample).prompt_ids, False
        while sample.finish_reason is None and made != most:
            made += 1
            rest, logprobs = script.rest([*conversation.prompt_ids, *sample.token_ids], sample.index)
            length = min(len(rest), group.remaining(sample), piece)
            sample.append(rest[:length], logprobs[:length], version=len(sample.segments))
            sample.segment_open = False
            if length < len(rest) and group.remaining(sample):
                continue
            conversation.turn_ended = reason = FinishReason.STOP if length == len(rest) else FinishReason.LENGTH
            result = act(group, sample)
            sample.append(result.token_ids, [0.0] * len(result.token_ids), None)
            sample.segment_open = False
            conversation.columns = result.columns
            conversation.next_turn(result.messages, calls=0, failures=0, start=len(sample), environment=None)
            if result.is_complete:
                sample.finish_reason = reason
    return group


def outcome(group):
    return [
        (sample.token_ids.tolist(), sample.logprobs.tolist(), sample.finish_reason, sample.conversation.columns)
        for sample in group.samples
    ]


def test_turns_in_pieces_are_those_of_whole_ones(acts):
    whole = outcome(play(acts(ask_again), new_group(), 1000))
    for piece in (1, 17):
        assert outcome(play(acts(ask_again), new_group(), piece)) == whole
    (first, logprobs, reason, columns), second, third = whole
    yes, quite, sure = map(encode, TURNS[0])
    assert first == [*yes, *FOLLOW_UP, *quite, *FOLLOW_UP, *sure] and reason == "stop"
    assert [value == 0.0 for value in logprobs] == [
        masked for turn in (yes, quite, sure) for masked in [*[False] * len(turn), *[True] * len(FOLLOW_UP)]
    ][: len(first)]
    assert columns == {"answers": [len(yes), len(quite), len(sure)], "logprobs": pytest.approx(sum(logprobs))}
    assert (second[2], len(second[0])) == (third[2], len(third[0])) == ("length", BUDGET)
    assert second[3]["answers"] == [len(encode(TURNS[1][0])), BUDGET - len(encode(TURNS[1][0])) - len(FOLLOW_UP)]


def test_what_leaves_no_budget_is_dropped_and_the_turn_is_empty(acts):
    yes = len(encode(TURNS[0][0]))
    for budget in (yes + 1, yes + len(FOLLOW_UP), yes + len(FOLLOW_UP) + 1):
        ((token_ids, _, reason, columns),) = outcome(play(acts(ask_again), new_group(budget, TURNS[:1]), 1000))
        fits = budget > yes + len(FOLLOW_UP)
        assert len(token_ids) == (budget if fits else yes) and columns["answers"] == [yes, int(fits)]
        assert reason == ("length" if fits else "stop")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, turn: ids, "asked for a turn after .* do not continue"),
        (lambda ids, turn: [*ids, *turn.token_ids], "at least a token more"),
        (lambda ids, turn: [ids[0] + 1, *ids[1:], *turn.token_ids, 5], "Pass the prompt"),
    ],
)
def test_ids_that_do_not_continue_the_sample_are_refused(acts, change, message):
    async def rollout(prompt, engine, row):
        await engine.generate(change(PROMPT, await engine.generate(PROMPT)))

    with pytest.raises(ConfigError, match=message):
        play(acts(rollout), new_group(), 1000)


async def returns_early(prompt, engine, row):
    return {}


async def returns_text(prompt, engine, row):
    await engine.generate(PROMPT)
    return "text"


async def goes_on(prompt, engine, row):
    token_ids = [*PROMPT]
    while True:
        token_ids += [*(await engine.generate(token_ids)).token_ids, *FOLLOW_UP]


async def asks_twice(prompt, engine, row):
    first = engine.generate(PROMPT)
    first.send(None)
    await engine.generate(PROMPT)


async def exits(prompt, engine, row):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("rollout", "error", "message"),
    [
        (returns_early, ConfigError, "did not begin with a turn after its prompt"),
        (returns_text, ConfigError, "returned 'text'. Return None, or a dict"),
        (goes_on, ConfigError, r"its 200 tokens used up \(max_completion_length\). Return when"),
        (asks_twice, ConfigError, "during another call"),
        (exits, SystemExit, "3"),
    ],
)
def test_errors_of_a_rollout_reach_the_round(acts, rollout, error, message):
    with pytest.raises(error, match=message):
        play(acts(rollout), new_group(turns=TURNS[1:]), 1000, turns=TURNS[1:])


def test_a_prompt_beyond_the_context_is_refused(acts):
    with pytest.raises(ConfigError, match=rf"has {len(PROMPT)} tokens.*context {len(PROMPT)}: no room is left"):
        play(acts(ask_again), new_group(context_length=len(PROMPT)), 1000)


def test_a_prompt_with_images_is_that_of_the_row(acts):
    """Nothing says where else its images stand."""

    async def begins_elsewhere(prompt, engine, row):
        await engine.generate([*engine.prompt_ids, 5])

    for rollout in (ask_again, begins_elsewhere):
        group = new_group(turns=TURNS[:1])
        group.row = {"prompt": [{"role": "user", "content": "q"}], "image": Image.new("RGB", (2, 2))}
        if rollout is ask_again:
            assert len(play(acts(rollout), group, 1000).samples[0]) > 0
        else:
            with pytest.raises(ConfigError, match="engine.generate\\(engine.prompt_ids\\)"):
                play(acts(rollout), group, 1000)


# Checkpoints


def copied(group):
    """The group as a checkpoint brings it back."""
    samples = [
        replace(
            sample,
            segments=[Segment(segment.version, segment.length) for segment in sample.segments],
            conversation=Conversation(**json.loads(json.dumps(asdict(sample.conversation)))),
        )
        for sample in group.samples
    ]
    return replace(group, samples=samples)


@pytest.mark.parametrize("requests", [1, 2, 3, 9, 20])
def test_coroutines_continue_from_a_checkpoint(acts, requests):
    whole = outcome(play(acts(ask_again), new_group(), 1000))
    group = copied(play(acts(ask_again), new_group(), 9, most=requests))
    act, unfinished = acts(ask_again), sum(sample.finish_reason is None for sample in group.samples)
    assert act.restore([group]) == [] and act.take_restored() == (unfinished, 0)
    assert outcome(play(act, group, 1000)) == whole


@pytest.mark.parametrize("fails", [False, True])
def test_a_sample_whose_rollout_asks_for_other_turns_starts_again(acts, caplog, fails):
    async def other(prompt, engine, row):
        turn = await engine.generate(PROMPT)
        if fails:
            raise OSError("gone")
        await engine.generate([*PROMPT, *turn.token_ids, 5])

    group = copied(play(acts(ask_again), new_group(), 1000, most=2))
    act = acts(other)
    (new,) = act.restore([group])  # the other samples are complete
    assert new.key == group.samples[0].key and new.conversation.awaits_reset and not len(new)
    assert (act.take_restored(), act.take_restored()) == ((0, 1), (0, 0))
    assert "1 samples start again, and lose " in caplog.text and ("OSError('gone')" in caplog.text) == fails

"""Rollout functions: the turns of a sample, wherever its requests are cut, and from a checkpoint."""

from __future__ import annotations

import pytest
from PIL import Image

from tests.agents import agent_runs
from tests.agents.agent_runs import new_pool, question, resumed
from tests.support.tool_calling import END, HEADER, TOKENIZER, ToolScript, encode
from trl_april.errors import ConfigError


PROMPT = TOKENIZER.apply_chat_template(question("q0"), add_generation_prompt=True)["input_ids"]
FOLLOW_UP = encode("\n<|im_start|>user\nAre you sure?<|im_end|>\n") + HEADER
BUDGET = 200
TURNS = [["Yes." + END, "Quite." + END, "Sure." + END], ["Perhaps." + END, "x" * 400], ["y" * 400]]


async def ask_again(prompt, engine, row):
    token_ids, turns = [*engine.prompt_ids], []
    while not turns or (turns[-1].finish_reason == "stop" and len(turns) < 3):
        turns.append(await engine.generate(token_ids))
        token_ids += [*turns[-1].token_ids, *FOLLOW_UP]
    return {"answers": [len(turn.token_ids) for turn in turns], "logprobs": sum(sum(turn.logprobs) for turn in turns)}


class Script(ToolScript):
    asked = None


def pool_of(turns=TURNS, budget=BUDGET, context_length=4000):
    return new_pool(len(turns), budget=budget, context_length=context_length)


def play(act, pool, piece=1000, *, most=None, turns=TURNS):
    agent_runs.play(pool, act, Script(turns), piece=piece, most=most)
    return [
        (sample.token_ids.tolist(), sample.logprobs.tolist(), sample.finish_reason, sample.conversation.columns)
        for group in pool
        for sample in group.samples
    ]


def test_turns_in_pieces_are_those_of_whole_ones(acts):
    whole = play(acts(ask_again), pool_of())
    for piece in (1, 17):
        assert play(acts(ask_again), pool_of(), piece) == whole
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
        ((token_ids, _, reason, columns),) = play(acts(ask_again), pool_of(TURNS[:1], budget))
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
        play(acts(rollout), pool_of())


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
        play(acts(rollout), pool_of(TURNS[1:]), turns=TURNS[1:])


def test_a_prompt_beyond_the_context_is_refused(acts):
    with pytest.raises(ConfigError, match=rf"has {len(PROMPT)} tokens.*context {len(PROMPT)}: no room is left"):
        play(acts(ask_again), pool_of(context_length=len(PROMPT)))


def test_a_prompt_with_images_is_that_of_the_row(acts):
    """Nothing says where else its images stand."""

    async def begins_elsewhere(prompt, engine, row):
        await engine.generate([*engine.prompt_ids, 5])

    pool = pool_of(TURNS[:1])
    (group,) = pool
    group.row = {"prompt": question("q0"), "image": Image.new("RGB", (2, 2))}
    with pytest.raises(ConfigError, match="engine.generate\\(engine.prompt_ids\\)"):
        play(acts(begins_elsewhere), pool)
    for sample in group.samples:
        pool.park(sample)
    assert len(play(acts(ask_again), pool)[0][0]) > 0


# Checkpoints


@pytest.mark.parametrize("requests", [1, 2, 3, 9, 20])
def test_coroutines_continue_from_a_checkpoint(acts, requests):
    whole, pool = play(acts(ask_again), pool_of()), pool_of()
    play(acts(ask_again), pool, 9, most=requests)
    act, unfinished = acts(ask_again), sum(sample.finish_reason is None for group in pool for sample in group.samples)
    pool = resumed(pool, act)
    assert act.take_restored() == (unfinished, 0)
    assert play(act, pool) == whole


@pytest.mark.parametrize("fails", [False, True])
def test_a_sample_whose_rollout_asks_for_other_turns_starts_again(acts, caplog, fails):
    async def other(prompt, engine, row):
        turn = await engine.generate(PROMPT)
        if fails:
            raise OSError("gone")
        await engine.generate([*PROMPT, *turn.token_ids, 5])

    pool = pool_of()
    play(acts(ask_again), pool, most=2)
    act = acts(other)
    (group,) = resumed(pool, act)
    assert [len(sample) for sample in group.samples] == [0, BUDGET, BUDGET], "the other samples are complete"
    assert group.samples[0].conversation.awaits_reset
    assert (act.take_restored(), act.take_restored()) == ((0, 1), (0, 0))
    assert "1 samples start again, and lose " in caplog.text and ("OSError('gone')" in caplog.text) == fails

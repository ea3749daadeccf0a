"""Samples in environments against TRL's own: prompts, tokens, masks, log-probabilities, messages, rewards, counts."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig

from tests.agents.agent_runs import resumed, step
from tests.support.environments import GAME, LOG, Counting, Numbered, Saved, Silent, Speaking
from tests.support.tool_calling import END, ScriptedStock, ToolScript, call, multiply, trainer_arguments
from trl_april.bridge import tool_loop
from trl_april.bridge.hand_over import HandOver, loop_results, rollout_output
from trl_april.bridge.rewards import reward_scorer
from trl_april.bridge.tool_loop import tool_turns
from trl_april.config import AprilOptions
from trl_april.errors import ConfigError
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.pool.samples import SampleState
from trl_april.training.batch import batch_rows


pytestmark = pytest.mark.usefixtures("one_thread")
BUDGET, ITERATIONS = 400, 3
SCRIPT, SIZE = ToolScript(GAME), len(GAME)
ROW = {"prompt": [{"role": "user", "content": "Count."}], "start": 2}
BY_NAME = {"count": Saved, "speak": Speaking, "judge": Silent}
ROWS = {  # of TRL's own tests
    "one factory": (Numbered, [ROW]),
    "several by name": (BY_NAME, [{**ROW, "environment": name} for name in BY_NAME]),
    "data of the environments": (BY_NAME, [{"environment": name} for name in ("speak", "count", "judge")]),
    "without tools": (Silent, [{"prompt": ROW["prompt"]}]),
}


def observed(prompts, completions, environments, start=None, **kwargs):
    """Depends on the instances, prompts, roles, and columns."""
    assert len(prompts) == len(environments) and "environment" not in kwargs or kwargs["environment"][0] in BY_NAME
    return [
        len(str(prompt)) + sum(len(str(m)) for m in messages) + (getattr(e, "counter", 0) or len(vars(e)))
        for prompt, messages, e in zip(prompts, completions, environments, strict=True)
    ]


class Recorded(ScriptedStock):
    """Keeps what TRL generates and how it scores that."""

    def _generate(self, prompts):
        self.generated = super()._generate(prompts)
        return self.generated

    def _calculate_rewards(self, inputs, prompts, completions, ids):
        self.prompts, self.rewards = prompts, super()._calculate_rewards(inputs, prompts, completions, ids)
        return self.rewards


def make_stock(folder, factory, rows, tools=(multiply,)):
    size = len(rows) * SIZE
    args = GRPOConfig(
        str(folder), per_device_train_batch_size=size, num_generations=SIZE, report_to=[], use_cpu=True,
        bf16=False, max_completion_length=BUDGET, max_tool_calling_iterations=ITERATIONS,
    )  # fmt: skip
    arguments = {**trainer_arguments(), "tools": list(tools), "train_dataset": Dataset.from_list(rows)}
    stock = Recorded(reward_funcs=[observed], environment_factory=factory, args=args, **arguments)
    stock.script = SCRIPT
    stock.model.train()
    return stock


def make_turns(stock, **options):
    stock.args.save_strategy = "steps"
    return tool_turns(stock, AprilOptions(**options))


def pool_of(*rows, samples=SIZE, first=0, budget=BUDGET):
    pool = Pool(
        1, over_provisioning=len(rows), max_staleness=None, dynamic_sampling=True, has_environments=True,
        budget=Budget(budget, 4000),
    )  # fmt: skip
    pool.begin_round(0)
    for number, row in enumerate(rows, first):
        pool.admit(number, row, [], num_generations=samples)
    return pool


def advance(pool, turns, piece=1000, script=SCRIPT):
    """A request of every sample that is ready, with the calls after it, or the reset."""
    for group, sample in pool.ready():
        step(pool, group, sample, turns, script, piece)


def play(turns, rows, *, piece=1000, killed=False):
    """Groups of the rows, whose turns come in pieces of at most so many tokens.

    If `killed`, all environments are lost after each piece, and the pool comes back from a checkpoint.
    """
    pool = pool_of(*rows)
    while pool.ready():
        advance(pool, turns, piece)
        if killed:
            turns.environments._occupied.clear()
            pool = resumed(pool, turns.environments)
            assert not any(sample.conversation.awaits_reset for group in pool for sample in group.samples)
    return list(pool)


def assert_equal(stock, groups, rewards):
    """What TRL makes of the groups equals what it generated itself."""
    prompt_ids, token_ids, mask, messages, logprobs, *_ = stock.generated
    output = rollout_output(groups)
    ours = loop_results(output, groups)
    assert output["prompt_ids"] == prompt_ids
    assert [row["prompt"] for row in batch_rows(groups)] == stock.prompts
    assert (ours[1], ours[2], ours[3]) == (messages, token_ids, logprobs)
    assert ours[0] == (mask or [[1] * len(ids) for ids in token_ids])
    assert torch.equal(torch.tensor(rewards).nan_to_num(-1.0), stock.rewards.nan_to_num(-1.0))
    metrics = {name: values[-1] for name, values in stock._metrics["train"].items() if name.startswith("tools/")}
    if metrics:
        assert ours[4] / len(token_ids) == pytest.approx(metrics["tools/call_frequency"])
        assert ours[5] / max(1, ours[4]) == pytest.approx(metrics["tools/failure_frequency"])


def expected(stock, rows):
    LOG.clear()
    stock._generate_and_score_completions([dict(row) for row in rows for _ in range(SIZE)])
    counted = LOG.copy()
    LOG.clear()
    return counted


@pytest.mark.parametrize(("name", "piece"), [("one factory", 1), ("one factory", 1000), *((n, 17) for n in ROWS)])
def test_turns_in_pieces_equal_stock(tmp_path, name, piece):
    """Sync and async methods, tools beside them, results that do not fit, malformed calls, limits."""
    factory, rows = ROWS[name]
    stock = make_stock(tmp_path, factory, rows, tools=() if name == "without tools" else [multiply])
    counted, turns = expected(stock, rows), make_turns(stock)
    groups = play(turns, rows, piece=piece)
    scorer = reward_scorer(stock, turns)
    rewards = [row for group in groups for row in scorer.score([group])[0].rewards]
    assert_equal(stock, groups, rewards)
    assert LOG - counted == counted - LOG or set(LOG - counted) | set(counted - LOG) == {"construction"}
    assert len({tuple(group.prompt_ids_of(sample)) for group in groups for sample in group.samples}) > 1 or piece != 1
    assert not turns.environments._occupied


@pytest.mark.parametrize(("factory", "piece"), [(Numbered, 7), (Numbered, 40), (Counting, 60)])
def test_lost_environments_come_back_with_their_states(tmp_path, factory, piece):
    """The run is killed after every piece: nothing is reset, called or generated again, and nothing restarted.

    Without a saved state, calls are replayed on request, also those whose results did not fit, coroutines, and errors.
    """
    replays = factory is Counting
    stock = make_stock(tmp_path, factory, [ROW])
    counted, turns = expected(stock, [ROW]), make_turns(stock, replay_environments=replays)
    groups = play(turns, [ROW], piece=piece, killed=True)
    (score,) = reward_scorer(stock, turns).score(groups)
    assert_equal(stock, groups, score.rewards)
    if replays:
        assert LOG["fill"] > 1
        return
    assert LOG["restoration"] > 50 / piece
    for name in ("reset", "count", "count_twice", "fill"):
        assert LOG[name] == counted[name]


class Forgetful(Counting):
    """Not deterministic: its counter continues after a reset."""

    def reset(self, **row) -> None:
        log = super().reset(**row)
        self.counter = LOG["reset"]
        return log


@pytest.mark.parametrize(("factory", "replays"), [(Counting, False), (Forgetful, True)])
def test_samples_without_their_environments_start_again(tmp_path, factory, replays):
    """Those whose tools were called differ from the replay; the finished ones, too, since they were not scored."""
    stock = make_stock(tmp_path, factory, [ROW])
    turns = make_turns(stock, replay_environments=replays)
    pool = pool_of(ROW)
    for _ in range(3):  # reset, two turns with their calls
        advance(pool, turns)
    (group,) = pool
    lengths = [len(sample) for sample in group.samples]
    turns.environments._occupied.clear()
    again = resumed(pool, turns.environments)
    (group,) = again
    calls = [not replays or index in (0, 1, 5, 6, 7) for index in range(SIZE)]  # whose results show the counter
    assert [len(sample) for sample in group.samples] == [
        0 if called else length for called, length in zip(calls, lengths, strict=True)
    ]
    assert turns.environments.num_restarted == sum(calls)
    assert [sample.state is SampleState.WAITING for sample in group.samples] == calls
    while again.ready():
        advance(again, turns)
    assert len(turns.environments.of([group])) == SIZE


def test_turns_are_parsed_with_the_tools_of_their_environment_while_trl_takes_a_batch(tmp_path, monkeypatch):
    stock = make_stock(tmp_path, BY_NAME, [{"environment": name} for name in BY_NAME])
    turns, parse, seen = make_turns(stock), tool_loop.parse_response, []
    monkeypatch.setattr(tool_loop, "parse_response", lambda *a, tools, **k: seen.append(tools) or parse(*a, **k))
    with HandOver([]).given_to(stock):
        one_sample(turns, call("echo", text="hey"), environment="speak")
    assert [tool.__name__ for tool in seen[0]] == ["multiply", "echo"]


def one_sample(turns, text="", group_id=0, **row):
    """A sample of a group after its reset, and after a first turn."""
    pool = pool_of({**ROW, **row}, samples=1, first=group_id, budget=300)
    for _ in range(1 + bool(text)):
        advance(pool, turns, script=ToolScript([[text + END]]))
    (group,) = pool
    return group, group.samples[0]


def test_an_instance_is_reused_after_its_score_and_not_before(tmp_path):
    stock = make_stock(tmp_path, Counting, [ROW])
    turns = make_turns(stock)
    environments = turns.environments
    LOG.clear()
    first, second = one_sample(turns, group_id=0)[0], one_sample(turns, group_id=1)[0]
    (of_first,), (of_second,) = environments.of([first]), environments.of([second])
    assert of_first is not of_second
    environments.release([first])
    third = one_sample(turns, group_id=2)[0]
    assert environments.of([third, second]) == [of_first, of_second]
    assert LOG["reset"] == 3 and LOG["construction"] <= 2


def test_an_instance_that_is_late_is_discarded(tmp_path, caplog):
    """In its reset, in a tool, or while it is restored."""
    never, hanging = threading.Event(), {1}  # numbers of instances

    class Slow(Saved):
        def __init__(self) -> None:
            super().__init__()
            self.number = LOG["construction"]

        def reset(self, **row):
            assert self.number not in hanging or never.wait()
            return super().reset(**row)

        def _april_restore(self, state):
            assert self.number not in hanging or never.wait()
            super()._april_restore(state)

        def wait(self) -> None:
            """Waits."""
            never.wait()

        async def wait_in_loop(self) -> None:
            """Waits."""
            while not never.is_set():
                await asyncio.sleep(0.01)

    LOG.clear()
    turns = make_turns(make_stock(tmp_path, Slow, [ROW]), tool_timeout=0.2)
    environments = turns.environments
    idle = environments.places[None].idle
    assert [instance.number for instance in idle] == [1]
    for number, name in ((2, "wait"), (3, "wait_in_loop")):
        group, sample = one_sample(turns, call(name))
        assert "did not return within 0.2 seconds" in sample.conversation.messages[1]["content"]
        assert sample.conversation.environment is None, "its state may still change"
        assert [instance.number for instance in environments.of([group])] == [number]
        environments.release([group])
        assert idle == []
    group, sample = one_sample(turns, call("count", by=1))
    environments.release([group])
    assert [instance.number for instance in idle] == [4]
    hanging.update(range(20))
    (new,) = environments.restore([group])
    assert new.key == sample.key and new.conversation.awaits_reset
    assert "_april_restore of Slow did not return within 0.2 seconds" in caplog.text
    with pytest.raises(ConfigError, match="reset of Slow did not return within 0.2 seconds. 3 instances in a row"):
        environments.reset(group, sample)
    assert idle == [], "all of them still hang"
    never.set()


@pytest.mark.parametrize(
    ("factory", "row", "message"),
    [
        ({"a": Counting}, {"environment": "b"}, "environment='b', and environment_factory has 'a'"),
        (type("Long", (Counting,), {"reset": lambda self, **row: "x" * 4000}), {}, "after the reset .*no room"),
        (type("Odd", (Counting,), {"reset": lambda self, **row: [{1}]}), {}, "reset of Odd .* hold a builtins.set"),
        (type("Odd", (Saved,), {"_april_state": lambda self: {1: 2}}), {}, "_april_state of Odd returned {1: 2}"),
        (type("Image", (Counting,), {"reset": lambda self, **row: [{"type": "image", "image": "x"}]}), {}, "an image"),
    ],
)
def test_environments_that_cannot_work_are_refused(tmp_path, factory, row, message):
    turns = make_turns(make_stock(tmp_path, factory, [{**ROW, **row}]))
    with pytest.raises(ConfigError, match=message):
        one_sample(turns, **row)

"""Turns with tools against TRL's own loop: tokens, masks, log-probabilities, messages and counts."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from trl import GRPOConfig

from tests.agents.agent_runs import step
from tests.support.tool_calling import (
    DATASET,
    END,
    SCRIPT,
    TOKENIZER,
    TOOLS,
    ScriptedStock,
    ToolScript,
    add,
    call,
    divide,
    encode,
    multiply,
    trainer_arguments,
)
from trl_april.agents.tools import is_json
from trl_april.bridge.hand_over import first_turns, loop_results, rollout_output
from trl_april.bridge.tool_loop import tool_turns
from trl_april.config import AprilOptions
from trl_april.data.row_json import decode_messages
from trl_april.errors import ConfigError
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Conversation, Group, Sample
from trl_april.training.batch import completion_columns, loss_mask


pytestmark = pytest.mark.usefixtures("one_thread")
BUDGET = 500
PROMPT_IDS = TOKENIZER.apply_chat_template(
    DATASET[0]["prompt"], tools=TOOLS, add_generation_prompt=True, return_dict=False
)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    args = GRPOConfig(
        str(tmp_path_factory.mktemp("stock")), per_device_train_batch_size=len(SCRIPT), num_generations=len(SCRIPT),
        max_completion_length=BUDGET, report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    return ScriptedStock(
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions), args=args, **trainer_arguments()
    )


def generate(stock, turns, budget, iterations):
    """What TRL's own loop makes of the turns."""
    stock.script, stock.num_generations = ToolScript(turns), len(turns)
    stock.max_completion_length, stock.max_tool_calling_iterations = budget, iterations
    stock._metrics["train"].clear()
    stock.model.train()
    functions, coroutines = {tool.__name__: tool for tool in stock.tools[:3]}, {"add": stock.tools[3]}
    stock._sync_tool_dicts, stock._async_tool_dicts = [functions] * len(turns), [coroutines] * len(turns)
    return stock._generate([DATASET[0]["prompt"]] * len(turns))


def play(act, turns, budget, piece):
    """A group whose turns come in pieces of at most so many tokens, each in a request under a version of its own."""
    pool, script = Pool(1, max_staleness=None, has_tools=True), ToolScript(turns)
    pool.begin_round(0)
    group = pool.admit(0, {}, PROMPT_IDS, num_generations=len(turns), max_completion_length=budget)
    for sample in group.samples:
        while sample.finish_reason is None:
            step(pool, group, sample, act, script, piece)
            pool.begin_round(pool.schedule.version + 1)
    return group


def handed_over(group):
    """A finished group as TRL gets it: prompts, then what its tool loop returns."""
    output = rollout_output([group])
    mask, messages, token_ids, logprobs, calls, failures, images = loop_results(output, [group])
    assert not any(images)
    return output["prompt_ids"], token_ids, mask, messages, logprobs, calls, failures


def expected(stock, turns, budget, iterations):
    prompt_ids, token_ids, mask, messages, logprobs, *_ = generate(stock, turns, budget, iterations)
    metrics = stock._metrics["train"]
    calls = metrics["tools/call_frequency"][-1] * len(turns)
    failures = metrics["tools/failure_frequency"][-1] * calls
    return prompt_ids, token_ids, mask, messages, logprobs, round(calls), round(failures)


@pytest.mark.parametrize(("piece", "iterations"), [(1, 9), (17, 0), (17, 1), (17, 2), (1000, 9)])
def test_turns_in_pieces_equal_stock(stock, piece, iterations):
    """Sync and async tools, unknown ones, wrong arguments, malformed calls, long results, length stops, limits."""
    wanted = expected(stock, SCRIPT, BUDGET, iterations)
    group = play(tool_turns(stock, AprilOptions()), SCRIPT, BUDGET, piece)
    for got, want in zip(handed_over(group), wanted, strict=True):
        assert got == want


def test_budgets_around_every_edge_equal_stock(stock):
    """Results that end just within the budget, at it, and beyond it, and calls that it cuts off."""
    turns = SCRIPT[:1]
    act = tool_turns(stock, AprilOptions())
    reasons = set()
    for budget in range(45, 130):
        wanted = expected(stock, turns, budget, 9)
        stock.max_completion_length = BUDGET  # the budget is the group's
        group = play(act, turns, budget, piece=1000)
        assert handed_over(group) == wanted, budget
        reasons.add((len(group.samples[0].segments), group.samples[0].finish_reason))
    assert reasons == {(1, "length"), (1, "stop"), (2, "length"), (3, "length"), (3, "stop")}


def test_old_tokens_and_results_leave_the_loss(stock):
    """Under `staleness_policy="mask"`; TRL multiplies no other mask in when there are tools."""
    group = play(tool_turns(stock, AprilOptions()), SCRIPT[:1], BUDGET, 17)
    (versions,) = (sample.versions for sample in group.samples)
    output = rollout_output([group])
    assert loop_results(output, [group])[0] == [[int(version is not None) for version in versions]]
    assert loss_mask([group], 2) == [[int(version in (2, 3, 4)) for version in versions]]
    assert {0, 2, 4, None} <= {*versions}
    # What TRL itself parses is the first turn.
    first = first_turns(output, [group])
    assert first["completion_ids"] == [encode(SCRIPT[0][0])]
    assert first.keys() == {"prompt_ids", "completion_ids", "logprobs"}
    assert completion_columns([group]) == {"versions": ["0,1,2,3,tool,4"]}


def turn_with(stock, tools, text, timeout=None):
    """What follows a first turn with this text."""
    stock.tools = stock._standalone_tools = tools
    try:
        act = tool_turns(stock, AprilOptions(tool_timeout=timeout))
    finally:
        stock.tools = stock._standalone_tools = TOOLS
    sample = Sample(0, 0, conversation=Conversation())
    token_ids = encode(text + END)
    sample.append(token_ids, [-1.0] * len(token_ids), version=0)
    return act(Group(0, {}, PROMPT_IDS, Budget(2000), 0, [sample]), sample)


def test_a_late_tool_is_an_error_of_its_call(stock):
    """The others of the turn keep their results, and wrong arguments stay what they are."""
    never = threading.Event()

    def wait_in_thread() -> None:
        never.wait()

    async def wait_in_loop() -> None:
        await asyncio.Event().wait()

    async def deaf() -> None:
        while not never.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    tools = [wait_in_thread, wait_in_loop, deaf, multiply, divide, add]
    calls = [call("wait_in_thread"), call("wait_in_loop"), call("deaf"), call("multiply", a=2, b=3)]
    calls += [call("add", a=1, b=1), call("add", b=1), call("divide", a=1, b=0)]
    result = turn_with(stock, tools, "".join(calls), timeout=0.2)
    never.set()
    contents = [(message["name"], message["content"]) for message in result.messages[1:]]
    late = "{{'error': '{} did not return within 0.2 seconds.'}}".format
    assert contents == [
        ("wait_in_thread", late("wait_in_thread")),
        ("multiply", "6"),
        ("add", str({"error": "add() missing 1 required positional argument: 'a'"})),
        ("divide", "{'error': 'division by zero'}"),
        ("wait_in_loop", late("wait_in_loop")),
        ("deaf", late("deaf")),
        ("add", "2"),
    ]
    assert (result.calls, result.failures) == (7, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image", "image": "pixels"}], "an image in a result of the tool 'look', .* takes text only"),
        ([{1, 2}], "'look' returned a list, and a checkpoint cannot hold a builtins.set in it"),
    ],
)
def test_results_that_a_checkpoint_cannot_hold_are_refused(stock, content, message):
    def look() -> list:
        return content

    with pytest.raises(ConfigError, match=message):
        turn_with(stock, [look], call("look"))


@pytest.mark.parametrize("content", [[{"type": "text", "text": "seen"}], [(1, "$"), {"$": 2}]])
def test_lists_stay_lists(stock, content):
    def look() -> list:
        return content

    (_, message) = json.loads(json.dumps(turn_with(stock, [look], call("look")).messages))
    assert decode_messages([message])[0]["content"] == content


def test_other_threads_may_use_the_trainers_tokenizer(stock):
    """TRL's loop truncates and pads with it meanwhile. Shared, it renders results that are cut off."""
    act, tokenizer, done = tool_turns(stock, AprilOptions()), stock.processing_class, threading.Event()
    wanted = handed_over(play(act, SCRIPT, BUDGET, 1000))

    def truncate():
        while not done.is_set():
            tokenizer("x" * 50, truncation=True, max_length=5)

    with ThreadPoolExecutor(5) as threads:
        threads.submit(truncate)
        try:
            found = list(threads.map(lambda _: handed_over(play(act, SCRIPT, BUDGET, 1000)), range(8)))
        finally:
            done.set()
    assert all(one == wanted for one in found)


def test_what_json_holds_can_be_saved():
    assert all(map(is_json, [None, True, 1, math.nan, -math.inf, "x", [1, [None]], {"a": {"b": [1.5]}}]))
    assert not any(map(is_json, [(1,), [(1,)], {1: 1}, b"", {"a": object()}]))

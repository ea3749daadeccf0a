"""User code in whole trainings against stock GRPO: what it raises, and what works in its own or in the main thread."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from contextlib import contextmanager

import pytest

from tests.support.fake_vllm import FakeVLLM
from tests.support.tool_calling import DATASET, END, TOKENIZER, ByQuestion, ToolScript, call
from tests.trainer.test_tools import april, logs, stock
from trl_april.errors import ConfigError


pytestmark = pytest.mark.usefixtures("one_thread")
TURNS = [[call("ask", number=n) + END, f"{'x' * n}" + END] for n in range(4)]
SIZES = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 300}


@pytest.fixture
def fake():
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ToolScript(TURNS).stream) as server:
        yield server


@pytest.fixture(autouse=True)
def event_loop():
    """The main thread has one, as in a script; other tests may have taken it away."""
    asyncio.set_event_loop(loop := asyncio.new_event_loop())
    yield
    loop.close()


@contextmanager
def time_limit(seconds: int):
    """As in TRL's script and in math-verify."""

    def late(*args):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def graded(completions, **kwargs):
    """What cannot be graded gets 0, as in many graders."""
    rewards = []
    for messages in completions:
        try:
            with time_limit(5):
                rewards.append(1.0 + sum(len(str(message["content"])) for message in messages))
        except Exception:
            rewards.append(0.0)
    return rewards


def number_of_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def tool(function):
    """A tool `ask`, with the text that TRL reads."""
    function.__name__, function.__doc__ = "ask", "Asks.\n\nArgs:\n    number: A number.\n"
    return function


@tool
def ask(number: int) -> str:
    with time_limit(5):
        return "z" * number


def test_rewards_and_tools_with_a_time_limit_by_signals_equal_stock(fake, left, tmp_path, caplog):
    """They work in the main thread only, and their errors are caught: by the reward itself, and by TRL."""
    options = {**SIZES, "shuffle_dataset": False, "arguments": {"tools": [ask], "reward_funcs": graded}}
    reference = stock(tmp_path, **options)
    reference.script = ToolScript(TURNS)
    reference.train()
    trainer = april(fake, tmp_path, **options, score_during_generation=True)
    trainer.train()
    for ours, theirs in zip(logs(trainer), logs(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, nan_ok=True)
    assert not left("trl-april-tools") and not left("trl-april-rewards")
    assert trainer.state.log_history[0]["reward"] == 4
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0
    assert caplog.text.count("works only in the thread that trains: signal.signal is called in") == 2


def make_raiser(where, error, calls=5):
    """Training arguments, with code that raises `error` from its call of this number on."""
    count = iter(range(10**6))

    def fail():
        if next(count) >= calls:
            raise error

    def reward(completions, **kwargs):
        fail()
        return [0.0] * len(completions)

    async def reward_later(completions, **kwargs):
        return reward(completions)

    @tool
    def ask(number: int) -> int:
        fail()
        return number

    @tool
    async def ask_later(number: int) -> int:
        return ask(number)

    class Failing:
        def reset(self, **row):
            pass

        def get_reward(self):
            fail()
            return 0.0

    tools = {"tool": ask, "async tool": ask_later}
    rewards = {"async reward": reward_later, "reward": reward}
    return {
        "tools": [tools[where]] if where in tools else [],
        "reward_funcs": rewards.get(where, number_of_tokens),
        **({"environment_factory": Failing} if where == "get_reward" else {}),
    }


PLACES = ["reward", "async reward", "get_reward", "tool", "async tool"]


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *((where, StopIteration("mine")) for where in PLACES),
        *((where, SystemExit(3)) for where in ("async reward", "async tool")),
        ("tool", KeyboardInterrupt("mine")),
    ],
    ids=repr,
)
def test_what_user_code_raises_ends_training_as_in_stock(fake, left, tmp_path, where, error):
    """Tools return a `StopIteration` as a result, and coroutines make a `RuntimeError` of it, in stock as here."""
    calls = 1 if "reward" in where and where != "get_reward" else 5
    options = {**SIZES, "max_steps": 4, "arguments": make_raiser(where, error, calls=calls)}
    trainer = april(fake, tmp_path, score_during_generation=True, tool_timeout=30.0, **options)
    if isinstance(error, StopIteration) and "tool" in where:
        trainer.train()
        return
    kind = RuntimeError if isinstance(error, StopIteration) and where == "async reward" else type(error)
    with pytest.raises(kind) as raised:
        trainer.train()
    if kind is not RuntimeError:
        assert raised.value is error and raised.traceback[-1].name == "fail", "not the user's own line"
    assert trainer.rollout_func is None and not fake.live
    assert not left("trl-april-tools") and not left("trl-april-rewards")


def test_a_tool_that_never_works_ends_training(fake, tmp_path):
    @tool
    def ask(number: int) -> str:
        raise ConnectionRefusedError(111, f"no service for {number}")

    turns = [[call("ask", number=10 * n + turn) + END for turn in range(9)] for n in range(8)]
    fake.script = ToolScript(turns).stream
    options = {**SIZES, "per_device_train_batch_size": 8, "num_generations": 8, "max_tool_calling_iterations": 8}
    trainer = april(fake, tmp_path, **options | {"max_completion_length": 2000}, arguments={"tools": [ask]})
    with pytest.raises(ConfigError, match=r"The tool 'ask' has never worked: 64 calls .*no service for \d"):
        trainer.train()


def test_evaluations_and_trainings_leave_no_threads(fake, left, tmp_path):
    """Only idle environments have one, for the next evaluation."""
    fake.script = ByQuestion().stream
    sizes = {"per_device_eval_batch_size": 8, "num_generations_eval": 2}
    arguments = {"eval_dataset": DATASET.select(range(8))}
    trainer = april(fake, tmp_path, **sizes, tool_timeout=60.0, arguments=arguments)
    for _ in range(2):
        trainer.evaluate()
        assert not left("trl-april-tools") and not left("trl-april-rewards")


class Limited:
    """Its connection is of the thread that opened it, and its tool has a time limit by a signal."""

    def __init__(self):
        self.connection = sqlite3.connect(":memory:")

    def reset(self, **row):
        pass

    @tool
    def ask(self, number: int) -> str:
        with time_limit(5):
            return str(self.connection.execute("select ?", [number]).fetchone()[0])


def test_an_environment_that_needs_two_threads_ends_training(fake, tmp_path):
    """It says so at its first call; stock has one thread for all."""
    trainer = april(fake, tmp_path, **SIZES, arguments={"tools": [], "environment_factory": Limited})
    with pytest.raises(ConfigError, match="Limited.ask works only in the thread that trains, but its environment was"):
        trainer.train()

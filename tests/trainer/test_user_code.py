"""User code in whole trainings against stock GRPO: what it raises, and what works in its own or the main thread only.

The scripts of TRL's examples are here at a small size: a tool with a time limit on a database, an environment factory
that pops addresses of servers, and two environments of one dataset.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from contextlib import closing, contextmanager

import pytest
import torch
from datasets import Dataset

from tests.support.fake_vllm import FakeVLLM
from tests.support.preloaded import launch_preloaded
from tests.support.tool_calling import DATASET, END, TOKENIZER, ByQuestion, ToolScript, call, trainer_arguments
from tests.trainer.test_tools import april, logs, stock
from trl_april.errors import ConfigError
from trl_april.weights.canary import trainer_logprobs


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


def compared(fake, folder, left, script, arguments, **options):
    """Both trainings, whose logs are equal; returns that of ours."""
    arguments = {"tools": [], "reward_funcs": None, **arguments}
    fake.script = script.stream
    options = {**SIZES, "shuffle_dataset": False, **options}
    ours = {name: options.pop(name) for name in list(options) if name in ("score_during_generation", "tool_timeout")}
    reference = stock(folder, arguments=dict(arguments), **options)
    reference.script = script
    reference.train()
    trainer = april(fake, folder, arguments=dict(arguments), **options, **ours)
    trainer.train()
    assert trainer.april_enabled
    for mine, theirs in zip(logs(trainer), logs(reference), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == (value if value is None else pytest.approx(value, rel=1e-3, nan_ok=True)), name
    assert not left("trl-april-tools") and not left("trl-april-rewards")
    return trainer


def ask(number: int) -> str:
    """Asks.

    Args:
        number: A number.
    """
    with time_limit(5):
        return "z" * number


def test_rewards_and_tools_with_a_time_limit_by_signals_equal_stock(fake, left, tmp_path, caplog):
    """They work in the main thread only, and their errors are caught: by the reward itself, and by TRL."""
    arguments = {"tools": [ask], "reward_funcs": graded}
    trainer = compared(fake, tmp_path, left, ToolScript(TURNS), arguments, score_during_generation=True)
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

    def ask(number: int) -> int:
        """Asks.

        Args:
            number: A number.
        """
        fail()
        return number

    async def ask_later(number: int) -> int:
        """Asks.

        Args:
            number: A number.
        """
        fail()
        return number

    ask_later.__name__ = "ask"

    class Failing:
        def reset(self, **row):
            if where == "reset":
                fail()

        def get_reward(self):
            if where == "get_reward":
                fail()
            return 0.0

    tools = {"tool": ask, "async tool": ask_later}
    rewards = {"async reward": reward_later, "reward": reward}
    return {
        "tools": [tools[where]] if where in tools else [],
        "reward_funcs": rewards.get(where, number_of_tokens),
        **({"environment_factory": Failing} if where in ("reset", "get_reward") else {}),
    }


@pytest.mark.parametrize("error", [StopIteration("mine"), SystemExit(3), KeyboardInterrupt("mine")], ids=repr)
@pytest.mark.parametrize("where", ["reward", "async reward", "get_reward", "reset", "tool", "async tool"])
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
    assert raised.value is error or kind is RuntimeError
    assert not left("trl-april-tools") and not left("trl-april-rewards")


def test_an_exit_in_one_process_reaches_the_other(fake, forker, tmp_path):
    runs = [{"name": "failing", "kind": "train_with_environments", "exits": True}]
    model = trainer_arguments()["model"]
    fake.prompt_logprobs = lambda ids: trainer_logprobs(model, ids, torch.device("cpu"))
    fake.script = ToolScript([[f"{n}" + END] for n in range(8)]).stream
    launched = launch_preloaded(forker, 2, runs, tmp_path, model="", url=fake.base_url)
    own, other = launched.result("failing", 1), launched.result("failing", 0)
    assert (own["error"], own["message"]) == ("SystemExit", "3")
    assert (other["error"], other["message"]) == ("PeerError", "Process 1 failed with SystemExit: 3")


def test_a_tool_that_never_works_ends_training(fake, tmp_path):
    def ask(number: int) -> str:
        """Asks.

        Args:
            number: A number.
        """
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


# TRL's example scripts, at a small size


def test_a_script_with_a_time_limit_on_a_database(fake, left, tmp_path):
    path = str(tmp_path / "facts.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table facts (id integer, fact text)")
        connection.executemany("insert into facts values (?, ?)", [(n, "y" * n) for n in range(4)])
        connection.commit()

    def ask(query: str) -> list[tuple]:
        """Queries the database.

        Args:
            query: A query in SQL.
        """
        with time_limit(5), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return [str(row) for row in connection.execute(query).fetchall()][0]

    queries = [
        "select fact from facts where id = 3",
        "select count(*) from facts",
        "drop table facts",
        "select nothing",
    ]
    turns = [[call("ask", query=query) + END, "done" + END] for query in queries]
    trainer = compared(fake, tmp_path, left, ToolScript(turns), {"tools": [ask], "reward_funcs": graded})
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0.5


class Client:
    """A client whose connection and event loop are those of the thread that opened it."""

    def __init__(self, address):
        self.address, self.connection, self.loop = address, sqlite3.connect(":memory:"), asyncio.get_event_loop()
        self.connection.execute("create table steps (number integer)")

    def step(self, number):
        self.connection.execute("insert into steps values (?)", [number])
        return self.loop.run_until_complete(asyncio.sleep(0, f"seen {number}"))

    def total(self):
        return self.connection.execute("select total(number) from steps").fetchone()[0]


class Simulator:
    """Takes its errors for a reward of 0, as a client of a remote environment does."""

    def __init__(self, address=""):
        self.client = Client(address)

    def reset(self, **row):
        self.client.connection.execute("delete from steps")
        return f" Begin {row.get('scale', '')}."

    def ask(self, number: int) -> str:
        """Acts.

        Args:
            number: The action.
        """
        return self.client.step(number)

    def get_reward(self):
        try:
            return 1.0 + self.client.total()
        except Exception:
            return 0.0


def test_a_script_whose_factory_pops_addresses(fake, left, tmp_path):
    """In training and in evaluation."""

    def factory():
        return Simulator(next(addresses))

    addresses = iter([f"http://127.0.0.1:{port}" for port in range(8000, 8100)])
    options = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 4, "per_device_eval_batch_size": 4}
    arguments = {"environment_factory": factory, "eval_dataset": DATASET.select([3])}
    trainer = compared(fake, tmp_path, left, ByQuestion(TURNS), arguments, **options)
    rewards = [entry.get("eval_reward", entry.get("reward")) for entry in trainer.state.log_history[:-1]]
    assert rewards == [1 + 0, 1 + 3, 1 + 1, 1 + 3]


class Limited(Simulator):
    def ask(self, number: int) -> str:
        """Acts.

        Args:
            number: The action.
        """
        with time_limit(5):
            return self.client.step(number)


def test_an_environment_that_needs_two_threads_ends_training(fake, tmp_path):
    """It says so at its first call; stock has one thread for all."""
    trainer = april(fake, tmp_path, **SIZES, arguments={"tools": [], "environment_factory": Limited})
    with pytest.raises(ConfigError, match="Limited.ask works only in the thread that trains, but its environment was"):
        trainer.train()


class Scaled(Simulator):
    def get_reward(self):
        return 10 * super().get_reward()


def test_a_script_with_two_environments(fake, left, tmp_path):
    prompts = [
        {**row, "scale": number, "environment": "ab"[number % 2]} for number, row in enumerate(DATASET.to_list())
    ]
    arguments = {
        "environment_factory": {"a": Simulator, "b": Scaled},
        "train_dataset": Dataset.from_list(prompts),
    }
    trainer = compared(fake, tmp_path, left, ToolScript(TURNS), arguments)
    first, second = trainer.state.log_history[:2]
    assert (first["reward"], second["reward"]) == pytest.approx((2.5, 25.0))

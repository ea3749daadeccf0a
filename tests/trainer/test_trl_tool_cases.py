"""The cases of TRL's own tests of tools and environments, trained on a fake server that has their completions.

TRL's tests (`tests/test_grpo_trainer.py` of its repository) patch `model.generate`, which partial rollouts do not
call. The tests here have TRL's names and assert the same facts, with the defaults of `APRILGRPOConfig`. Two differ:

- `test_train_with_environment_factory` reads the counters of the instances in a reward function. After training,
  `trainer.environments` is `None`, since an instance may be reset for another sample before its group is trained.
- `test_train_with_unknown_environment_raises`: the `ValueError` has another message.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3ForSequenceClassification

from tests.support.fake_vllm import FakeVLLM
from tests.support.tiny import build_model
from tests.support.tool_calling import DATASET, END, TOKENIZER, ToolScript, call, multiply
from tests.trainer.test_tools import april


pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {
    "per_device_train_batch_size": 3, "num_generations": 3, "max_steps": 3, "max_tool_calling_iterations": None,
    "over_provisioning": None,  # the default
    "logging_steps": 10,  # as in TRL's tests, the last entry has the metrics of all steps
}  # fmt: skip
COUNTERS = []  # of the environments that were scored
PLAIN = ToolScript([["Done!" + END], ["Done! Done!" + END], ["Done! Done! Done!" + END]])


@pytest.fixture
def fake():
    with FakeVLLM(vocab_size=len(TOKENIZER)) as server:
        yield server


class Stepping:
    """Counts from zero; its reset returns no observation."""

    def reset(self, **row):
        self._counter = 0

    def increment(self, step: int) -> int:
        """Counts up.

        Args:
            step: How far.
        """
        self._counter += step
        return self._counter


class Rewarded(Stepping):
    """The count is its own reward."""

    def get_reward(self) -> float:
        return float(self._counter)


def calling(right, wrong):
    """Three samples: a call that succeeds, one that fails, and none."""
    return ToolScript([[right + END, "Done!" + END], [wrong + END, "Done!" + END], ["I will not." + END]])


STEPS = calling(call("increment", step=1), call("decrement", step=2))


def reward_model():
    """As TRL's tests have one; random weights, so that different completions get different rewards."""
    config = build_model(vocab_size=len(TOKENIZER)).config
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3ForSequenceClassification(config).eval()


def nothing(completions, environments, **kwargs):
    """Rewards nothing, and notes the counts of the environments."""
    COUNTERS.extend(getattr(environment, "_counter", None) for environment in environments)
    return [0.0] * len(completions)


SCORED = {"reward_funcs": reward_model(), "reward_processing_classes": TOKENIZER}
COUNTED = {"reward_funcs": [reward_model(), nothing], "reward_processing_classes": [TOKENIZER, None]}


def trainer_of(fake, folder, script=PLAIN, *, options=None, **arguments):
    """A trainer without tools and dataset, and with a reward model, unless others are given."""
    fake.script = script.stream
    COUNTERS.clear()
    arguments = {"tools": None, "train_dataset": None, **({} if "reward_funcs" in arguments else SCORED), **arguments}
    return april(fake, folder, arguments=arguments, **{**OPTIONS, **(options or {})})


def train(trainer):
    """The last entry of the log, after a training that changed every parameter."""
    before = {name: values.clone() for name, values in trainer.model.named_parameters()}
    trainer.train()
    log = trainer.state.log_history[-1]
    assert trainer.april_enabled and math.isfinite(log["train_loss"])
    unchanged = [name for name, values in trainer.model.named_parameters() if torch.equal(values, before[name])]
    assert not unchanged
    return log


def tool_names(tools):
    return [tool.__name__ for tool in tools]


def sent_prompts(fake):
    """The texts that the engine was asked to continue."""
    requests = [one.body for one in fake.received_at("/v1/completions")]
    return [TOKENIZER.decode(body["prompt"]) for body in requests if body.get("stream")]


def test_train_with_malformed_tool_calls(fake, tmp_path):
    """They are answers, and no further turn follows them."""
    turns = [
        ['<tool_call>\n{"arguments": {"a": 3, "b": 4}}\n</tool_call>' + END],  # no name
        ['<toolcall>\n{"arguments": {"a": 3, "b": 4}}\n</toolcall>' + END],  # other markers
        ['<tool_call>\n{"arguments": {a: 3, b: 4}}\n</tool_call>' + END],  # no JSON
    ]
    log = train(trainer_of(fake, tmp_path, ToolScript(turns), train_dataset=DATASET, tools=[multiply]))
    assert log["tools/call_frequency"] == 0
    assert not any("<tool_response>" in prompt for prompt in sent_prompts(fake))


def test_train_with_multiple_environments(fake, tmp_path):
    rows, heard = {"counter": [], "echo": []}, []

    class Counting(Stepping):
        def reset(self, **row):
            super().reset()
            rows["counter"].append(row)
            return "Count."

    class Echoing:
        def reset(self, **row):
            rows["echo"].append(row)
            return "Echo."

        def shout(self, text: str) -> str:
            """Says a text loudly.

            Args:
                text: The text.
            """
            heard.append(text)
            return text.upper()

    class ByObservation(ToolScript):
        def rest(self, token_ids, index):
            return super().rest(token_ids, index + 2 * ("Echo." in TOKENIZER.decode(token_ids)))

    turns = [
        [call("increment", step=1) + END, "Done!" + END], ["No." + END],
        [call("shout", text="hi") + END, "Done!" + END], ["Nothing." + END],
    ]  # fmt: skip
    trainer = trainer_of(
        fake, tmp_path, ByObservation(turns), **COUNTED,
        train_dataset=Dataset.from_dict({"environment": ["counter", "echo"] * 8}),
        environment_factory={"counter": Counting, "echo": Echoing},
        options={"per_device_train_batch_size": 4, "num_generations": 2, "shuffle_dataset": False},
    )  # fmt: skip
    exposed = {name: tool_names(tools) for name, tools in trainer._env_tools.items()}
    assert exposed == {"counter": ["increment"], "echo": ["shout"]}
    assert {name: len(pool) for name, pool in trainer._environment_pool.items()} == {"counter": 1, "echo": 1}
    log = train(trainer)
    assert log["tools/call_frequency"] == pytest.approx(2 / 4) and log["tools/failure_frequency"] == 0
    assert heard == ["hi"] * 3 and Counter(COUNTERS) == {1: 3, 0: 3, None: 6}
    assert rows == {"counter": [{}] * 6, "echo": [{}] * 6}, "the name of the environment is not for reset"
    for prompt in sent_prompts(fake):  # the model is told of the tools of its own environment
        assert ('"increment"' in prompt, '"shout"' in prompt) == ("Count." in prompt, "Echo." in prompt)


def test_train_with_unknown_environment_raises(fake, tmp_path):
    dataset = DATASET.add_column("environment", ["unknown"] * len(DATASET))
    trainer = trainer_of(fake, tmp_path, train_dataset=dataset, environment_factory={"counter": Stepping})
    with pytest.raises(ValueError, match="environment='unknown'.*environment_factory has 'counter'"):
        trainer.train()


def test_environment_owned_reward_mixed_environments(fake, tmp_path):
    """Two names of one class share a column of rewards, which leaves out the samples of other classes."""
    trainer = trainer_of(
        fake, tmp_path, STEPS, reward_funcs=nothing,
        train_dataset=Dataset.from_dict({"environment": ["scored", "again", "plain"]}),
        environment_factory={"scored": Rewarded, "again": Rewarded, "plain": Stepping},
        options={"per_device_train_batch_size": 9, "max_steps": 1},
    )  # fmt: skip
    assert trainer.reward_func_names == ["nothing", "Rewarded"] and trainer.reward_weights.tolist() == [1.0, 1.0]
    scored, plain = Rewarded(), Stepping()
    scored._counter = 1
    assert trainer.reward_funcs[-1](environments=[scored, plain]) == [1.0, None]
    log = train(trainer)
    assert (log["rewards/Rewarded/mean"], log["reward"]) == pytest.approx((1 / 3, 2 / 9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "`train_dataset` is required"),
        ({"environment_factory": Stepping, "options": {"max_steps": -1}}, "max_steps"),
        ({"environment_factory": {"a": Stepping, "b": Stepping}}, "requires a `train_dataset`"),
    ],
    ids=[
        "test_dataset_required_without_environment",
        "test_environment_owned_data_requires_max_steps",
        "test_multiple_environments_without_dataset_raises",
    ],
)
def test_missing_data_is_refused(fake, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(fake, tmp_path, **arguments)


def test_train_with_environment_owned_data(fake, tmp_path):
    class Asking:
        def reset(self, **row):
            return "Guess the word."

    def length(completions, **kwargs):
        return [float(len(messages[-1]["content"])) for messages in completions]

    log = train(trainer_of(fake, tmp_path, environment_factory=Asking, reward_funcs=length))
    assert log["reward"] == pytest.approx((5 + 11 + 17) / 3)
    assert sent_prompts(fake) and all("user\nGuess the word." in prompt for prompt in sent_prompts(fake))

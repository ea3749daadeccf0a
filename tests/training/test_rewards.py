"""Rewards that cannot be used or teach nothing, and the device that reward functions work on."""

import asyncio
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.tiny import build_tokenizer
from trl_april.bridge.rewards import reward_scorer
from trl_april.errors import ConfigError
from trl_april.pool.samples import Score
from trl_april.rollout.user_code import UserCode
from trl_april.training.rewards import RewardScorer, checked, use_device


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([0.5, "0.5"], "'length' returned '0.5', of the type str"),
        ([[1.0], [2.0]], r"'length' returned \[1.0\], of the type list"),
        ([math.nan, torch.tensor(math.nan)], "'length' returned NaN for all 2 completions"),
        ([math.nan, None], None),
        ([1, np.float32(2.0)], None),
        (torch.tensor([1.0, 2.0]), None),
    ],
)
def test_an_unusable_reward_names_its_function(is_async, rewards, words):
    async def call_async(**kwargs):
        return rewards

    (function,) = checked([call_async if is_async else lambda **kwargs: rewards], ["length"])
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        returned = asyncio.run(function(prompts=[])) if is_async else function(prompts=[])
        assert len(returned) == 2
    (one, _) = checked([lambda **kwargs: [math.nan], model := torch.nn.Linear(1, 1)], ["one", "model"])
    assert math.isnan(*one()) and _ is model, "one of several functions need not apply"


def test_pythons_errors_about_arguments_name_the_users_function():
    """As for a dataset whose column has the name of an argument."""

    def correct(completions, **kwargs):
        return [0.0]

    async def formatted(completions, **kwargs):
        return [0.0]

    names = ["correct", "formatted"]
    for name, function in zip(names, checked([correct, formatted], names), strict=True):
        with pytest.raises(TypeError, match=rf"\.{name}\(\) got multiple values for keyword argument 'completions'"):
            function(**{"completions": []}, **{"completions": []})


NONE = math.nan  # of a function that returned no reward


@pytest.mark.parametrize(
    ("rewards", "of_sums", "of_columns"),
    [
        ([[1, 0], [0, 0]], True, True),
        ([[1, 0], [0, 1]], False, True),
        ([[1, NONE], [1, 2]], True, False),
        ([[1, NONE], [1, NONE]], False, False),
        ([[1, 0], [NONE, NONE]], False, False),  # no function could score the second sample
        ([[1, 0], [NONE, NONE], [0, 0]], True, True),
        ([[NONE, NONE], [NONE, NONE]], False, False),
    ],
)
def test_a_group_can_teach_something_if_scored_samples_differ(rewards, of_sums, of_columns):
    score = Score([list(map(float, row)) for row in rewards], {})
    for normalize_first, expected in ((False, of_sums), (True, of_columns)):
        scorer = SimpleNamespace(weights=lambda: torch.ones(2), normalize_first=normalize_first)
        assert bool(RewardScorer.has_signal(scorer, score)) is expected
        scorer.weights = lambda: torch.tensor([0.0, 0.0])
        assert not RewardScorer.has_signal(scorer, score), "a weight of 0 is for the log"


@pytest.mark.parametrize(("device", "used"), [("cpu", []), ("cpu:0", []), ("cuda", []), ("cuda:1", [1])])
def test_a_thread_works_on_the_device_of_its_process(monkeypatch, device, used):
    found = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    use_device(torch.device(device))
    assert found == used


def test_a_reward_model_pads_no_tokenizer_of_another_thread():
    """Though it was given the trainer's own. The main thread tokenizes meanwhile, and could get padded prompts."""
    tokenizer, padded = build_tokenizer(), []

    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> SimpleNamespace:
            padded.append((tuple(input_ids.shape), tokenizer.backend_tokenizer.padding))
            return SimpleNamespace(logits=torch.zeros(len(input_ids), 1))

    model = Model()
    trainer = SimpleNamespace(
        reward_funcs=[model], reward_func_names=["model"], reward_processing_classes=[tokenizer],
        processing_class=tokenizer, reward_weights=torch.ones(1), multi_objective_aggregation="sum_then_normalize",
        _has_async_funcs=False, chat_template_kwargs={}, accelerator=SimpleNamespace(device=torch.device("cpu")),
        _april_user_code=UserCode(),
    )  # fmt: skip
    arguments = {"prompts": ["1+1=", "2="], "completions": ["2", "2"], "completion_ids": [[3], [3]]}
    scorer = reward_scorer(trainer)
    scorer.timed = nullcontext
    assert scorer._call(arguments) == [[0.0], [0.0]]
    assert padded == [((2, 5), None)]
    trainer.reward_weights = torch.zeros(1)  # by a callback
    assert scorer.weights() is trainer.reward_weights

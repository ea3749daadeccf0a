"""Reward functions by name: ours, TRL's, the user's, and what is said of a name that stands for nothing."""

from __future__ import annotations

import re
import sys

import pytest
import trl.rewards

from trl_april.errors import ConfigError
from trl_april.reward_functions import REWARD_NAMES, contains_answer, find_reward, soft_overlong_punishment


def test_contains_answer():
    assert find_reward("contains_answer") is contains_answer
    assert contains_answer(["4+1=5", "4+1=6"], answer=[5, 5]) == [1.0, 0.0]
    assert contains_answer([[{"role": "assistant", "content": "it is 5"}]], answer=["5"]) == [1.0]


@pytest.mark.parametrize("name", REWARD_NAMES)
def test_every_name_stands_for_a_function(name):
    assert callable(find_reward(name, max_completion_length=100))


def test_trls_are_trls():
    assert find_reward("think_format_reward") is trl.rewards.think_format_reward


@pytest.mark.parametrize(
    ("length", "given", "cache"),
    [
        (20480, None, 4096),  # the paper's
        (100, 50, 50),
        (100, 0, 0),
    ],
)
def test_the_soft_overlong_punishment_is_trls(length, given, cache):
    punishment = find_reward("soft_overlong_punishment", max_completion_length=length, soft_punish_cache=given)
    assert type(punishment).__module__ == "trl.rewards.other_rewards"
    assert (punishment.max_completion_len, punishment.soft_punish_cache) == (length, cache)
    if cache:
        lengths = [length - cache, length - cache // 2, length]
        assert punishment(completion_ids=[[0] * n for n in lengths]) == [0.0, -0.5, -1.0]


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def shortest(completions, **kwargs):\n    return [1.0]\n\nlimit = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize("name", ["my_rewards:shortest", "my_rewards.shortest"])
def test_a_reward_of_ones_own(my_rewards, name):
    assert find_reward(name)(completions=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("contains_anwser", "it must be one of contains_answer, soft_overlong_punishment, accuracy_reward"),
        (":shortest", "it must be one of contains_answer"),
        ("my_rewards:", "it must be one of contains_answer"),
        ("no_such_module:shortest", "No module named 'no_such_module'"),
        ("no_such_module.shortest", "No module named 'no_such_module'"),
        ("my_rewards:longest", "has no attribute 'longest'"),
        ("my_rewards:limit", "is not callable but of type int"),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused_in_a_sentence(my_rewards, name, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        find_reward(name)
    assert repr(name) in str(raised.value)
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize("cache", [-1, 101])
def test_a_punishment_longer_than_the_completions_is_refused(cache):
    with pytest.raises(ConfigError, match=f"soft_punish_cache is {cache}; .*max_completion_length=100"):
        find_reward("soft_overlong_punishment", max_completion_length=100, soft_punish_cache=cache)


def test_a_punishment_without_a_length_is_refused():
    with pytest.raises(ConfigError, match="max_completion_length is None"):
        soft_overlong_punishment(None, None)

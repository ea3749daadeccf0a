"""The recipes and the script that reads them: what they say, and where it is from."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml
from trl import TrlParser

from trl_april import APRILGRPOConfig
from trl_april.errors import ConfigError
from trl_april.gspo import gspo_options
from trl_april.reward_functions import find_reward
from trl_april.row_order import optimiser_steps_per_round
from trl_april.staleness import check_bound


ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "scripts" / "recipes").glob("*.yaml"))
NAMES = [path.stem for path in RECIPES]
REQUIRED = ["--model", "m", "--dataset", "d", "--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
SOURCE = re.compile(r"section \d|eq\. \d|github\.com/|TRL's default|APRIL's (scripts|paper)|ours, because ")


def load_script(path: Path):
    """A file of `scripts` or `benchmarks` as a module. Neither is a package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


quickstart = load_script(ROOT / "scripts" / "quickstart.py")


def parse(*options: str):
    """Script arguments and config, as the quickstart reads them."""
    parser = TrlParser((quickstart.ScriptArguments, APRILGRPOConfig))
    return parser.parse_args_and_config([*REQUIRED, *options])


def recipe(name: str, *options: str):
    return parse("--config", str(ROOT / "scripts" / "recipes" / f"{name}.yaml"), *options)


def test_flags_of_the_server_that_it_starts(monkeypatch):
    started = []

    def start(model, *, vllm_args):
        started.append((model, vllm_args))
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "LocalServer", start)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *REQUIRED, "--vllm_args=--gpu-memory-utilization 0.4"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(KeyboardInterrupt):
        quickstart.main()
    assert started == [(parse()[0].model, ["--gpu-memory-utilization", "0.4"])]


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ([], True),
        (["--vllm_server_base_url", "http://gpu7:8000"], False),
        (["--vllm_server_host", "gpu7"], False),
        (["--vllm_server_port", "8001"], False),
        (["--use_vllm", "false"], False),
        (["--vllm_mode", "colocate"], False),
    ],
)
def test_it_starts_a_server_only_where_one_is_needed(options, starts, monkeypatch):
    monkeypatch.setattr(quickstart, "LocalServer", lambda model, *, vllm_args: contextlib.nullcontext("started"))
    with quickstart.own_server(*parse(*options)) as server:
        assert (server == "started") is starts
    with_args = parse(*options, "--vllm_args=--seed 3")
    if starts:
        quickstart.own_server(*with_args)
    else:
        with pytest.raises(ConfigError, match="no server is started"):
            quickstart.own_server(*with_args)


def updates_per_round(config: APRILGRPOConfig) -> int:
    return config.steps_per_generation // config.gradient_accumulation_steps


def test_there_is_a_recipe_for_each_algorithm():
    assert NAMES == ["dapo", "grpo", "gspo"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_read_as_it_is_written(name):
    script, config = recipe(name)
    written = yaml.safe_load((ROOT / "scripts" / "recipes" / f"{name}.yaml").read_text())
    for option, value in written.items():
        read = {**vars(script), **vars(config)}[option]
        assert read == value, option
        # YAML takes 1e-6 for a string, 1.0e-6 for a number.
        assert isinstance(value, str) == isinstance(read, str), option


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_every_value_has_its_source(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(yaml.safe_load(path.read_text()))
    for line in lines:
        _, _, comment = line.partition("  # ")
        assert SOURCE.search(comment), line


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_wins(name):
    before, after = recipe(name)[1], recipe(name, "--num_generations", "4", "--learning_rate", "2e-6")[1]
    assert before.num_generations != 4
    assert (after.num_generations, after.learning_rate) == (4, 2e-6)
    assert after.loss_type == before.loss_type
    script, _ = recipe(name, "--reward_funcs", "contains_answer")
    assert script.reward_funcs == ["contains_answer"]


@pytest.mark.parametrize("name", NAMES)
def test_the_staleness_bound_leaves_the_over_provisioning_as_it_is(name):
    """And it is five rounds in each, whatever a round is in updates."""
    _, config = recipe(name)
    updates = optimiser_steps_per_round(config)
    assert updates == updates_per_round(config)
    assert config.max_staleness == 5 * updates
    check_bound(config.over_provisioning, config.max_staleness, config.staleness_policy, updates)


def test_grpo_is_that_of_deepseekmath():
    script, config = recipe("grpo")
    assert (config.loss_type, config.beta, config.learning_rate) == ("grpo", 0.04, 1e-6)
    assert config.importance_sampling_level == "token"
    assert config.scale_rewards == "group"
    assert config.use_bias_correction_kl is False
    assert (config.num_iterations, updates_per_round(config)) == (1, 1)
    assert script.reward_funcs == ["contains_answer"]


def test_dapo_is_that_of_the_paper():
    script, config = recipe("dapo")
    assert (config.loss_type, config.beta) == ("dapo", 0.0)
    assert (config.epsilon, config.epsilon_high) == (0.2, 0.28)
    assert config.dynamic_sampling is True
    assert config.mask_truncated_completions is True
    assert config.scale_rewards == "group"
    assert config.num_generations == 16
    assert updates_per_round(config) == 16
    assert (config.learning_rate, config.lr_scheduler_type) == (1e-6, "constant_with_warmup")
    assert config.warmup_steps == 20 * 16
    assert script.reward_funcs == ["contains_answer", "soft_overlong_punishment"]


def test_gspo_is_that_of_the_paper():
    _, config = recipe("gspo")
    assert (config.loss_type, config.beta) == ("gspo", 0.0)
    assert updates_per_round(config) == 4
    assert config.scale_rewards == "group"
    assert gspo_options(config) == {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    }


def test_only_dapo_samples_dynamically():
    assert {name: recipe(name)[1].dynamic_sampling for name in NAMES} == {"dapo": True, "grpo": False, "gspo": False}


def test_the_punishment_follows_the_length_given_beside_the_recipe():
    script, config = recipe("dapo", "--max_completion_length", "1000")
    _, punishment = [
        find_reward(
            name, max_completion_length=config.max_completion_length, soft_punish_cache=script.soft_punish_cache
        )
        for name in script.reward_funcs
    ]
    assert (punishment.max_completion_len, punishment.soft_punish_cache) == (1000, 200)


# The benchmark


@pytest.fixture(scope="module")
def benchmark():
    return load_script(ROOT / "benchmarks" / "learning.py")


@pytest.mark.parametrize("name", NAMES)
def test_the_benchmark_overrides_nothing_but_sizes(benchmark, name):
    options, reward_funcs = benchmark.load(name)
    sizes = benchmark.laptop_sizes(options)
    assert sizes.keys() <= {
        "num_generations",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "max_completion_length",
        "learning_rate",
        "lr_scheduler_type",  # which so high a rate needs
        "warmup_steps",
    }
    config = APRILGRPOConfig("out", use_cpu=True, bf16=False, **{**options, **sizes})
    assert updates_per_round(config) == {"grpo": 1, "dapo": 4, "gspo": 4}[name]
    check_bound(
        config.over_provisioning, config.max_staleness, config.staleness_policy, optimiser_steps_per_round(config)
    )
    assert [reward.__name__ for reward in reward_funcs] == ["countdown_reward"] + (
        ["soft_overlong_punishment_reward"] if name == "dapo" else []
    )


def test_the_benchmark_knows_every_recipe(benchmark):
    assert sorted(benchmark.NAMES) == NAMES


def test_no_right_answer_of_the_benchmark_is_punished_for_its_length(benchmark):
    longest = len(benchmark.task.solution(benchmark.task.LARGEST_NUMBER)) + 1  # and the end token
    (_, punishment) = benchmark.load("dapo")[1]
    assert punishment(completion_ids=[[0] * longest, [0] * (longest + 1)])[0] == 0.0
    assert punishment.max_completion_len - punishment.soft_punish_cache == longest

"""`trl-april grpo`: its arguments, rewards, datasets and errors, and one run on a server."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import trl.rewards
from datasets import Dataset, DatasetDict, IterableDataset
from safetensors.torch import load_file

from tests.project.test_recipes import NAMES, train_on_a_server
from trl_april.commands import grpo
from trl_april.errors import ConfigError


ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
REQUIRED = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]


def parse(*options: str):
    """Script, trainer, model and mixture arguments of the script."""
    arguments = [*REQUIRED, *options]
    return grpo.make_parser(arguments).parse_args_and_config(arguments)


def splits_of(*options: str):
    script, _, _, mixture = parse(*options)
    return grpo.load_splits(script, mixture)


def write(path: Path, rows: list[dict]) -> str:
    getattr(Dataset.from_list(rows), f"to_{grpo.FORMATS[path.suffix]}")(path)
    return str(path)


# Arguments


@pytest.mark.parametrize("name", NAMES)
def test_recipes_work_with_this_command(name):
    script, config, _, _ = parse("--recipe", name, "--num_generations", "4", "--max_completion_length", "1000")
    assert (config.loss_type, config.num_generations) == (name, 4)
    first, *others = grpo.find_rewards(script, config)
    assert first is grpo.contains_answer
    assert [punishment.soft_punish_cache for punishment in others] == ([200] if name == "dapo" else [])


def test_every_argument_of_trls_script_is_accepted():
    import trl.scripts.grpo as theirs

    own, stock = (
        {action.dest for action in parser._actions} for parser in (grpo.make_parser([]), theirs.make_parser())
    )
    assert stock <= own
    assert own - stock >= {"soft_punish_cache", "over_provisioning"}


def test_loading_options(run_main):
    options = ["--model_init_kwargs", '{"dtype": "float16", "device_map": null}', "--reward_funcs", "contains_answer"]
    trainer = run_main("--model_name_or_path", "m", "--dtype", "bfloat16", "--model_revision", "v2", *options)
    found = trainer.arguments["args"].model_init_kwargs
    assert (found["dtype"], found["device_map"], found["revision"]) == ("float16", None, "v2")


# Rewards


def reward(name: str, *options: str):
    script, config, *_ = parse("--reward_funcs", name, *options)
    (found,) = grpo.find_rewards(script, config)
    return found


def test_contains_answer():
    assert reward("contains_answer")(["4+1=5", "4+1=6"], answer=[5, 5]) == [1.0, 0.0]
    assert grpo.contains_answer([[{"role": "assistant", "content": "it is 5"}]], answer=["5"]) == [1.0]


@pytest.mark.parametrize(("options", "cache"), [([], 4096), (["--soft_punish_cache", "0"], 0)])
def test_the_soft_overlong_punishment_is_by_default_as_in_the_paper(options, cache):
    punishment = reward("soft_overlong_punishment", "--max_completion_length", "20480", *options)
    assert (punishment.max_completion_len, punishment.soft_punish_cache) == (20480, cache)


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def shortest(completions, **kwargs):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("contains_anwser", "it must be one of contains_answer, soft_overlong_punishment, accuracy_reward"),
        ("no_such_module:shortest", "No module named 'no_such_module'"),
        ("my_rewards:longest", "has no attribute 'longest'"),
    ],
)
def test_an_unknown_name_is_refused(my_rewards, name, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        reward(name)
    assert repr(name) in str(raised.value)


def test_rewards_are_a_model_a_name_or_a_function_of_a_module(my_rewards):
    names = ["my_rewards:shortest", "my_rewards.shortest", *grpo.TRL_REWARDS]
    script, config, *_ = parse("--reward_model_name_or_path", "a/judge", "--reward_funcs", *names)
    model, *own, math, _, format_reward = grpo.find_rewards(script, config)
    assert model == "a/judge"
    assert [function(completions=["a"]) for function in own] == [[1.0], [1.0]]
    assert (math, format_reward) == (trl.rewards.accuracy_reward, trl.rewards.think_format_reward)


# Datasets


@pytest.mark.parametrize(("kind", "streaming"), [("jsonl", False), ("parquet", True), ("csv", False)])
def test_dataset_is_a_file_or_a_folder_of_files(tmp_path, kind, streaming):
    path = write(tmp_path / f"train.{kind}", ROWS)
    odd = write(tmp_path.with_name(f"{tmp_path.name}[1]*.{kind}"), ROWS)  # not a pattern
    assert len(list(splits_of("--dataset_name", odd, "--dataset_streaming", str(streaming))["train"])) == 8
    (rows,) = splits_of("--dataset_name", path, "--dataset_streaming", str(streaming)).values()
    assert isinstance(rows, IterableDataset if streaming else Dataset)
    assert [{name: str(value) for name, value in row.items()} for row in rows] == ROWS  # CSV reads "1" as a number
    write(tmp_path / f"test.{kind}", ROWS[:3])
    splits = splits_of("--dataset_name", str(tmp_path), "--dataset_streaming", str(streaming))
    assert {split: len(list(rows)) for split, rows in splits.items()} == {"train": 8, "test": 3}


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_is_a_folder_of_save_to_disk(tmp_path, streaming):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"train": rows, "held_out": rows.select(range(3))}).save_to_disk(tmp_path / "two")
    for name, expected in {"one": {"train": 8}, "two": {"train": 8, "held_out": 3}}.items():
        splits = splits_of("--dataset_name", str(tmp_path / name), "--dataset_streaming", str(streaming))
        assert {split: len(list(rows)) for split, rows in splits.items()} == expected
        assert isinstance(splits["train"], IterableDataset if streaming else Dataset)


def test_datasets_are_mixed_as_by_trl(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", ROWS)
    entries = [{"path": "json", "data_files": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    (tmp_path / "mixture.yaml").write_text(json.dumps({"datasets": entries, "test_split_size": 0.25}))
    splits = splits_of("--config", str(tmp_path / "mixture.yaml"))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 12, "test": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "dataset_name is None and `datasets` has 0 entries"),
        (["--config", "mixture.yaml", "--dataset_name", "d"], "dataset_name is 'd' and `datasets` has 1 entries"),
        (["--dataset_name", "missing.jsonl"], "dataset_name is 'missing.jsonl', but no such file or folder exists"),
        (["--dataset_name", "prompts.txt"], "prompts.txt'; a file must be one of .json, .jsonl, .parquet, .csv"),
    ],
)
def test_unusable_dataset_is_refused(tmp_path, monkeypatch, options, message):
    """A missing path is not looked up on the hub."""
    (tmp_path / "mixture.yaml").write_text("datasets: [{path: json}]\n")
    (tmp_path / "prompts.txt").write_text("1+1=\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        splits_of(*options)


def test_missing_split_is_refused():
    script, *_ = parse()
    splits = {"train": ROWS}
    with pytest.raises(ConfigError, match="dataset_test_split is 'test', but the dataset has the splits: train"):
        grpo.pick_split(splits, script, "dataset_test_split")


# The whole script


class RecordedTrainer:
    """Records the calls of a trainer."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.record = Mock()
        self.train, self.save_model, self.push_to_hub = self.record.train, self.record.save, self.record.push
        self.accelerator = SimpleNamespace(end_training=self.record.end)
        RecordedTrainer.last = self


@pytest.fixture
def run_main(tmp_path, monkeypatch):
    """Runs the script on a folder with two splits, with a recorder instead of the trainer."""
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", ROWS[:3])
    monkeypatch.setattr(grpo, "APRILGRPOTrainer", RecordedTrainer)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*options: str) -> RecordedTrainer:
        assert grpo.main([*REQUIRED, "--dataset_name", str(tmp_path), *options]) == 0
        return RecordedTrainer.last

    return run


def test_trainer_gets_the_arguments(run_main):
    common = ["--model_name_or_path", "m", "--reward_funcs", "contains_answer"]
    trainer = run_main(*common, "--resume_from_checkpoint", "true")
    arguments = trainer.arguments
    assert (arguments["model"], arguments["reward_funcs"]) == ("m", [grpo.contains_answer])
    assert arguments["args"].model_init_kwargs["dtype"] == "float32"
    assert (len(arguments["train_dataset"]), arguments["eval_dataset"], arguments["peft_config"]) == (8, None, None)
    assert trainer.record.mock_calls == [
        call.train(resume_from_checkpoint=True), call.save("out"), call.end()
    ]  # fmt: skip
    trainer = run_main(
        *common, "--eval_strategy", "steps", "--eval_steps", "5", "--use_peft", "--lora_r", "4",
        "--dataset_train_split", "test", "--dataset_test_split", "train", "--push_to_hub", "true",
    )  # fmt: skip
    arguments = trainer.arguments
    assert (len(arguments["train_dataset"]), len(arguments["eval_dataset"])) == (3, 8)
    assert arguments["peft_config"].r == 4
    # A local path does not go into the model card.
    assert trainer.record.mock_calls == [
        call.train(resume_from_checkpoint=None), call.save("out"), call.push(dataset_name=None), call.end()
    ]  # fmt: skip


def test_unknown_option_is_refused(run_main, tmp_path):
    with pytest.raises(ConfigError, match="^--over_provisoning: no such option"):
        run_main("--model_name_or_path", "m", "--over_provisoning", "2.0")
    with pytest.raises(ConfigError, match="^m 3: no such option"):
        run_main("--model_name_or_path", "m", "m", "3")
    with pytest.raises(ConfigError, match="nowhere is neither a file nor a valid config"):
        run_main("--model_name_or_path", "m", "--accelerate_config", "nowhere")
    # TRL's own script ignores unknown options of a file.
    (tmp_path / "options.yaml").write_text("over_provisoning: 2.0\n")
    with pytest.raises(ConfigError, match="over_provisoning"):
        run_main("--model_name_or_path", "m", "--config", str(tmp_path / "options.yaml"))


def test_options_of_accelerate_start_processes(run_main, tmp_path, monkeypatch):
    """Like `trl grpo`: from the command line and from a file, with its own configurations by name."""
    launched = []
    monkeypatch.setattr(grpo, "launch_command", launched.append)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    (tmp_path / "options.yaml").write_text("num_generations: 4\naccelerate_config: zero2\n")
    common = ["--model_name_or_path", "m", "--config", str(tmp_path / "options.yaml")]
    RecordedTrainer.last = None
    run_main(*common, "--num_processes", "3", "--beta", "3")
    (arguments,) = launched
    assert RecordedTrainer.last is None
    assert arguments.config_file.endswith("zero2.yaml") and arguments.num_processes == 3
    assert (arguments.module, arguments.training_script) == (True, "trl_april.commands.grpo")
    assert arguments.training_script_args[-6:] == [*common, "--beta", "3"]

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # in one of those processes
    assert run_main(*common, "--reward_funcs", "contains_answer").arguments["args"].num_generations == 4
    assert len(launched) == 1


def test_a_recipe_goes_by_its_name(run_main, tmp_path):
    """A file of options overrides its values, and the command line both."""
    (tmp_path / "mine.yaml").write_text("num_generations: 4\nbeta: 0.5\n")
    mine = ["--config", str(tmp_path / "mine.yaml"), "--beta", "0.25"]
    trainer = run_main("--model_name_or_path", "m", "--recipe", "dapo", "--max_completion_length", "100", *mine)
    config = trainer.arguments["args"]
    assert (config.epsilon_high, config.num_generations, config.beta) == (0.28, 4, 0.25)
    assert len(trainer.arguments["reward_funcs"]) == 2
    with pytest.raises(ConfigError, match="recipe is 'ppo'; it must be one of dapo, grpo, gspo"):
        run_main("--recipe", "ppo")


def test_missing_model_or_reward_is_refused(run_main):
    with pytest.raises(ConfigError, match="model_name_or_path is left out"):
        run_main()
    with pytest.raises(ConfigError, match="reward_funcs and reward_model_name_or_path are both left out"):
        run_main("--model_name_or_path", "m")


@pytest.mark.long
@pytest.mark.server
def test_adapter_is_trained_on_a_server_and_saved(server, tiny_model_dir, tmp_path):
    output = tmp_path / "out"
    options = {
        "model_name_or_path": tiny_model_dir, "dataset_name": "prompts.jsonl", "vllm_server_base_url": server.base_url,
        "reward_funcs": "my_rewards:share_of_digits", "use_peft": "true", "lora_r": 4,
        "lora_target_modules": "all-linear", "learning_rate": 1e-3,
    }  # fmt: skip
    (tmp_path / "my_rewards.py").write_text(
        "def share_of_digits(completions, **kwargs):\n"
        "    return [sum(map(str.isdigit, text)) / (len(text) or 1) for text in completions]\n"
    )
    train_on_a_server("grpo.py", options, tmp_path)
    adapter = json.loads((output / "adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["r"]) == ("LORA", 4)
    weights = load_file(output / "adapter_model.safetensors")
    # Adapters start with B = 0.
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    assert not (output / "model.safetensors").exists()

"""scripts/grpo.py: its arguments, the datasets that it loads, what it refuses, and one run as a user starts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from safetensors.torch import load_file
from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from tests.test_recipes import NAMES, ROOT, load_script
from trl_april import APRILGRPOConfig
from trl_april.errors import ConfigError
from trl_april.reward_functions import contains_answer


grpo = load_script(ROOT / "scripts" / "grpo.py")

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
REQUIRED = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]


def parse(*options: str):
    """Script, trainer, model and mixture arguments, as the script reads them."""
    parser = TrlParser((grpo.ScriptArguments, APRILGRPOConfig, ModelConfig, DatasetMixtureConfig))
    return parser.parse_args_and_config([*REQUIRED, *options])


def splits_of(*options: str):
    script, _, _, mixture = parse(*options)
    return grpo.load_splits(script, mixture)


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Arguments


@pytest.mark.parametrize("name", NAMES)
def test_the_recipes_are_for_this_script_too(name):
    path = str(ROOT / "scripts" / "recipes" / f"{name}.yaml")
    script, config, _, _ = parse("--config", path, "--num_generations", "4", "--max_completion_length", "1000")
    assert config.loss_type == name
    assert config.num_generations == 4
    script.reward_funcs = script.reward_funcs or ["contains_answer"]
    rewards = grpo.find_rewards(script, config)
    assert rewards[0] is contains_answer
    assert [reward.soft_punish_cache for reward in rewards[1:]] == ([200] if name == "dapo" else [])


def test_every_argument_of_trls_script_is_one_here():
    """A command line for `trl grpo` works unchanged: its dataclasses, ours in the place of two of them."""
    import trl.scripts.grpo as theirs

    own, stock = (
        {action.dest for action in parser._actions}
        for parser in (
            TrlParser((grpo.ScriptArguments, APRILGRPOConfig, ModelConfig, DatasetMixtureConfig)),
            theirs.make_parser(),
        )
    )
    assert stock <= own
    assert own - stock >= {"soft_punish_cache", "over_provisioning"}


def test_adapters_and_loading_options():
    _, config, model, _ = parse(
        "--use_peft", "--lora_r", "4", "--dtype", "bfloat16", "--model_revision", "v2",
        "--model_init_kwargs", '{"dtype": "float16", "device_map": null}',
    )  # fmt: skip
    assert grpo.get_peft_config(model).r == 4
    assert grpo.model_options(model, config) == {
        "dtype": "float16",
        "device_map": None,
        "attn_implementation": None,
        "revision": "v2",
        "trust_remote_code": False,
    }


# Rewards


def test_a_reward_model_comes_first():
    script, config, *_ = parse("--reward_model_name_or_path", "a/judge", "--reward_funcs", "contains_answer")
    assert grpo.find_rewards(script, config) == ["a/judge", contains_answer]


def test_a_reward_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "grpo_rewards.py").write_text("def constant(completions, **kwargs):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    script, config, *_ = parse("--reward_funcs", "grpo_rewards:constant", "think_format_reward")
    own, trls = grpo.find_rewards(script, config)
    assert own(completions=["a"]) == [1.0]
    assert trls.__module__.startswith("trl.rewards")
    sys.modules.pop("grpo_rewards")


def test_no_reward_is_refused():
    script, config, *_ = parse()
    with pytest.raises(ConfigError, match="reward_funcs and reward_model_name_or_path are both left out"):
        grpo.find_rewards(script, config)


# Datasets


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "csv"])
def test_a_single_file(tmp_path, kind, streaming):
    path = tmp_path / f"prompts.{kind}"
    rows = Dataset.from_list(ROWS)
    if kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        write_jsonl(path, ROWS)
    else:
        getattr(rows, f"to_{kind}")(path)
    splits = splits_of("--dataset_name", str(path), "--dataset_streaming", str(streaming))
    assert list(splits) == ["train"]
    assert isinstance(splits["train"], IterableDataset if streaming else Dataset)
    read = [{name: str(value) for name, value in row.items()} for row in splits["train"]]  # CSV takes 1 for a number
    assert read == ROWS


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_a_folder_of_files(tmp_path, kind, streaming):
    for split, rows in (("train", ROWS), ("test", ROWS[:3])):
        path = tmp_path / f"{split}.{kind}"
        if kind == "jsonl":
            write_jsonl(path, rows)
        else:
            getattr(Dataset.from_list(rows), f"to_{kind}")(path)
    splits = splits_of("--dataset_name", str(tmp_path), "--dataset_streaming", str(streaming))
    assert {split: len(list(rows)) for split, rows in splits.items()} == {"train": 8, "test": 3}
    assert isinstance(splits["test"], IterableDataset if streaming else Dataset)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_saved_dataset(tmp_path, streaming):
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"train": rows, "held_out": rows.select(range(3))}).save_to_disk(tmp_path / "two")
    one, two = (
        splits_of("--dataset_name", str(tmp_path / name), "--dataset_streaming", str(streaming))
        for name in ("one", "two")
    )
    assert {split: len(list(rows)) for split, rows in one.items()} == {"train": 8}
    assert {split: len(list(rows)) for split, rows in two.items()} == {"train": 8, "held_out": 3}
    assert isinstance(two["train"], IterableDataset if streaming else Dataset)


def test_a_name_goes_to_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(grpo, "load_dataset", lambda path, **options: asked.append((path, options)))
    splits_of("--dataset_name", "someone/prompts", "--dataset_config", "hard")
    assert asked == [("someone/prompts", {"name": "hard", "streaming": False})]


def test_a_mixture_is_trls(tmp_path):
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS)
    entries = [{"path": "json", "data_files": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    (tmp_path / "mixture.yaml").write_text(json.dumps({"datasets": entries, "test_split_size": 0.25}))
    splits = splits_of("--config", str(tmp_path / "mixture.yaml"))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 12, "test": 4}


def test_one_dataset_is_given_and_only_one(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset_name is None and `datasets` has 0 entries"):
        splits_of()
    (tmp_path / "mixture.yaml").write_text("datasets: [{path: json}]\n")
    with pytest.raises(ConfigError, match=r"dataset_name is 'd' and `datasets` has 1 entries"):
        splits_of("--config", str(tmp_path / "mixture.yaml"), "--dataset_name", "d")


@pytest.mark.parametrize("name", ["prompts.jsonl", "./prompts", "/nowhere/prompts"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ConfigError, match=re.escape(f"dataset_name is '{name}', but there is no such file or folder")):
        splits_of("--dataset_name", name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "prompts.txt").write_text("1+1=\n")
    with pytest.raises(ConfigError, match=r"prompts\.txt'; a file must be one of \.json, \.jsonl, \.parquet, \.csv"):
        splits_of("--dataset_name", str(tmp_path / "prompts.txt"))


def test_a_split_that_is_not_there_is_refused(tmp_path):
    splits = splits_of("--dataset_name", write_jsonl(tmp_path / "prompts.jsonl", ROWS))
    assert len(grpo.pick_split(splits, "dataset_train_split", "train")) == 8
    with pytest.raises(ConfigError, match="dataset_test_split is 'test', but the dataset has the splits: train"):
        grpo.pick_split(splits, "dataset_test_split", "test")


# Processes


# The whole script


class RecordedTrainer:
    """Takes the trainer's place and keeps what it was asked."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.calls = []
        self.accelerator = SimpleNamespace(end_training=lambda: self.calls.append("end"))
        RecordedTrainer.last = self

    def train(self, resume_from_checkpoint):
        self.calls.append(("train", resume_from_checkpoint))

    def save_model(self, folder):
        self.calls.append(("save", folder))

    def push_to_hub(self, dataset_name):
        self.calls.append(("push", dataset_name))


@pytest.fixture
def run_main(tmp_path, monkeypatch):
    """Runs the script on a folder with two splits, a recorder in the trainer's place."""
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test.jsonl", ROWS[:3])
    monkeypatch.setattr(grpo, "APRILGRPOTrainer", RecordedTrainer)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*options: str) -> RecordedTrainer:
        data = ["--dataset_name", str(tmp_path), "--reward_funcs", "contains_answer"]
        monkeypatch.setattr(sys, "argv", ["grpo.py", *REQUIRED, *data, *options])
        grpo.main()
        return RecordedTrainer.last

    return run


def test_the_trainer_gets_what_the_arguments_say(run_main):
    trainer = run_main("--model_name_or_path", "m", "--resume_from_checkpoint", "true")
    arguments = trainer.arguments
    assert (arguments["model"], arguments["reward_funcs"]) == ("m", [contains_answer])
    assert isinstance(arguments["args"], APRILGRPOConfig)
    assert arguments["args"].model_init_kwargs["dtype"] == "float32"
    assert len(arguments["train_dataset"]) == 8
    assert (arguments["eval_dataset"], arguments["peft_config"]) == (None, None)
    assert trainer.calls == [("train", True), ("save", "out"), "end"]


def test_evaluation_and_the_hub(run_main):
    trainer = run_main(
        "--model_name_or_path", "m", "--eval_strategy", "steps", "--eval_steps", "5", "--use_peft",
        "--dataset_train_split", "test", "--dataset_test_split", "train", "--push_to_hub", "true",
    )  # fmt: skip
    assert len(trainer.arguments["train_dataset"]) == 3
    assert len(trainer.arguments["eval_dataset"]) == 8
    assert trainer.arguments["peft_config"].r == 16
    # A local path does not go into the model card.
    assert trainer.calls == [("train", None), ("save", "out"), ("push", None), "end"]


def test_an_unknown_option_is_refused(run_main, tmp_path):
    with pytest.raises(ValueError, match="--over_provisoning"):
        run_main("--model_name_or_path", "m", "--over_provisoning", "2.0")
    # TRL's own script passes over those of a file.
    (tmp_path / "options.yaml").write_text("over_provisoning: 2.0\n")
    with pytest.raises(ValueError, match="over_provisoning"):
        run_main("--model_name_or_path", "m", "--config", str(tmp_path / "options.yaml"))


def test_a_model_is_needed(run_main):
    with pytest.raises(ConfigError, match="model_name_or_path is left out"):
        run_main()


@pytest.mark.server
def test_an_adapter_is_trained_and_saved(server, tiny_model_dir, tmp_path):
    output = tmp_path / "out"
    options = {
        "model_name_or_path": tiny_model_dir, "dataset_name": write_jsonl(tmp_path / "prompts.jsonl", ROWS),
        "reward_funcs": "my_rewards:share_of_digits", "output_dir": output, "vllm_server_base_url": server.base_url,
        "use_peft": "true", "lora_r": 4, "lora_target_modules": "all-linear", "learning_rate": 1e-3,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 20, "max_steps": 2,
        "logging_steps": 1, "report_to": "none", "bf16": "false", "over_provisioning": 1.5,
    }  # fmt: skip
    (tmp_path / "my_rewards.py").write_text(
        "def share_of_digits(completions, **kwargs):\n"
        "    return [sum(map(str.isdigit, text)) / (len(text) or 1) for text in completions]\n"
    )
    command = [sys.executable, str(ROOT / "scripts" / "grpo.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command,
        cwd=tmp_path,  # where the reward function is
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "april/round_seconds" in done.stdout
    adapter = json.loads((output / "adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["r"]) == ("LORA", 4)
    weights = load_file(output / "adapter_model.safetensors")
    # Adapters start with B = 0: anything else has been trained.
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    assert not (output / "model.safetensors").exists()

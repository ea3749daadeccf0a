"""Where the trainer runs stock GRPO and why, and which datasets are refused."""

from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from trl import GRPOConfig

from tests.tiny import build_model
from trl_april.applies import (
    check_arguments,
    check_dataset,
    check_model,
    check_processes,
    check_scoring,
    passed_over,
    why_stock,
    without_effect,
)
from trl_april.config import APRILGRPOConfig, AprilOptions
from trl_april.errors import ConfigError
from trl_april.trainer import APRILGRPOTrainer


TEXT = Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
CHAT = Dataset.from_dict({"prompt": [[{"role": "user", "content": "a"}]] * 2})


def config(**changes) -> APRILGRPOConfig:
    return APRILGRPOConfig("out", use_cpu=True, bf16=False, **changes)


def stream(*rows: dict) -> IterableDataset:
    """A stream whose columns are known by its rows only."""
    dataset = IterableDataset.from_generator(lambda: iter(rows))
    assert dataset.column_names is None
    return dataset


class TwoProcesses(APRILGRPOConfig):
    """As it is under `accelerate launch --num_processes 2`."""

    world_size = 2


def parts(*kinds: str) -> list[dict]:
    """A conversational prompt whose content is split in parts, as for vision models."""
    return [{"role": "user", "content": [{"type": kind, "text": "x"} for kind in kinds]}]


@pytest.mark.parametrize(
    "dataset",
    [TEXT, CHAT, TEXT.to_iterable_dataset(), stream({"prompt": "a"}), stream({"prompt": parts("text", "text")}), None],
    ids=["text", "chat", "iterable", "stream", "parts of text", "none"],
)
def test_april_applies(dataset):
    assert why_stock(config(), dataset) is None


def test_april_applies_to_a_stock_config_in_server_mode():
    """Pinned: APRIL is on exactly when vLLM's server mode is, whichever config class says so."""
    stock = {"use_cpu": True, "bf16": False}
    assert why_stock(GRPOConfig("out", use_vllm=True, vllm_mode="server", **stock), TEXT) is None
    assert why_stock(GRPOConfig("out", **stock), TEXT).startswith("use_vllm is False")
    assert "'colocate'" in why_stock(GRPOConfig("out", use_vllm=True, vllm_mode="colocate", **stock), TEXT)


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"use_vllm": False}, {}, "use_vllm is False"),
        ({"vllm_mode": "colocate"}, {}, "vllm_mode is 'colocate', and partial rollouts need 'server'"),
        ({}, {"tools": [print]}, "tools are given"),
        ({}, {"environment_factory": dict}, "environment_factory is given"),
        ({}, {"rollout_func": print}, "rollout_func is given"),
    ],
)
def test_the_reason_for_stock(changes, arguments, words):
    assert words in why_stock(config(**changes), TEXT, **arguments)


def test_a_subclass_whose_methods_would_be_passed_over_runs_stock():
    """It decides by itself on what is generated, or for which rows."""

    class Curriculum(APRILGRPOTrainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    class Generates(Curriculum):
        def _generate_single_turn(self, *args, **kwargs):
            return super()._generate_single_turn(*args, **kwargs)

    class Rewards(APRILGRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            return super()._calculate_rewards(*args, **kwargs)

    class Prompts(APRILGRPOTrainer):
        def _generate(self, prompts):
            return super()._generate([f"Be brief. {prompt}" for prompt in prompts])

    assert passed_over(APRILGRPOTrainer) == passed_over(Rewards) == []
    assert passed_over(Prompts) == ["_generate"]
    assert passed_over(Curriculum) == ["get_train_dataloader"]
    reason = why_stock(config(), TEXT, overridden=passed_over(Generates))
    assert reason.startswith("a subclass overrides _generate_single_turn and get_train_dataloader, which")
    assert why_stock(config(), TEXT, overridden=[]) is None


@pytest.mark.parametrize("dataset", [DatasetDict({"train": TEXT}), [{"prompt": "a"}]], ids=["splits", "list"])
def test_what_is_no_dataset_is_left_for_trl_to_refuse(dataset):
    assert why_stock(config(), dataset) is None
    check_dataset(dataset, 2)


@pytest.mark.parametrize("overridden", [False, True])
def test_rewards_that_dynamic_sampling_does_not_see_are_warned_of(overridden, caplog):
    trainer = SimpleNamespace(is_fsdp_enabled=False, is_deepspeed_enabled=False, reward_funcs=[])
    check_scoring(trainer, SimpleNamespace(count=1), overridden=overridden)
    assert ("SimpleNamespace overrides _calculate_rewards" in caplog.text) is overridden


def test_columns_are_those_that_a_transform_makes():
    """Stock GRPO asks the rows, too."""
    questions = Dataset.from_dict({"question": ["a", "b"]})
    prompts = questions.with_transform(lambda rows: {"prompt": rows["question"]})
    check_dataset(prompts, 2)
    assert why_stock(config(), prompts) is None
    images = questions.with_transform(lambda rows: {"prompt": rows["question"], "image": rows["question"]})
    assert "images" in why_stock(config(), images)


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({"vllm_importance_sampling_correction": False}, True),
        ({"vllm_importance_sampling_correction": False, "over_provisioning": 1.0}, False),
        (
            {
                "vllm_importance_sampling_correction": False,
                "over_provisioning": 1.0,
                "overlap_generation": True,
            },
            True,
        ),
        ({}, False),
    ],
)
def test_training_on_older_tokens_without_a_correction_is_warned_of(changes, warns, caplog):
    args = config(per_device_train_batch_size=2, num_generations=2, **changes)
    check_arguments(args, AprilOptions.of(args), TEXT)
    assert ("which biases the gradient" in caplog.text) is warns


def test_the_trainer_needs_vllm_too(monkeypatch):
    monkeypatch.setattr("trl_april.applies.is_vllm_available", lambda: False)
    args = config()
    with pytest.raises(ConfigError, match="vLLM is not installed.*pip install"):
        check_arguments(args, AprilOptions.of(args), TEXT)


def test_no_tools_are_no_tools():
    assert why_stock(config(), TEXT, tools=[]) is None


def test_processes_without_a_process_group_run_stock():
    """As on a device whose processes do not speak `torch.distributed`; with it, April applies (test_many.py)."""
    args = TwoProcesses("out", use_cpu=True, bf16=False)
    assert why_stock(args, TEXT) == "the 2 processes do not form a torch.distributed process group"


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    alone, together = config(), TwoProcesses("out", use_cpu=True, bf16=False)
    check_processes(alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes(alone)  # of something else: no launcher has started this
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_processes(together)
    with pytest.raises(ConfigError, match=r"2 processes were launched.*world_size is 1.*ACCELERATE_USE_CPU=true"):
        check_processes(alone)


IMAGES = {
    "column image": Dataset.from_dict({"prompt": ["a"], "image": ["x.png"]}),
    "column images": Dataset.from_dict({"prompt": ["a"], "images": [["x.png"]]}),
    "column of an iterable dataset": Dataset.from_dict({"prompt": ["a"], "image": ["x.png"]}).to_iterable_dataset(),
    "column of a stream": stream({"prompt": "a", "images": ["x.png"]}),
    "part of a prompt": Dataset.from_dict({"prompt": [parts("image", "text")]}),
    "a later prompt": Dataset.from_dict({"prompt": [parts("text"), parts("text", "image")]}),
    "last part of a streamed prompt": stream({"prompt": parts("text", "image")}),
    "second message": stream({"prompt": [{"role": "system", "content": "s"}, *parts("image")]}),
}


@pytest.mark.parametrize("images", IMAGES)
def test_images_run_stock(images):
    assert why_stock(config(), IMAGES[images]) == ("the dataset has images, which partial rollouts do not support yet")


@pytest.mark.parametrize(
    "prompt", [["a", "b"], [1, 2], [{"role": "user", "content": ["x"]}], [{"role": "user", "content": None}]]
)
def test_an_odd_prompt_is_left_to_trl(prompt):
    """Pinned: what TRL would say about it, or do with it, is not preceded by an error of ours."""
    assert why_stock(config(), stream({"prompt": prompt})) is None


def test_an_empty_dataset_is_no_reason_for_stock():
    """It is refused afterwards, by `check_dataset`, with a sentence about datasets."""
    assert why_stock(config(), Dataset.from_dict({"prompt": []})) is None
    assert why_stock(config(), stream()) is None


def test_a_transform_has_all_columns_that_it_needs():
    """Where prompts are looked through for images, other columns are left alone unless one is made of them."""

    def prompts(rows):
        return {"prompt": [parts("text") if n % 2 else parts("image") for n in rows["number"]]}

    assert "images" in why_stock(config(), Dataset.from_dict({"number": [1, 2]}).with_transform(prompts))
    read = Dataset.from_dict({"prompt": [parts("text")] * 3, "number": [1, 2, 3]})
    assert why_stock(config(), read) is None


def test_looking_at_a_stream_takes_nothing_from_it():
    dataset = stream({"prompt": "a"}, {"prompt": "b"})
    why_stock(config(), dataset)
    check_dataset(dataset, 1)
    assert [row["prompt"] for row in dataset] == ["a", "b"]


# Datasets that no round can be made of


@pytest.mark.parametrize(
    "dataset", [TEXT, TEXT.to_iterable_dataset(), stream({"prompt": "a"}), None, [{"prompt": "a"}]]
)
def test_a_dataset_that_will_do(dataset):
    check_dataset(dataset, 2)  # of a stream, the length is not known; of something else, TRL says what it takes


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (TEXT, ["has 2 rows", "needs 3 prompts", "generation_batch_size / num_generations", "Add rows", "lower"]),
        (Dataset.from_dict({"prompt": []}), ["has 0 rows", "needs 3 prompts"]),
        (Dataset.from_dict({}), ["has 0 rows"]),
        (stream(), ["is empty", "loaded or filtered"]),
        (
            Dataset.from_dict({"question": ["a"] * 3, "answer": ["1"] * 3}),
            ["the columns question, answer", "no `prompt`", "rename_column"],
        ),
        (Dataset.from_dict({"question": ["a"]}).to_iterable_dataset(), ["the columns question", "no `prompt`"]),
        (stream({"question": "a"}), ["the columns question", "no `prompt`", "rename_column"]),
    ],
    ids=["too few", "empty", "no columns", "empty stream", "no prompt", "no prompt, iterable", "no prompt, stream"],
)
def test_a_dataset_that_no_round_can_be_made_of(dataset, words):
    with pytest.raises(ConfigError) as caught:
        check_dataset(dataset, 3)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("config", [PrefixTuningConfig, PromptTuningConfig])
def test_adapters_that_are_no_part_of_the_weights_are_refused(config):
    model = build_model()
    check_model(model)
    check_model(get_peft_model(build_model(), LoraConfig(target_modules=["q_proj"])))
    adapted = get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match="an adapter of the type P.*_TUNING, .*such as LoRA, or .*use_vllm=False"):
        check_model(adapted)


def test_an_importance_sampling_mode_that_is_not_trls_is_named():
    assert "vllm_importance_sampling_mode stays 'token_truncate'; TRL's default is" in without_effect(config())
    assert "importance_sampling" not in without_effect(config(vllm_importance_sampling_mode="sequence_mask"))
    assert "importance_sampling" not in without_effect(config(use_vllm=False))

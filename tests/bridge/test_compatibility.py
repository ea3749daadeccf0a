"""When APRIL applies, why stock GRPO runs instead, and which arguments are refused."""

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict, Features, Image, IterableDataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl import GRPOConfig

from tests.support.tiny import build_model
from trl_april.bridge.compatibility import (
    RequestedBatch,
    check_arguments,
    check_dataset,
    check_images,
    check_model,
    check_processes,
    check_row,
    check_scoring,
    compare_with_server,
    has_images,
    ignored_overrides,
    why_stock,
    without_effect,
)
from trl_april.config import APRILGRPOConfig, AprilOptions
from trl_april.errors import ConfigError
from trl_april.trainer import APRILGRPOTrainer


PartialState(cpu=True)  # of the logger
TEXT = Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
CPU = {"use_cpu": True, "bf16": False}


def config(**changes) -> APRILGRPOConfig:
    return APRILGRPOConfig("out", **{**CPU, **changes})


def stream(*rows: dict) -> IterableDataset:
    """A stream that does not declare its columns."""
    dataset = IterableDataset.from_generator(lambda: iter(rows))
    assert dataset.column_names is None
    return dataset


class TwoProcesses(APRILGRPOConfig):
    """As under `accelerate launch --num_processes 2`."""

    world_size = 2
    process_index = 0


# Stock GRPO


@pytest.mark.parametrize(
    "dataset",
    [
        TEXT, TEXT.to_iterable_dataset(), stream({"prompt": "a"}), None, Dataset.from_dict({"prompt": []}), stream(),
        DatasetDict({"train": TEXT}), [{"prompt": "a"}],
    ],
)  # fmt: skip
def test_april_applies_and_leaves_odd_datasets_to_trl(dataset):
    assert why_stock(config(), overridden=[]) is None
    for mode in ("server", "colocate"):
        assert why_stock(GRPOConfig("out", use_vllm=True, vllm_mode=mode, **CPU)) is None
    assert not has_images(dataset)


def test_reasons_for_stock():
    assert "use_vllm is False" in why_stock(config(use_vllm=False))
    assert "rollout_func is given" in why_stock(config(), rollout_func=print)
    alone = why_stock(TwoProcesses("out", **CPU))
    assert alone == "the 2 processes do not form a torch.distributed process group"


def test_a_subclass_that_overrides_a_replaced_method_runs_stock():
    class Curriculum(APRILGRPOTrainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    class Generates(Curriculum):
        def _generate_single_turn(self, *args, **kwargs):
            return super()._generate_single_turn(*args, **kwargs)

    class Rewards(APRILGRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            return super()._calculate_rewards(*args, **kwargs)

    assert ignored_overrides(APRILGRPOTrainer, APRILGRPOTrainer) == ignored_overrides(Rewards, APRILGRPOTrainer) == []
    assert ignored_overrides(Curriculum, APRILGRPOTrainer) == ["get_train_dataloader"]
    reason = why_stock(config(), overridden=ignored_overrides(Generates, APRILGRPOTrainer))
    assert reason.startswith("a subclass overrides _generate_single_turn and get_train_dataloader, which")


NO_IMAGE = [{"content": [{"image": None}]}]
MESSAGES = Features({"prompt": [{"content": [{"image": Image()}]}]})
IMAGES = {
    "column image": Dataset.from_dict({"prompt": ["a"], "image": ["x.png"]}),
    "column images": Dataset.from_dict({"prompt": ["a"], "images": [["x.png"]]}),
    "column of an iterable dataset": Dataset.from_dict({"prompt": ["a"], "image": ["x.png"]}).to_iterable_dataset(),
    "messages after the first row": Dataset.from_dict(
        {"prompt": [[{"content": [{"image": None}]}]]}, features=MESSAGES
    ),
}


@pytest.mark.parametrize("images", IMAGES)
def test_images_are_not_kept_through_a_sync(images):
    assert has_images(IMAGES[images]) and has_images(TEXT) is False
    for overlap in ("auto", False):
        chosen = AprilOptions(overlap_generation=overlap).with_schedule(keeps=False)
        check_images(chosen)
        assert chosen.resume_kv == "reuse"
    with pytest.raises(ConfigError, match="Set resume_kv='reuse' or 'recompute'"):
        check_arguments(config(), AprilOptions(resume_kv="keep"), IMAGES[images])


def test_columns_are_those_of_a_transform():
    questions = Dataset.from_dict({"question": ["a", "b"]})
    prompts = questions.with_transform(lambda rows: {"prompt": rows["question"]})
    check_arguments(config(per_device_train_batch_size=8, num_generations=4), AprilOptions(), prompts)
    # Its later rows may have images.
    assert has_images(prompts) is None is has_images(stream({"prompt": "a", "images": ["x.png"]}))
    assert has_images(questions.with_transform(lambda rows: {"prompt": rows["question"], "image": rows["question"]}))


def test_the_checks_read_no_stream_and_leave_foreign_datasets_to_trl():
    """Its rows may exist only once, or not before training."""
    for foreign in (None, [{"prompt": "a"}]):
        check_dataset(foreign, 2)
    unread = IterableDataset.from_generator(lambda: pytest.fail("read"))
    assert has_images(unread) is None
    check_arguments(config(), AprilOptions(), unread, tools=[print])


def test_options_without_effect_are_named_when_april_is_off():
    assert without_effect(config()) == without_effect(config(use_vllm=False, vllm_server_port=1)) == ""
    assert "a vLLM server with its own GPUs" in without_effect(config(vllm_server_port=1))
    assert "no effect: over_provisioning, stream_interval." in without_effect(
        config(over_provisioning=2.0, stream_interval=8)
    )
    assert "no effect: max_staleness." in without_effect(config(max_staleness=1))


# Refused arguments


def check(**changes) -> None:
    args = config(**{"per_device_train_batch_size": 4, "num_generations": 2, **changes})
    check_arguments(args, AprilOptions.of(args).with_schedule(), TEXT)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vllm_mode": "beside"}, "vllm_mode is 'beside'; it must be 'server' or 'colocate'"),
        ({"loss_type": "ppo"}, "loss_type is 'ppo'; .* grpo, dapo, .*, gspo"),
        ({"max_rejected_groups_per_round": 1}, "max_rejected_groups_per_round is 1, .* may need 2 .*at least 2"),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_truncate"},
            "vllm_importance_sampling_mode is 'sequence_truncate', but loss_type='vespo' needs 'token_truncate'",
        ),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        check(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, None),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, "'sequence_mask', which masks samples"),
        ({"vllm_importance_sampling_correction": False}, "which biases the gradient"),
        ({"vllm_importance_sampling_correction": False, "over_provisioning": 1.0}, None),
        (
            {"vllm_importance_sampling_correction": False, "over_provisioning": 1.0, "overlap_generation": True},
            "which biases the gradient",
        ),
    ],
)
def test_harmful_options_are_warned_of(options, words, caplog):
    check(**options)
    assert (words in caplog.text) if words else not caplog.records


def test_tools_need_conversations():
    check_row({"prompt": [{"role": "user", "content": "a"}]}, needs_prompt=True, acts=True)
    with pytest.raises(ConfigError, match="the prompts of the training dataset are text: 'a'.*a list of messages"):
        check_row(TEXT[0], needs_prompt=True, acts=True)


def test_processes_that_would_train_separately_are_refused(monkeypatch):
    alone, together = config(), TwoProcesses("out", **CPU)
    check_processes(alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes(alone)  # a cluster's variable, without a launcher
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_processes(together)
    with pytest.raises(ConfigError, match=r"2 processes were launched.*world_size is 1.*ACCELERATE_USE_CPU=true"):
        check_processes(alone)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (TEXT, "has 2 rows.*needs 3 prompts .generation_batch_size / num_generations.*Add rows, lower"),
        (Dataset.from_dict({}), "has 0 rows.*needs 3 prompts"),
        (Dataset.from_dict({"question": ["a"] * 3, "answer": ["1"] * 3}), "no `prompt`: question, answer.*rename_col"),
        (Dataset.from_dict({"prompt": ["a"] * 3}).with_format("arrow"), r"'arrow'.*dataset.with_format\(None\)"),
    ],
    ids=["too few", "no rows", "no prompt", "a format without rows"],
)
def test_a_dataset_without_enough_prompts_is_refused(dataset, words):
    with pytest.raises(ConfigError, match=words):
        check_arguments(config(per_device_train_batch_size=6, num_generations=2), AprilOptions(), dataset)


def test_an_adapter_that_cannot_be_merged_is_refused():
    check_model(build_model())
    adapted = get_peft_model(build_model(), LoraConfig(target_modules=["q_proj"]))
    check_model(adapted)
    adapted.base_model.model.is_loaded_in_8bit = True
    check_model(adapted)
    with pytest.raises(ConfigError, match="loaded in 4 or 8 bit.*Train a LoRA adapter"):
        check_model(adapted.get_base_model())
    adapted = get_peft_model(build_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match="adapter of the type P.*_TUNING.*Use LoRA.*use_vllm=False"):
        check_model(adapted)


# Models that compute something else than the server


def build(model_type: str, attention: str = "sdpa", **options) -> PreTrainedModel:
    config = AutoConfig.for_model(
        model_type, vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, word_embed_proj_dim=16, ffn_dim=32, pad_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


DROPOUT = [
    ("seed_oss", {"attention_dropout": 0.5, "residual_dropout": 0.5}, "SeedOssAttention.attention_dropout = 0.5"),
    ("opt", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}, "OPTDecoder.layerdrop = 0.5"),
    ("falcon", {"hidden_dropout": 0.5, "attention_dropout": 0.5}, "FalconConfig.hidden_dropout = 0.5"),
    ("gpt2", {"resid_pdrop": 0.5}, "Dropout.p = 0.5"),
    ("mixtral", {"router_jitter_noise": 0.5}, "MixtralSparseMoeBlock.jitter_noise = 0.5"),
]


@pytest.mark.parametrize(("model_type", "options", "named"), DROPOUT, ids=[name for name, *_ in DROPOUT])
def test_no_dropout_is_left_if_it_is_disabled(model_type, options, named, caplog):
    """TRL's option reaches only `nn.Dropout`."""
    model, ids = build(model_type, "eager", **options), torch.arange(3, 43)[None]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert not torch.allclose(model.train()(input_ids=ids).logits, expected, atol=1e-3)
        compare_with_server(model, disable_dropout=False)
        assert named in caplog.text and "Set disable_dropout=True" in caplog.text
        caplog.clear()
        for _ in range(2):
            compare_with_server(model, disable_dropout=True)
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
        compare_with_server(model, disable_dropout=False)
    assert not caplog.records


def test_an_attention_that_leaves_an_option_out_is_named(caplog):
    model, ids = build("gemma2", attn_logit_softcapping=0.01, query_pre_attn_scalar=1), torch.arange(3, 43)[None]
    compare_with_server(model, disable_dropout=True)
    assert "attention 'sdpa' leaves out the model's attn_logit_softcapping" in caplog.text
    caplog.clear()
    with torch.no_grad():
        without = model.eval()(input_ids=ids).logits
        model.set_attn_implementation("eager")
        assert not torch.equal(model(input_ids=ids).logits, without), "transformers leaves it out no longer"
    compare_with_server(model, disable_dropout=True)
    compare_with_server(build("qwen3"), disable_dropout=True)
    assert not caplog.records


def test_a_sharded_reward_model_is_refused_under_dynamic_sampling():
    funcs = [torch.nn.Linear(1, 1)]
    check_scoring(funcs, 1, sharded=True)
    check_scoring(funcs, 2, sharded=False)
    check_scoring([print], 2, sharded=True)
    with pytest.raises(ConfigError, match="shards over 2 processes.*Serve the reward model.*both options to False"):
        check_scoring(funcs, 2, sharded=True)


# The generation batch that TRL asks for


class Picture:
    """An image, of which TRL asks for a batch of hundreds at every micro-step."""

    def __deepcopy__(self, memo: dict) -> "Picture":
        raise AssertionError("an image is copied")


def test_a_requested_batch_is_compared_without_copies_of_its_images():
    parts = [{"type": "image", "image": Picture()}, {"type": "text", "text": "What is it?"}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "images": [Picture()]}]
    requested = RequestedBatch("Mine")
    requested.request(rows)
    requested.answer(rows)
    requested.request(rows)
    with pytest.raises(ConfigError, match="Mine changes the prompts or columns"):
        requested.answer([{**rows[0], "weight": 1.0}])
    parts[1]["text"] += " Be brief."
    with pytest.raises(ConfigError, match="Mine changes the prompts or columns"):
        requested.answer(rows)

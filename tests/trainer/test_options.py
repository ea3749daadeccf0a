"""Every option of TRL: honored, refused, or without meaning here; and options that are changed afterwards."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainerCallback, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from tests.support.fake_vllm import FakeVLLM
from tests.support.tool_calling import DATASET, END, TOKENIZER, ToolScript
from tests.trainer.test_tools import april
from trl_april.bridge import rows
from trl_april.bridge.compatibility import FIXED, OF_TRANSFORMERS
from trl_april.errors import ConfigError


# Fields of GRPOConfig that decide what is generated, and the test that they do.
CONFIG, ROWS = "engine/test_sampling.py::test_options_of_the_config_arrive", "data/test_source.py"
SERVER = "bridge/test_construction.py"
HONORED = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), CONFIG),
    "generation_kwargs": "engine/test_sampling.py::test_generation_kwargs_override_and_are_not_changed",
    **dict.fromkeys(
        ("num_generations", "generation_batch_size", "steps_per_generation", "num_iterations", "shuffle_dataset",
         "gradient_accumulation_steps", "per_device_train_batch_size", "max_steps", "num_train_epochs", "seed"),
        f"{ROWS}::test_source_gives_the_rows_that_stock_trains_on",
    ),
    "ignore_data_skip": f"{ROWS}::test_source_gives_the_rows_that_stock_trains_on_after_resuming",
    "remove_unused_columns": f"{ROWS}::test_rows_come_through_the_collator_with_the_columns_that_trl_keeps",
    "max_completion_length": "rollout/test_driver.py::",
    "chat_template_kwargs": "trainer/test_options.py::test_end_tokens_are_those_of_the_start_of_training",
    "max_tool_calling_iterations": "trainer/test_tools.py::test_batches_rewards_and_metrics_equal_stock",
    "num_generations_eval": "trainer/test_evaluation.py::test_metrics_equal_stock_with_tools",
    "use_vllm": "bridge/test_compatibility.py::test_reasons_for_stock",
    "vllm_mode": "bridge/test_compatibility.py::test_april_applies_and_leaves_odd_datasets_to_trl",
    **dict.fromkeys(
        ("vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
        f"{SERVER}::test_server_is_needed_where_none_is_given",
    ),
    "vllm_server_timeout": "trainer/test_server_away.py::",
    "vllm_group_port": "weights/test_transport.py::",
    **dict.fromkeys(
        ("model_init_kwargs", "trust_remote_code", "vllm_model_impl", "vllm_max_model_length"),
        f"{SERVER}::test_model_by_name_is_served_as_it_is_loaded",
    ),
    **dict.fromkeys(("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"), "server/test_embedded.py::"),
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
         "vllm_importance_sampling_clip_min", "off_policy_mask_threshold"),
        "training/test_losses.py::",
    ),
}  # fmt: skip
REFUSED = {"vllm_enable_sleep_mode": True, "vllm_structured_outputs_regex": "a+"}
# Warned of, since transformers does not generate.
WITHOUT_MEANING = {
    "cache_implementation": "static",
    "ds3_gather_for_generation": False,
    "transformers_continuous_batching_config": {"block_size": 8},
    "use_transformers_continuous_batching": True,
}
# TRL's __post_init__ turns them into other fields, with a warning.
DEPRECATED = {"use_transformers_paged", "vllm_importance_sampling_cap"}
# Of the loss, rewards and logs, after TRL has its batch: TRL's own code reads them.
OF_TRL = set(
    """router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 pad_to_multiple_of beta epsilon delta epsilon_high
    sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
    importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type
    mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
    entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
    use_bias_correction_kl log_completions log_multimodal num_completions_to_print log_unique_prompts
    log_completions_hub_repo""".split()
)
# Attributes of TRL's trainer that may be set after its constructor. Those in FIXED are refused afterwards.
READ_WHEN_USED = set(
    """chat_template_kwargs max_tool_calling_iterations shuffle_dataset num_generations_eval eos_token_ids
    environment_factories reward_funcs reward_func_names reward_processing_classes reward_weights tools
    pad_to_multiple_of generation_config""".split()
)
OF_TRL_ATTRIBUTES = set(
    """aux_loss_enabled beta commit_scheduler entropy_coef epsilon_high epsilon_low importance_sampling_level
    log_completions log_multimodal log_unique_prompts loss_type mask_truncated_completions multi_objective_aggregation
    num_completions_to_print off_policy_mask_threshold ref_model router_aux_loss_coef scale_rewards
    top_entropy_quantile use_adaptive_entropy vllm_importance_sampling_correction""".split()
)
INTERNAL = set(
    """async_loop_thread chat_template continuous_batching_config environments vllm_generation
    vllm_gpu_memory_utilization vllm_tensor_parallel_size use_transformers_continuous_batching""".split()
)
STOP = "</answer>"
SIZES = {"num_generations": 4, "per_device_train_batch_size": 4, "over_provisioning": 3.0, "max_steps": 4}


def no_reward(completions, **kwargs):
    return [0.0] * len(completions)


@pytest.fixture
def fake(one_thread):
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ToolScript([["no." + END]] * 4).stream) as server:
        yield server


def trainer_of(fake, tmp_path, **options):
    arguments = {"tools": None, "reward_funcs": no_reward, **options.pop("arguments", {})}
    return april(fake, tmp_path, arguments=arguments, **{**SIZES, **options})


def test_every_field_of_the_config_is_accounted_for():
    """A field that is new in TRL fails here: does it change what is generated, and is it then honored or refused?"""
    names = [*HONORED, *REFUSED, *WITHOUT_MEANING, *DEPRECATED, *OF_TRL]
    of_transformers = {field.name for field in fields(TrainingArguments)}
    assert len(names) == len(set(names))
    assert {field.name for field in fields(GRPOConfig)} - of_transformers == set(names) - of_transformers
    for test in HONORED.values():
        file, name = test.split("::")
        assert f"def {name or 'test_'}" in Path(__file__).parents[1].joinpath(file).read_text(), test
    assert set(OF_TRANSFORMERS) == WITHOUT_MEANING.keys()


def test_every_attribute_of_trl_is_accounted_for():
    """A new attribute fails here: do rollouts read it, or is a change after the constructor refused?"""
    source = inspect.getsource(GRPOTrainer.__init__)
    found = set(re.findall(r"self\.([a-z]\w*)(?:, self\.\w+)* =[^=]", source))
    names = [*FIXED, "rollout_func", *READ_WHEN_USED, *OF_TRL_ATTRIBUTES, *INTERNAL]
    assert len(names) == len(set(names)) and set(names) == found


@pytest.mark.parametrize(("name", "value"), [*REFUSED.items(), *WITHOUT_MEANING.items()])
def test_options_that_cannot_be_honored_are_refused_or_named(fake, tmp_path, caplog, name, value):
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"{name}.*{value!r}".replace("+", r"\+")):
            trainer_of(fake, tmp_path, **{name: value})
    else:
        trainer_of(fake, tmp_path, **{name: value})
        assert f"not transformers: {name}." in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda trainer: setattr(trainer.model.generation_config, "eos_token_id", [7, 9]),
        lambda trainer: setattr(trainer.generation_config, "eos_token_id", [7, 9]),
        lambda trainer: trainer.eos_token_ids.extend([7, 9]),
        lambda trainer: setattr(trainer.processing_class, "eos_token", TOKENIZER.convert_ids_to_tokens(9)),
    ],
)
def test_end_tokens_are_those_of_the_start_of_training(fake, tmp_path, change):
    """Whoever names them: stock reads its own config at every batch, and counts other completions as truncated."""
    options = {"chat_template_kwargs": {"enable_thinking": False}, "generation_kwargs": {"stop": STOP}}
    trainer = trainer_of(fake, tmp_path, **options)
    change(trainer)
    sampling = rows.sampling(trainer)
    assert 9 in trainer.eos_token_ids and sampling.body["stop_token_ids"].count(9) == 1
    assert sampling.stop.strings == [STOP]
    (prompt,) = rows.tokenize_prompts(trainer, None)([DATASET[0]])
    assert TOKENIZER.decode(prompt).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda trainer: setattr(trainer, "temperature", 0.5), "trainer.temperature was changed from 1.0 to 0.5"),
        (lambda trainer: setattr(trainer.args, "num_generations", 2), "trainer.args.num_generations .* from 4 to 2"),
        (lambda trainer: setattr(trainer.vllm_generation, "top_p", 0.9), "trainer.vllm_generation.top_p was"),
        (lambda trainer: trainer.args.generation_kwargs.update(seed=1), "trainer.args.generation_kwargs was"),
        (lambda trainer: setattr(trainer.generation_config, "min_p", 0.1), "trainer.generation_config.min_p was"),
        (lambda trainer: setattr(trainer, "rollout_func", print), "trainer.rollout_func was changed from None"),
        (lambda trainer: trainer.eos_token_ids.append(9), r"trainer.eos_token_ids .* Set it before training starts"),
    ],
)
def test_options_that_change_during_training_are_refused(fake, tmp_path, change, words):
    class Change(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            change(trainer)

    trainer = trainer_of(fake, tmp_path, arguments={"callbacks": [Change()]}, generation_kwargs={"top_k": 5})
    with pytest.raises(ConfigError, match=words):
        trainer.train()
    assert trainer.state.global_step == 1

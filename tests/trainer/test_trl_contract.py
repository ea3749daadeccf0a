"""Everything of TRL that trl_april relies on, so that an upgrade fails here and not in training.

If a test fails after an upgrade of TRL, read what changed there, adapt the override that the test names, and only then
widen the pin in pyproject.toml.
"""

import inspect
import re

import trl
from packaging.version import Version
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import utils

from trl_april.bridge.compatibility import LOSS_TYPES
from trl_april.trainer import APRILGRPOTrainer
from trl_april.training.micro_batches import BY_TOKENS
from trl_april.weights.sync import ServerGeneration


GENERATE = inspect.getsource(GRPOTrainer._generate)
SCORE = inspect.getsource(GRPOTrainer._generate_and_score_completions)
CONSTRUCTOR = inspect.getsource(GRPOTrainer.__init__)


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_version_is_the_minor_that_was_tested():
    assert Version(trl.__version__).release[:2] == (1, 16)


def test_the_constructor_takes_what_stock_takes():
    """APRILGRPOTrainer.__init__ repeats the signature; defaults and order are part of a drop-in. One is added."""
    stock, ours = (dict(inspect.signature(cls.__init__).parameters) for cls in (GRPOTrainer, APRILGRPOTrainer))
    assert ours.popitem()[0] == "rollout"
    assert list(ours) == list(stock)
    assert {name: p.default for name, p in ours.items()} == {name: p.default for name, p in stock.items()}


def test_the_slot_for_foreign_rollouts():
    """`rollout_func` is read at every call of `_generate`, before tokenization, and returns these keys."""
    assert GENERATE.index("if self.rollout_func is not None") < GENERATE.index("self._tokenize_prompts")
    assert "self.rollout_func(prompts, self)" in GENERATE
    assert 'required_keys = {"prompt_ids", "completion_ids", "logprobs"}' in GENERATE
    assert "self.state.global_step != self._last_loaded_step" in GENERATE
    assert parameters(GRPOTrainer._generate_and_score_completions) == ["inputs"]
    assert 'mode = "train" if self.model.training else "eval"' in SCORE


def test_the_tool_loop_can_run_one_iteration():
    """`tool_turns` calls it for each turn with a view of the trainer, and shadows it when a batch is handed over."""
    loop = inspect.getsource(GRPOTrainer._tool_call_loop)
    of_batch = ["prompts", "prompt_ids", "completion_ids", "completions", "logprobs", "images", "multimodal_fields"]
    assert parameters(GRPOTrainer._tool_call_loop) == of_batch
    returned = ["completions", "completion_ids", "logprobs", "tool_call_count", "tool_failure_count", "tool_images"]
    assert f"return tool_mask, {', '.join(returned)}" in loop
    assert "while idxs_with_tool and iteration_num < self.max_tool_calling_iterations:" in loop
    # All that it reads of the trainer, in a batch without images. It writes nothing.
    read = {
        "max_tool_calling_iterations", "_sync_tool_dicts", "_async_tool_dicts", "async_loop", "_get_tool_suffix_ids",
        "use_vllm", "vllm_mode", "vllm_generation", "_is_vlm", "model", "max_completion_length", "processing_class",
        "tools", "_generate_single_turn", "environment_factories", "_env_tools", "_batch_environments", "_tokenizer",
    }  # fmt: skip
    assert set(re.findall(r"self\.(\w+)", loop)) == read and not re.search(r"self\.\w+ = ", loop)
    assert parameters(GRPOTrainer._get_tool_suffix_ids) == ["tool_messages"]
    assert GENERATE.count("self._tool_call_loop(") == 1
    # The tools are split like this, and this is how many turns they may take.
    assert "if inspect.iscoroutinefunction(tool):" in SCORE and "[tool.__name__] = tool" in SCORE
    assert "args.max_tool_calling_iterations if args.max_tool_calling_iterations is not None else" in CONSTRUCTOR


def test_environments_are_used_like_this():
    """`Environments` does the same for one sample; `tokenize` and `run_calls` read these attributes of a view."""
    for line in (
        'prompts = [x.get("prompt", [{"role": "user", "content": ""}]) for x in inputs]',
        'self._batch_environments = [x.get("environment") if self._multi_environment else None for x in inputs]',
        'reset_kwargs = {k: v for k, v in x.items() if k != "environment"} if self._multi_environment else x',
        "observation = environment.reset(**reset_kwargs)",
        "if isinstance(observation, list) and isinstance(content, str):",
        "if isinstance(observation, str) and isinstance(content, list):",
        'prompts[i] = prompt[:-1] + [{**prompt[-1], "content": content + observation}]',
        "inspect.getmembers(type(environment), predicate=inspect.isfunction)",
        'if member_name not in ("reset", "get_reward") and not member_name.startswith("_")',
        "for tool in self._standalone_tools + methods:",
    ):
        assert line in SCORE
    for line in ("self._environment_pool[name] = [instance]", "self._env_tools[name] = tools + methods"):
        assert line in CONSTRUCTOR
    assert "tools=self._env_tools[name] or None," in inspect.getsource(GRPOTrainer._tokenize_prompts)
    assert 'reward_kwargs["environments"] = self.environments' in inspect.getsource(GRPOTrainer._calculate_rewards)


def test_a_checkpoint_is_written_by_one_method_and_ends_with_the_trainers_state():
    """The pool is written before it, into the same folder; a checkpoint with the trainer's state is complete."""
    save = inspect.getsource(Trainer._save_checkpoint)
    assert parameters(GRPOTrainer._save_checkpoint) == ["model", "trial"] == parameters(Trainer._save_checkpoint)
    assert 'f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"' in save and PREFIX_CHECKPOINT_DIR == "checkpoint"
    assert "run_dir = self._get_output_dir(trial=trial)" in save
    order = [
        save.index(step)
        for step in (
            "self.save_model(", "_save_optimizer_and_scheduler(", "self._save_rng_state(", "self.state.save_to_json(",
            "self._push_from_checkpoint(", "rotate_checkpoints(",
        )
    ]  # fmt: skip
    assert order == sorted(order)
    assert parameters(Trainer.train)[0] == "resume_from_checkpoint"


def test_the_order_of_events_at_the_end_of_a_step():
    """A checkpoint after a signal is written after `on_step_end`, and training stops before the next step."""
    epoch, after = inspect.getsource(Trainer._run_epoch), inspect.getsource(Trainer._maybe_log_save_evaluate)
    began, ended, saves = (
        epoch.index(words)
        for words in ("handler.on_step_begin", "handler.on_step_end", "self._maybe_log_save_evaluate(")
    )
    assert began < epoch.index("self.training_step(") < ended < saves < epoch.index("handler.on_epoch_end")
    # What an evaluation says of the best model decides on saving, so there is none.
    assert after.index("if self.control.should_evaluate:") < after.index("SaveStrategy.BEST")
    assert after.index("self._save_checkpoint(") < after.index("handler.on_save(")


def test_how_a_training_ends():
    """Also a training that resumes at its end, where `Trainer` alone would do one more step."""
    assert parameters(Trainer._finalize_training) == ["trial", "num_train_samples", "start_time"]
    assert "global_step >= " not in inspect.getsource(Trainer._run_epoch)
    assert "save_total_limit == 1" in inspect.getsource(Trainer._finalize_training)


def test_the_step_counter_of_generation_batches():
    """Reset when training starts, read when an optimiser step ends. `RowSource` counts rounds by this rule."""
    assert "self._step += 1" in inspect.getsource(GRPOTrainer.training_step)
    prepare = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in prepare
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in prepare


def test_micro_batches_are_read_from_a_buffer():
    """There they are regrouped by length."""
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]" in source
    assert "split_tensor_dict(generation_batch, self.args.steps_per_generation)" in source
    assert parameters(GRPOTrainer._prepare_inputs) == ["generation_batch"]


def test_which_terms_of_the_loss_depend_on_the_micro_batch():
    """A mean over a micro-batch depends on its other samples. Check new losses."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    named = {
        name
        for listed in re.findall(r"self\.loss_type (?:==|in|!=) (.*?):", source)
        for name in re.findall('"(.*?)"', listed)
    }
    assert {*named, "gspo"} == set(LOSS_TYPES)
    assert source.count("mask.sum().clamp(min=1.0)") == 2  # of bnpo, and of the entropy bonus
    by_tokens = ", ".join(f'"{name}"' for name in BY_TOKENS)
    assert f"elif self.loss_type in [{by_tokens}]:\n            # `num_items_in_batch` spans" in source
    for switch in ("self._entropy_bonus_enabled", "self.top_entropy_quantile < 1.0", "self.aux_loss_enabled"):
        assert f"if {switch}:" in source


def test_reward_functions_are_called_with_these_arguments():
    """Dynamic sampling calls them itself, group by group, and hands their rewards over by other reward functions."""
    rewards = inspect.getsource(GRPOTrainer._calculate_rewards)
    for argument in (
        'key not in ["prompt", "completion", "completion_ids"]', 'reward_kwargs["trainer_state"] = self.state',
        'reward_kwargs["log_extra"]', 'reward_kwargs["log_metric"]', "completion_ids=completion_ids_list",
        "zip(self.reward_funcs, self.reward_processing_classes, self.reward_func_names, strict=True)",
    ):  # fmt: skip
        assert argument in rewards
    assert "self._pending_extra_logs[column].extend" in inspect.getsource(GRPOTrainer._log_completion_extra)
    assert "self._pending_metrics[name].append" in inspect.getsource(GRPOTrainer._log_metric)
    assert "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)" in SCORE


def test_completions_are_decoded_like_this():
    """`decode_completions` repeats it for the groups of dynamic sampling."""
    for line in (
        'if is_conversational({"prompt": prompts[0]}):',
        "[parse_response(self._tokenizer, ids, prefix=prompt_ids[i], tools=per_prompt_tools[i])]",
        "contents = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)",
        'completions = [[{"role": "assistant", "content": content}] for content in contents]',
    ):
        assert line in GENERATE


def test_log_probabilities_come_from_one_method():
    """It reads the completion columns only; padding after the last token is masked in the loss."""
    method = GRPOTrainer._get_per_token_logps_and_entropies
    assert parameters(method)[:5] == ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
    source = inspect.getsource(method)
    assert "labels[:, :-logits_to_keep] = -100" in source and "[:, -logits_to_keep:]" in source
    assert SCORE.count("self._get_per_token_logps_and_entropies(") == 3
    assert "self._get_per_token_logps_and_entropies(" in inspect.getsource(GRPOTrainer._compute_loss)
    assert 'completion_mask, padding_value=0, padding_side="right"' in SCORE


def test_the_training_forward_pass_can_correct_its_micro_batch():
    """The ratio is read from the micro-batch after the only pass that computes entropies."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "compute_entropy=True" not in SCORE
    reads = [source.index(f'inputs{read}"importance_sampling_ratio"') for read in ("[", ".get(")]
    assert source.index("compute_entropy=True") < min(reads)
    assert "per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps" in source
    assert "if self.args.gradient_accumulation_steps % generate_every != 0 or (" in SCORE


def test_the_completions_table_takes_more_columns():
    """One value per completion of this process, gathered in the order of the prompts, in evaluation as well."""
    assert SCORE.index('self._logs["prompt"].extend(gather_object(prompts))') < SCORE.index("_pending_extra_logs")
    assert "values = self._pending_extra_logs.get(column, [None] * len(prompts))" in SCORE
    assert 'self._logs["extra"][column].extend(gather_object(values))' in SCORE
    assert '**self._logs["extra"]' in inspect.getsource(GRPOTrainer.log)


def test_recorded_log_probabilities_and_masks_reach_the_correction():
    """Its results are in the batch."""
    assert "sampling_per_token_logps_list," in SCORE
    assert "self.use_vllm and self.vllm_importance_sampling_correction" in SCORE
    assert 'extra_fields.pop("env_mask", None)' in GENERATE and "completion_mask * tool_mask" in SCORE
    for key in ("importance_sampling_ratio", "old_per_token_logps", "sampling_per_token_logps", "tool_mask"):
        assert f'output["{key}"]' in SCORE


def test_the_options_of_gspo():
    options = GRPOConfig.__dataclass_fields__
    assert options["epsilon"].default == 0.2 and options["epsilon_high"].default is None
    for line in (
        "self.loss_type = args.loss_type",
        "self.importance_sampling_level = args.importance_sampling_level",
        "self.epsilon_low = args.epsilon",
    ):
        assert line in CONSTRUCTOR


def test_vllm_is_attached_at_the_end_of_the_constructor():
    """It is constructed with vLLM off; these are the attributes that the branch with vLLM would have set."""
    branch = CONSTRUCTOR[CONSTRUCTOR.index("if self.use_vllm:\n            # Initialize vLLM") :]
    branch = branch[: branch.index("\n        else:")]
    set_there = set(re.findall(r"^            self\.(\w+) = ", branch, flags=re.MULTILINE))
    assert set_there == {"vllm_generation", "_last_loaded_step"}
    assert CONSTRUCTOR.count("model.config.image_token_id") == 1  # an image processor asks for it without vLLM


def test_the_options_of_a_server_that_the_trainer_starts():
    """Its address counts as given unless it is this default, and a model by name is loaded in float32."""
    defaults = {
        "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
        "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1, "vllm_max_model_length": None,
        "vllm_model_impl": "vllm",
    }  # fmt: skip
    assert {name: getattr(GRPOConfig, name) for name in defaults} == defaults
    assert 'kwargs.get("dtype", "float32")' in inspect.getsource(utils.create_model_from_path)


def test_tokenization_and_sampler():
    assert parameters(GRPOTrainer._tokenize_prompts) == ["prompts"]
    assert "return prompt_ids, images, multimodal_fields" in inspect.getsource(GRPOTrainer._tokenize_prompts)
    assert parameters(GRPOTrainer._get_train_sampler) == ["dataset"]
    sampler = inspect.getsource(GRPOTrainer._get_train_sampler)
    for argument in (
        "mini_repeat_count=self.num_generations",
        "batch_size=self.args.generation_batch_size // self.num_generations",
        "repeat_count=self.num_iterations * self.args.steps_per_generation",
    ):
        assert argument in sampler
    assert parameters(utils.repeat_iterable_dataset) == ["dataset", "mini_repeat_count", "batch_size", "repeat_count"]


def test_images_of_prompts():
    """`engine.images` reads rows as TRL does, and a batch has its images where `_generate` returns them."""
    returned = ["prompt_ids", "completion_ids", "tool_mask", "completions", "logprobs", "extra_fields", "images"]
    assert f"return {', '.join(returned)}, tool_images" in GENERATE
    assert parameters(GRPOTrainer._generate) == ["prompts"] and SCORE.count("self._generate(prompts)") == 1
    for line in (
        'if "images" in inputs[0]:',
        '[[example.get("image")] if example.get("image") is not None else None for example in inputs]',
        "prepare_multimodal_messages(prompt, images=image_list)",
        "images = dataset_images",
    ):
        assert SCORE.count(line) == 1
    extraction = inspect.getsource(GRPOTrainer._tokenize_prompts)
    assert 'if part["type"] == "image":' in extraction and 'prompt_images.append(part["image"])' in extraction
    assert "self._is_vlm = True" in CONSTRUCTOR
    assert parameters(VLLMGeneration._place_features) == ["features", "prompt_ids"]
    assert "self.processing_class.image_token_id" in inspect.getsource(VLLMGeneration._place_features)
    features = inspect.getsource(VLLMClient.image_features)
    assert '"messages": to_openai_messages(messages), "max_tokens": 1}' in features


def test_images_of_tools():
    """`bridge.hand_over` collects them as TRL's loop does, which processes them only if the trainer has tools."""
    loop = inspect.getsource(GRPOTrainer._tool_call_loop)
    assert loop.count('tool_images[idx_with_tool].append(part["image"])') == 1
    assert loop.count("if self._is_vlm and self.tools and any(imgs for imgs in tool_images):") == 1
    assert loop.count("self.tools") == 2 and "per_prompt_tools = [self.tools] * len(idxs_with_tool)" in loop
    assert "images = [(existing or []) + new for existing, new in zip(images, tool_images, strict=True)]" in GENERATE
    assert SCORE.count("if self.tools and any(imgs for imgs in tool_images) and self._is_vlm:") == 2


def test_the_interface_of_vllm_generation():
    """ServerGeneration overrides three of these and calls the others."""
    assert parameters(VLLMGeneration._init_vllm) == [] == parameters(VLLMGeneration.sync_weights)
    assert parameters(VLLMGeneration._iter_named_params) == []
    assert "self._init_vllm()" in inspect.getsource(VLLMGeneration.__init__)
    wanted = {
        "model", "accelerator", "processing_class", "mode", "server_base_url", "server_host", "server_port",
        "server_timeout", "group_port", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
        "max_completion_length", "logprobs", "generation_kwargs",
    }  # fmt: skip
    assert wanted <= set(parameters(VLLMGeneration.__init__))
    overridden = {
        name
        for name in vars(ServerGeneration)
        if name in vars(VLLMGeneration) and callable(getattr(VLLMGeneration, name))
    }
    assert overridden - {"__init__", "__doc__", "__module__"} == {"_init_vllm", "sync_weights"}

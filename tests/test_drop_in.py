"""What users bring along to `GRPOTrainer`: subclasses, processors, models, model cards. No server is needed for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import ProcessorMixin, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

from tests.serverless import ServerlessTrainer
from tests.tiny import build_model, build_tokenizer
from trl_april import trainer as trainer_module
from trl_april.config import APRILGRPOConfig
from trl_april.errors import ConfigError
from trl_april.padding import width_matters
from trl_april.trainer import APRILGRPOTrainer


pytestmark = pytest.mark.usefixtures("one_thread")

DATASET = Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(16)])


def make_trainer(folder: Path, trainer_class: type[APRILGRPOTrainer] = ServerlessTrainer, **changes):
    arguments = {"model": build_model(), "processing_class": build_tokenizer(), **changes.pop("arguments", {})}
    options = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 40, "max_steps": 2,
        "report_to": [], "save_strategy": "no", "bf16": False, "use_cpu": True, "disable_tqdm": True, **changes,
    }  # fmt: skip
    return trainer_class(
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=APRILGRPOConfig(str(folder), **options),
        **{"train_dataset": DATASET, **arguments},
    )


# Subclasses


@pytest.mark.parametrize("in_place", [False, True])
def test_prompts_that_a_subclass_changes_are_refused(tmp_path, in_place):
    """The pool has the rows of the dataset, and would train the prompts as they are there."""

    class Brief(ServerlessTrainer):
        def _generate_and_score_completions(self, inputs):
            rows = inputs if in_place else [dict(row) for row in inputs]
            for row in rows:
                row["prompt"] = f"Be brief. {row['prompt']}"
            return super()._generate_and_score_completions(rows)

    with pytest.raises(
        ConfigError, match=r"Brief changes the prompts or the columns of a generation batch.*train_dataset\.map"
    ):
        make_trainer(tmp_path, Brief).train()


def test_a_subclass_that_generates_by_itself_is_told_so_once(tmp_path, caplog):
    class Own(ServerlessTrainer):
        def _generate_and_score_completions(self, inputs):
            return {"completion_mask": torch.ones(len(inputs), 3), "advantages": torch.zeros(len(inputs))}

    trainer = make_trainer(tmp_path, Own)
    trainer.model.train()
    rows = [{"prompt": "a"}] * 8
    for step in range(3):
        trainer._step = step
        trainer._prepare_inputs(rows)
    assert caplog.text.count("Own generates training batches by itself") == 1


def test_prompts_that_are_changed_in_their_place_are_refused_too(tmp_path):
    """The natural way with conversations: the message is the one that the pool has not seen changed."""

    class Brief(ServerlessTrainer):
        def _generate_and_score_completions(self, inputs):
            for row in inputs:
                row["prompt"][-1]["content"] += " Be brief."
            return super()._generate_and_score_completions(inputs)

    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}="}]} for n in range(16)])
    with pytest.raises(ConfigError, match="Brief changes the prompts"):
        make_trainer(tmp_path, Brief, arguments={"train_dataset": chats}).train()


def test_columns_that_a_subclass_adds_are_refused(tmp_path):
    """They would be those of other rows than the ones that are trained."""

    class Weighted(ServerlessTrainer):
        def _generate_and_score_completions(self, inputs):
            return super()._generate_and_score_completions([{**row, "weight": 1.0} for row in inputs])

    with pytest.raises(ConfigError, match="Weighted changes the prompts or the columns"):
        make_trainer(tmp_path, Weighted).train()


def test_a_batch_that_is_asked_for_twice_is_refused(tmp_path):
    class Stubborn(ServerlessTrainer):
        def _run_round(self):
            raise ZeroDivisionError

        def _generate_and_score_completions(self, inputs):
            with pytest.raises(ZeroDivisionError):
                super()._generate_and_score_completions(inputs)
            return super()._generate_and_score_completions(inputs)

    with pytest.raises(ConfigError, match="Stubborn asks twice for one generation batch.*dynamic_sampling"):
        make_trainer(tmp_path, Stubborn).train()


# Where APRIL is off


def rollout(prompts, trainer):
    raise NotImplementedError


def test_that_april_is_off_is_said_before_anything_can_fail(tmp_path, caplog):
    """Stock GRPO needs a server, too, and of another kind; if there is none, its error alone would puzzle."""
    with pytest.raises(Exception, match="vllm|vLLM|connect"):
        make_trainer(
            tmp_path, APRILGRPOTrainer, arguments={"rollout_func": rollout}, vllm_server_timeout=0.1,
            vllm_server_base_url="http://127.0.0.1:9", weight_sync="filesystem", max_staleness=3,
        )  # fmt: skip
    assert "APRIL is off: rollout_func is given" in caplog.text
    assert "have no effect: max_staleness, weight_sync." in caplog.text
    assert "a vLLM server with GPUs of its own and without an API key" in caplog.text


def test_a_subclass_keeps_its_own_name_on_the_model_card(tmp_path):
    class Named(APRILGRPOTrainer):
        _name = "Mine"

    trainer = make_trainer(tmp_path, Named, use_vllm=False)
    assert (trainer._name, trainer._paper, trainer._tag_names) == ("Mine", GRPOTrainer._paper, GRPOTrainer._tag_names)


# Processors and models


class Beside(ProcessorMixin):
    """Of a checkpoint that has images, beside its model of text alone."""

    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template


def test_a_model_of_text_beside_a_processor_of_images(tmp_path):
    model = build_model()
    trainer = make_trainer(tmp_path, arguments={"model": model, "processing_class": Beside(build_tokenizer())})
    assert trainer.april_enabled
    assert not hasattr(model.config, "image_token_id"), "it is as it was"


def test_the_same_with_a_model_by_its_name(tmp_path):
    build_model().save_pretrained(tmp_path / "model")
    arguments = {"model": str(tmp_path / "model"), "processing_class": Beside(build_tokenizer())}
    trainer = make_trainer(tmp_path, arguments=arguments)
    assert trainer.april_enabled and not hasattr(trainer.model.config, "image_token_id")


def test_packed_weights_are_refused(tmp_path):
    """A server could not load what a sync would send."""
    model = build_model()
    model.is_loaded_in_4bit = True
    with pytest.raises(ConfigError, match="loaded in 4 bit, and a vLLM server cannot take packed weights"):
        make_trainer(tmp_path, arguments={"model": model})


def rope(kind: str, **more: float) -> dict:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


@pytest.mark.parametrize(
    ("parameters", "matters"),
    [
        (rope("default"), False), (rope("linear", factor=2.0), False), (rope("dynamic", factor=4.0), True),
        ({"rope_theta": 10000.0, "type": "longrope"}, True),
        ({"full_attention": rope("dynamic", factor=4.0), "sliding_attention": rope("default")}, True),
        ({"full_attention": rope("linear", factor=4.0), "sliding_attention": rope("default")}, False),
    ],
)  # fmt: skip
def test_models_whose_frequencies_depend_on_the_width_are_known(parameters, matters):
    config = Qwen3Config()
    config.rope_parameters = parameters
    assert width_matters(config) is matters


def test_a_model_that_depends_on_the_width_is_scored_in_the_whole(tmp_path, monkeypatch):
    """Dynamic NTK: behind `max_position_embeddings` every frequency is another one, also of short completions."""
    config = build_model().config
    config.max_position_embeddings, config.rope_parameters = 16, rope("dynamic", factor=4.0)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    trainer = make_trainer(tmp_path, arguments={"model": model}, pad_to_multiple_of=1)
    prompt, lengths = 4, (5, 40)
    ids = torch.randint(4, 60, (2, prompt + 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, prompt + lengths[0] :] = 0

    def scored(trainer_class: type) -> torch.Tensor:
        with torch.no_grad():
            found = trainer_class._get_per_token_logps_and_entropies(trainer, model, ids, mask, 40, batch_size=1)
        return found[0] * mask[:, prompt:]

    assert torch.equal(scored(APRILGRPOTrainer), scored(GRPOTrainer))
    monkeypatch.setattr(trainer_module, "width_matters", lambda config: False)
    assert not torch.allclose(scored(APRILGRPOTrainer)[0], scored(GRPOTrainer)[0], atol=1e-4), "it would matter"


# Datasets


@pytest.mark.parametrize("dataset", [DatasetDict({"train": DATASET}), DATASET.to_list()], ids=["splits", "list"])
def test_what_is_no_dataset_is_refused_in_trls_words(tmp_path, dataset):
    with pytest.raises(TypeError, match="`train_dataset` must be a `Dataset` or `IterableDataset`"):
        make_trainer(tmp_path, arguments={"train_dataset": dataset})


# Model cards


@pytest.mark.parametrize("april", [True, False])
def test_the_model_card_says_what_the_model_was_trained_with(tmp_path, april):
    trainer = make_trainer(tmp_path, ServerlessTrainer if april else APRILGRPOTrainer, use_vllm=april)
    assert trainer.april_enabled is april
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    said = {name: bool(re.search(name, card)) for name in (r"trained with APRIL", r"- april\b", "zhou2025april")}
    assert set(said.values()) == {april}, said
    assert ("shao2024deepseekmath" in card) is not april
    assert ("april" in trainer.model.model_tags) is april

"""Subclasses, processors, models and model cards that work with `GRPOTrainer`. No server is needed."""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import Gemma2Config, Gemma2ForCausalLM, ProcessorMixin, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

from tests.support.serverless import ServerlessTrainer
from tests.support.tiny import build_model, build_tokenizer
from trl_april.bridge import training_pass
from trl_april.config import APRILGRPOConfig
from trl_april.errors import ConfigError
from trl_april.trainer import APRILGRPOTrainer
from trl_april.weights.canary import depends_on_width


pytestmark = pytest.mark.usefixtures("one_thread")

DATASET = Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(16)])


def make_trainer(folder: Path, trainer_class: type[APRILGRPOTrainer] = ServerlessTrainer, **changes):
    arguments = {"model": build_model(), "processing_class": build_tokenizer(), **changes.pop("arguments", {})}
    options = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 40, "max_steps": 2,
        "report_to": [], "save_strategy": "no", "bf16": False, "use_cpu": True, "disable_tqdm": True,
        "gradient_checkpointing": False, **changes,
    }  # fmt: skip
    return trainer_class(
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=APRILGRPOConfig(str(folder), **options),
        **{"train_dataset": DATASET, **arguments},
    )


# Subclasses


class Brief(ServerlessTrainer):
    """The pool trains rows of the dataset, and not those that TRL asks for."""

    def _generate_and_score_completions(self, inputs):
        for row in inputs:
            row["prompt"][-1]["content"] += " Be brief."
        return super()._generate_and_score_completions(inputs)


class Stubborn(ServerlessTrainer):
    def _april_run_round(self):
        raise ZeroDivisionError

    def _generate_and_score_completions(self, inputs):
        with pytest.raises(ZeroDivisionError):
            super()._generate_and_score_completions(inputs)
        return super()._generate_and_score_completions(inputs)


@pytest.mark.parametrize(
    ("trainer_class", "words"),
    [(Brief, r"Brief changes the prompts .*train_dataset\.map"), (Stubborn, "Stubborn asks twice .*dynamic_sampling")],
)
def test_other_rows_than_trl_asks_for_are_refused_and_a_second_request(tmp_path, trainer_class, words):
    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}="}]} for n in range(16)])
    with pytest.raises(ConfigError, match=words):
        make_trainer(tmp_path, trainer_class, arguments={"train_dataset": chats}).train()


def test_a_subclass_that_generates_itself_is_warned_once(tmp_path, caplog):
    class Own(ServerlessTrainer):
        def _generate_and_score_completions(self, inputs):
            ones = torch.ones(len(inputs), 3)
            return {"prompt_ids": ones, "completion_mask": ones, "advantages": torch.zeros(len(inputs))}

    trainer = make_trainer(tmp_path, Own)
    trainer.model.train()
    rows = [{"prompt": "a"}] * 8
    for step in range(3):
        trainer._step = step
        trainer._prepare_inputs(rows)
    assert caplog.text.count("Own generates training batches itself") == 1


# Where APRIL is off


def test_april_off_is_logged_before_anything_can_fail(tmp_path, caplog):
    """Stock GRPO needs another kind of server; its error alone would be puzzling."""
    with pytest.raises(Exception, match="vllm|vLLM|connect"):
        make_trainer(
            tmp_path, APRILGRPOTrainer, arguments={"rollout_func": print}, vllm_server_timeout=0.1,
            vllm_server_base_url="http://127.0.0.1:9", weight_sync="filesystem", max_staleness=3,
        )  # fmt: skip
    assert "APRIL is off: rollout_func is given" in caplog.text
    assert "have no effect: max_staleness, weight_sync." in caplog.text
    assert "a vLLM server with its own GPUs and without an API key" in caplog.text


# Processors and models


class Beside(ProcessorMixin):
    """An image processor beside a text-only model."""

    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template


def test_a_loaded_text_model_may_have_an_image_processor(tmp_path):
    model, processor = build_model(), Beside(build_tokenizer())
    assert make_trainer(tmp_path, arguments={"model": model, "processing_class": processor}).april_enabled
    assert not hasattr(model.config, "image_token_id"), "the config is restored"
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="takes text only, but its processor takes images. Pass the loaded model"):
        make_trainer(tmp_path, arguments={"model": str(tmp_path / "model"), "processing_class": processor})


def rope(kind: str, **more: float) -> dict:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


@pytest.mark.parametrize(
    ("parameters", "matters"),
    [
        (rope("default"), False), (rope("linear", factor=2.0), False), (rope("dynamic", factor=4.0), True),
        ({"rope_theta": 10000.0, "type": "longrope"}, True),
        ({"full_attention": rope("dynamic", factor=4.0), "sliding_attention": rope("default")}, True),
    ],
)  # fmt: skip
def test_models_with_width_dependent_frequencies_are_known(parameters, matters):
    config = Qwen3Config()
    config.rope_parameters = parameters
    assert depends_on_width(config) is matters


def test_a_width_dependent_model_keeps_its_padding(tmp_path, monkeypatch):
    """Dynamic NTK: beyond `max_position_embeddings` all frequencies change, also those of short completions."""
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
    monkeypatch.setattr(training_pass, "depends_on_width", lambda config: False)
    assert not torch.allclose(scored(APRILGRPOTrainer)[0], scored(GRPOTrainer)[0], atol=1e-4), "it would matter"


# Models that compute something else than the server


@pytest.mark.parametrize("named", [None, "sdpa"])
def test_a_loaded_model_computes_what_the_server_does(tmp_path, caplog, named):
    """Gemma 2 caps its attention logits, which transformers' default attention leaves out."""
    build_tokenizer().save_pretrained(tmp_path / "model")
    config = Gemma2Config(
        vocab_size=80, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, attention_dropout=0.5,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "model")
    loading = named and {"attn_implementation": named}
    arguments = {"model": str(tmp_path / "model")}
    trainer = make_trainer(tmp_path, arguments=arguments, model_init_kwargs=loading, beta=0.1, disable_dropout=True)
    for model in (trainer.model, trainer.ref_model):
        assert model.config._attn_implementation == (named or "eager")
    assert trainer.args.model_init_kwargs == loading
    assert ("leaves out the model's attn_logit_softcapping" in caplog.text) == (named is not None)
    assert trainer.model.model.layers[0].self_attn.attention_dropout == 0.0


# Model cards


class Named(APRILGRPOTrainer):
    _name = "Mine"


@pytest.mark.parametrize("april", [True, False])
def test_the_model_card_names_the_method(tmp_path, april):
    """A subclass keeps its own name."""
    trainer = make_trainer(tmp_path, ServerlessTrainer if april else Named, use_vllm=april)
    assert trainer.april_enabled is april and (april or trainer._name == "Mine")
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    said = {name: bool(re.search(name, card)) for name in (r"trained with APRIL", r"- april\b", "zhou2025april")}
    assert set(said.values()) == {april}, said
    assert "shao2024deepseekmath" in card
    assert ("april" in trainer.model.model_tags) is april

"""Weight syncs to the real server."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import requests
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from tests.support.synced_trainer import SyncedTrainer
from tests.support.tiny import build_tokenizer
from trl_april import LocalServer
from trl_april.errors import WeightSyncError
from trl_april.server import check as server_check
from trl_april.weights.canary import DECODED, decoded_logprobs, distance, server_logprobs, trainer_logprobs


pytestmark = pytest.mark.server


@pytest.fixture
def trainer(tiny_model_dir, one_thread) -> SyncedTrainer:
    return SyncedTrainer(tiny_model_dir)


def test_after_a_sync_the_server_samples_from_the_trainers_weights(server, trainer, tmp_path, monkeypatch):
    """Tied weights, in many files, sync after sync; requests stop when the files are complete."""
    monkeypatch.setattr("trl_april.weights.files.HEADER_BYTES", 1000)
    of_others = len(server.log_path.read_text())
    generation = trainer.connect(server, weight_sync_dir=str(tmp_path))
    assert generation.weight_sync == "filesystem"
    generation.sync_weights()
    before_load = []

    def quiesce():
        (folder,) = tmp_path.iterdir()
        written = {name: tensor for file in folder.iterdir() for name, tensor in load_file(file).items()}
        assert all(torch.equal(written[name], param) for name, param in trainer.model.named_parameters())
        before_load.append(trainer.distance(generation))

    generation.before_sync = quiesce
    for version in (41, 42):
        trainer.change(0.3)
        trainer.step = version
        generation.sync_weights()
        assert before_load.pop() > 0.1, "the server has its old weights until it loads the files"
        assert trainer.distance(generation) < 1e-4
        reported = requests.get(f"{server.base_url}/weight_info", timeout=10).json()
        assert reported == {"weight_version": str(version)} and generation.servers.holds_weights()
    assert list(tmp_path.iterdir()) == [] and generation.sync_seconds > 0
    log = server.log_path.read_text()
    assert "Reloading weights" in log and "duplicate keys" not in log
    assert "Failed to load weights" not in log[of_others:]


@pytest.fixture
def mixed_precision() -> Iterator[Accelerator]:
    AcceleratorState._reset_state()
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state()


def test_the_check_looks_at_weights_and_not_at_the_trainers_precision(server, trainer, mixed_precision):
    """With large weights, mixed precision changes log-probabilities by more than a nat."""
    generation = trainer.connect(server, accelerator=mixed_precision)
    trainer.model = mixed_precision.prepare(trainer.model)
    for scale in (3.0, 1e-3, 3.0):
        trainer.change(scale)
        generation.sync_weights()
        assert generation.servers.first.canary.exact
    token_ids = torch.tensor([generation.servers.first.canary.token_ids])
    with torch.no_grad():
        logprobs = trainer.model(input_ids=token_ids).logits[0, :-1].log_softmax(-1)
    rounded = logprobs.gather(-1, token_ids[0, 1:, None]).squeeze(-1).tolist()
    exact = trainer_logprobs(trainer.model, generation.servers.first.canary.token_ids, torch.device("cpu"))
    assert distance(rounded, exact) > 1.0
    generation._transport = NoTransport()
    trainer.change(1e-4)
    with pytest.raises(WeightSyncError, match="has kept its old weights"):
        generation.sync_weights()


def test_the_server_decodes_with_the_weights_that_it_has_for_prompts(server, trainer):
    """To the rounding of float32, whatever tokens it samples."""
    generation = trainer.connect(server)
    for _ in range(3):
        trainer.change(0.3)
        generation.sync_weights()
        prompt = generation.servers.first.canary.token_ids[:DECODED]
        token_ids, decoded = decoded_logprobs(generation.server, generation.server_info.model, prompt)
        prefilled = server_logprobs(generation.server, generation.server_info.model, prompt + token_ids)
        assert decoded == pytest.approx(prefilled[-DECODED:], abs=2e-5)


class NoTransport:
    """Claims to have sent the weights."""

    @contextmanager
    def stage(self, parameters, *, sends, dtypes):
        yield lambda servers, each: None


@pytest.mark.parametrize("scale", [0.3, 1e-4])
def test_training_stops_if_the_server_keeps_its_old_weights(server, trainer, scale):
    """Even if the weights moved so little that both sides agree within the tolerance."""
    generation = trainer.connect(server)
    generation.sync_weights()
    trainer.change(1e-4)
    generation.sync_weights()  # a small step that arrives passes
    generation._transport = NoTransport()
    trainer.change(scale)
    with pytest.raises(WeightSyncError, match="does not hold|has kept its old weights"):
        generation.sync_weights()


@pytest.mark.long
def test_the_server_loads_experts_by_their_names_in_a_checkpoint(tmp_path, one_thread, monkeypatch):
    """Under the names that the model has in memory, the server would crash.

    vLLM's CPU build does not pack expert weights again when it reloads them, so their output is zero here.
    """
    monkeypatch.setattr(server_check, "check_experts", lambda *args: None)
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, max_position_embeddings=256,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_local_experts=4,
        num_experts_per_tok=2, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip

    def remove_expert_output(model):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("experts.down_proj"):
                    parameter.zero_()

    model = MixtralForCausalLM(config)
    remove_expert_output(model)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    trainer = SyncedTrainer(str(tmp_path))
    arguments = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    with LocalServer(tmp_path, vllm_args=arguments, quiet=True) as server:
        generation = trainer.connect(server)
        trainer.change(0.1)
        remove_expert_output(trainer.model)
        generation.sync_weights()
        assert trainer.distance(generation) < 1e-4

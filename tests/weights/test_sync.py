"""Weight syncs to the real server."""

from contextlib import contextmanager

import pytest
import requests
import torch
from safetensors.torch import load_file

from tests.support.synced_trainer import SyncedTrainer, sync_in_steps
from trl_april.errors import WeightSyncError
from trl_april.weights.canary import DECODED, decoded_logprobs, server_logprobs


pytestmark = pytest.mark.server


@pytest.fixture
def trainer(tiny_model_dir, one_thread) -> SyncedTrainer:
    return SyncedTrainer(tiny_model_dir)


def test_after_a_sync_the_server_samples_from_the_trainers_weights(server, trainer, tmp_path, monkeypatch):
    """Tied weights, in many files, sync after sync; requests stop when the files are complete."""
    monkeypatch.setattr("trl_april.weights.files.SHARD_BYTES", 1000)
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

    for version in (41, 42):
        trainer.change(0.3)
        trainer.step = version
        sync_in_steps(generation, quiesce)
        assert before_load.pop() > 0.1, "the server has its old weights until it loads the files"
        assert trainer.distance(generation) < 1e-4
        reported = requests.get(f"{server.base_url}/weight_info", timeout=10).json()
        assert reported == {"weight_version": str(version)} and generation.servers.holds_weights()
    assert list(tmp_path.iterdir()) == [] and generation.sync_seconds > 0
    log = server.log_path.read_text()
    assert "Reloading weights" in log and "duplicate keys" not in log
    assert "Failed to load weights" not in log[of_others:]


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

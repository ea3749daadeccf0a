"""Syncs of adapters over HTTP: names, files, the choice against merged weights, and servers that lose an adapter."""

import asyncio
import gc
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file

from tests.support.synced_trainer import SyncedTrainer, sync_in_steps
from tests.support.tiny import build_model
from tests.support.tiny_vision import build_processor, build_vision_model
from tests.support.weight_folders import weight_folders
from tests.weights.test_sync_outages import MortalVLLM, paths
from trl_april.engine.protocol import GenerationRequest
from trl_april.engine.sampling import SamplingOptions
from trl_april.engine.vllm import VLLMEngine
from trl_april.errors import ConfigError, ServerError
from trl_april.weights import adapters
from trl_april.weights.adapters import PREFIX, AdapterTransport, why_merged, why_not_served


pytestmark = pytest.mark.usefixtures("one_thread")


class AdapterTrainer(SyncedTrainer):
    """Changes the adapter only."""

    def __init__(self, model_dir: str, **options) -> None:
        super().__init__(model_dir)
        self.model = get_peft_model(self.model, LoraConfig(**{"r": 4, "target_modules": "all-linear", **options}))

    def change(self, scale: float = 0.1) -> None:
        torch.manual_seed(self.step)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter += scale * torch.randn(parameter.shape)
        self.step += 1

    def sync(self, generation) -> None:
        self.change()
        generation.sync_weights()


@pytest.fixture
def trainer(tiny_model_dir: str) -> AdapterTrainer:
    return AdapterTrainer(tiny_model_dir)


@pytest.fixture
def fakes(trainer: AdapterTrainer, tiny_model_dir: str) -> Iterator[list[MortalVLLM]]:
    options = {"model_path": tiny_model_dir, "max_loras": 2}
    with MortalVLLM(trainer.model, **options) as first, MortalVLLM(trainer.model, **options) as second:
        yield [first, second]


@pytest.fixture
def fake(fakes) -> MortalVLLM:
    return fakes[0]


def folders(fake: MortalVLLM) -> list[str]:
    """The folder of each sync."""
    loads = [request.body for request in fake.received_at("/v1/load_lora_adapter") if request.method == "POST"]
    return [body["lora_path"] for body in loads if not body["lora_name"].endswith("-check")]


def test_a_sync_sends_the_adapter_and_nothing_else(trainer, fake, tmp_path):
    """As PEFT saves it. The server is not paused, its cache not reset, and the canary asks for the adapter."""
    generation = trainer.connect(fake, weight_sync_dir=str(tmp_path), server_timeout=10.0)
    assert generation.weight_sync == "adapter" and fake.adapters == {}, "connecting loads one for a check"
    fake.received.clear()
    trainer.sync(generation)
    assert paths(fake) == [
        "health", "v1/load_lora_adapter", "update_weight_version", "weight_info", "v1/completions",
    ]  # fmt: skip
    ((name, folder),) = fake.adapters.items()
    assert name.startswith(PREFIX) and fake.received[-1].body["model"] == fake.weight_version == name
    trainer.model.save_pretrained(tmp_path / "by_peft")
    expected = load_file(tmp_path / "by_peft" / "adapter_model.safetensors")
    written = load_file(Path(folder, "adapter_model.safetensors"))
    assert written.keys() == expected.keys() and all(torch.equal(written[key], expected[key]) for key in written)
    assert json.loads(Path(folder, "adapter_config.json").read_text())["r"] == 4
    assert generation.sync_mismatch < 1e-5


def test_adapters_stay_as_long_as_a_request_may_use_them(trainer, fake):
    """A server with room for two has the last two, and their files. Nothing is left at the end."""
    before = weight_folders()
    generation = trainer.connect(fake, server_timeout=10.0)
    oldest = []
    names = []
    for _ in range(4):
        trainer.change()
        sync_in_steps(generation, lambda: oldest.append(generation.oldest_kept))
        names.append(generation.adapter_of(trainer.step))
        assert list(fake.adapters) == names[-2:]
        assert [Path(folder).is_dir() for folder in folders(fake)[-3:]] == [False, True, True][-len(names) :]
    assert oldest == [1, 1, 2, 3] and len(set(names)) == 4
    generation = None
    gc.collect()
    assert weight_folders() - before == set()


def test_all_adapters_of_a_server_have_room_where_their_files_are(trainer, fake, tmp_path, monkeypatch):
    """A container has 64 MiB of shared memory by default."""
    sizes = []
    monkeypatch.setattr(adapters, "place_for", lambda size: sizes.append(size) or str(tmp_path))
    generation = trainer.connect(fake, server_timeout=10.0)
    trainer.sync(generation)
    (folder,) = folders(fake)
    weights = load_file(Path(folder, "adapter_model.safetensors")).values()
    assert sizes == [3 * sum(weight.nbytes for weight in weights)] and Path(folder).parent == tmp_path


def test_every_server_gets_the_adapter_and_the_smallest_decides_how_many_stay(trainer, fakes):
    fakes[1].more_config = {"lora_config": {"max_loras": 1}}
    address = SimpleNamespace(base_url=",".join(fake.base_url for fake in fakes))
    generation = trainer.connect(address, server_timeout=10.0)
    for _ in range(2):
        trainer.sync(generation)
        assert [list(fake.adapters) for fake in fakes] == [[generation.adapter_of(trainer.step)]] * 2
    assert generation.servers.holding == {fake.base_url for fake in fakes}
    generation.servers.give_up()


def test_in_a_sync_requests_ask_for_an_adapter_that_the_server_has(trainer, fake, monkeypatch):
    """Tools end at any moment of it, and writing a large adapter takes a while."""
    generation = trainer.connect(fake, server_timeout=10.0)
    trainer.sync(generation)
    held = []

    def ask() -> None:
        async def main() -> None:
            engine = VLLMEngine(fake.base_url, "tiny", SamplingOptions({}), adapter=generation.adapter_of)
            version = trainer.step - 1  # until the sync is complete
            async for _ in engine.generate(GenerationRequest("r", [5, 6, 7], 0, 50, "salt", version=version)):
                pass
            held.append(await engine.holds(version))
            await engine.close()

        asyncio.run(main())

    write = adapters.write_adapter
    monkeypatch.setattr(adapters, "write_adapter", lambda *args: (ask(), write(*args)))
    trainer.change()
    sync_in_steps(generation, ask)
    assert held == [True, True]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/update_weight_version"])
def test_an_adapter_of_a_failed_sync_is_not_counted_and_leaves_nothing(trainer, fake, tmp_path, path):
    """Though the server may have it. Its folder would fill the shared memory."""
    generation = trainer.connect(fake, weight_sync_dir=str(tmp_path), server_timeout=10.0)
    oldest = []
    for fake.loses in (None, path, None):
        trainer.change()
        with nullcontext() if fake.loses is None else pytest.raises(ServerError):
            sync_in_steps(generation, lambda: oldest.append(generation.oldest_kept))
        if trainer.step == 2:
            with pytest.raises(KeyError):
                generation.adapter_of(2)
            assert len(fake.adapters) == 2 and len(list(tmp_path.iterdir())) == 1
    assert oldest == [1, 1, 1]
    assert list(fake.adapters) == [generation.adapter_of(1), generation.adapter_of(3)]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_server_with_other_weights_than_its_own_is_refused(trainer, fake):
    """Those of a run that merged: the adapter would be added to them."""
    fake.weight_version = "7"
    with pytest.raises(ConfigError, match="has the merged weights of another run .version '7'.*Restart it"):
        trainer.connect(fake, weight_sync="adapter")
    assert trainer.connect(fake).weight_sync == "filesystem"
    fake.weight_version = f"{PREFIX}of-another-run"
    assert trainer.connect(fake).weight_sync == "adapter"


def test_merged_weights_are_sent_where_the_server_cannot_serve_the_adapter(trainer, fakes, caplog):
    """With one line that says why. To ask for more is an error."""
    fakes[0].answers["/v1/load_lora_adapter"] = (500, "LoRA rank 4 is greater than max_lora_rank 1.")
    fakes[1].more_config = {"lora_config": None}
    for fake, words in zip(fakes, ["rank 4 is greater", "started without --enable-lora"], strict=True):
        with caplog.at_level(logging.WARNING, "trl_april"):
            generation = trainer.connect(fake)
        assert generation.weight_sync == "filesystem" and generation.adapter_of(0) is generation.oldest_kept is None
        (line,) = [record.message for record in caplog.records if "Merged weights are sent" in record.message]
        assert words in line
        caplog.clear()
        with pytest.raises(ConfigError, match=f"cannot be sent alone.*{words}"):
            trainer.connect(fake, weight_sync="adapter")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"r": 8, "use_rslora": True, "lora_dropout": 0.1, "init_lora_weights": "gaussian"}, None),
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"bias": "all"}, "bias='all'"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the base weights"),
    ],
)
def test_options_that_vllm_would_ignore_are_merged(options, words):
    """It would sample from other weights, or the base on the server is not the trainer's."""
    reason = why_not_served(LoraConfig(target_modules=["q_proj"], **options))
    assert reason is None if words is None else words in reason


def test_models_and_servers_without_a_servable_adapter_are_named(trainer, fake):
    def reason(model=trainer.model, folder=None, kind=DistributedType.NO, base_url="http://localhost:1", **changes):
        server = SimpleNamespace(info=replace(info, **changes), base_url=base_url)
        plugin = SimpleNamespace(zero_stage=3)
        accelerator = SimpleNamespace(distributed_type=kind, state=SimpleNamespace(deepspeed_plugin=plugin))
        return why_merged(model, [server], accelerator, folder)

    info = trainer.connect(fake).server_info
    assert reason() is None and reason(folder="/shared", base_url="http://192.0.2.1:1") is None
    assert "another host" in reason(base_url="http://192.0.2.1:1")
    assert "without the weights" in reason(has_weights=False) and "without --enable-lora" in reason(max_loras=0)
    assert all("shards it" in reason(kind=kind) for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED))
    assert "none" in reason(build_model())
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert "PREFIX_TUNING" in reason(get_peft_model(build_model(), prefix))
    assert "embedding" in reason(get_peft_model(build_model(), LoraConfig(target_modules=["embed_tokens"])))
    for layers, expected in ((["q_proj"], "the vision tower"), (r".*language_model.*q_proj", "None")):
        adapted = get_peft_model(build_vision_model(build_processor()), LoraConfig(target_modules=layers))
        assert expected in str(reason(adapted))


def test_a_quantized_model_needs_its_adapter_alone(trainer, fake, caplog):
    """Its weights cannot be merged. The server's base may differ: the difference is measured, and said once."""
    trainer.model.base_model.model.is_loaded_in_4bit = True
    with pytest.raises(ConfigError, match="quantized.*only an adapter.*weight_sync='auto'"):
        trainer.connect(fake, weight_sync="filesystem")
    generation = trainer.connect(fake, server_timeout=10.0)
    assert isinstance(generation._transport, AdapterTransport)
    fake.prompt_logprobs = lambda ids: [one - 2.0 - 0.1 * trainer.step for one in fake._logprobs]
    with caplog.at_level(logging.WARNING, "trl_april"):
        for _ in range(2):
            trainer.sync(generation)
    assert generation.sync_mismatch == pytest.approx(2.2)
    assert caplog.text.count("log-probabilities of server and trainer differ by 2.1 nats") == 1

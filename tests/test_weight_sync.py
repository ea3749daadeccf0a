"""Weights on their way to the real server, and the proof that they arrived."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from stat import S_IMODE

import pytest
import requests
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from tests.tiny import build_tokenizer
from trl_april import LocalServer, host_gpus, server_check, weight_files, weight_sync
from trl_april.canary import server_logprobs, trainer_logprobs
from trl_april.errors import ConfigError, ServerError, WeightSyncError
from trl_april.processes import OneProcess
from trl_april.weight_files import shards
from trl_april.weight_sync import ServerGeneration


class AnsweringServer:
    """Answers the first request with a status, or leaves it without an answer. Its address, in a `with` block."""

    def __init__(self, status: int | None) -> None:
        self._status = status
        self.asked = 0

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _answer(self) -> None:
        self._connections = []
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._connections.append(connection)
            self.asked += 1
            connection.recv(65536)
            if self._status is not None:
                connection.sendall(f"HTTP/1.1 {self._status} -\r\nContent-Length: 2\r\n\r\nno".encode())

    def __exit__(self, *args: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for connection in self._connections:
            connection.close()
        assert self.asked == 1


class Trainer:
    """What ServerGeneration needs of a trainer: a model, and the step that it is at."""

    def __init__(self, model_dir: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.step = 0

    def connect(self, server, generation_class=ServerGeneration, **options) -> ServerGeneration:
        defaults = {"weight_sync": "auto", "weight_sync_dir": None, "needs_logprobs": True, "api_key": None}
        return generation_class(
            policy_version=lambda: self.step,
            model=self.model,
            accelerator=Accelerator(cpu=True),
            processes=OneProcess(),
            trained_model=lambda: self.model,
            processing_class=self.tokenizer,
            server_base_url=server.base_url,
            max_completion_length=64,
            **{**defaults, **options},
        )

    def change(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(self.step + 1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator)
        self.step += 1

    def distance(self, generation: ServerGeneration) -> float:
        """Largest difference of log-probabilities between the two sides, on other tokens than the canary's."""
        token_ids = list(range(4, 80))
        ours = torch.tensor(trainer_logprobs(self.model, token_ids, torch.device("cpu")))
        session = generation.vllm_client.session
        theirs = torch.tensor(server_logprobs(session, generation.base_url, generation.facts.model, token_ids))
        return float((ours - theirs).abs().max())


@pytest.fixture
def trainer(tiny_model_dir, one_thread) -> Trainer:
    return Trainer(tiny_model_dir)


@pytest.mark.server
class TestFileSystem:
    def test_tied_weights_arrive_exactly_every_time(self, server, trainer):
        generation = trainer.connect(server)
        assert generation.weight_sync == "filesystem"
        for _ in range(3):
            trainer.change(0.3)
            generation.sync_weights()
            assert trainer.distance(generation) < 1e-4

    def test_no_name_is_sent_twice_to_a_server_that_is_none_of_a_cpu(self, server, trainer, monkeypatch):
        """Elsewhere nothing needs it, and some models have no output layer to give it to."""
        generation = trainer.connect(server)
        names = [name for name, _ in generation._iter_named_params()]
        assert sorted(names) == sorted(dict(trainer.model.named_parameters(remove_duplicate=False)))
        facts = replace(generation.facts, device="cuda")
        monkeypatch.setattr(ServerGeneration, "_check_server", lambda self: facts)
        names = [name for name, _ in trainer.connect(server, weight_sync="filesystem")._iter_named_params()]
        assert names == [name for name, _ in trainer.model.named_parameters()]

    def test_adapters_are_unmerged_whatever_fails(self, server, trainer, monkeypatch):
        trainer.model = get_peft_model(trainer.model, LoraConfig(target_modules=["q_proj"]))
        generation = trainer.connect(server)

        def fail(params, model):
            yield next(params)
            raise RuntimeError("cannot be converted")

        monkeypatch.setattr(weight_sync, "in_checkpoint_format", fail)
        with pytest.raises(RuntimeError, match="cannot be converted"):
            generation.sync_weights()
        assert not any(getattr(module, "merged", False) for module in trainer.model.modules())

    def test_a_model_that_evaluation_casts_is_held_to_what_its_type_allows(self, server, trainer):
        """`bf16_full_eval` does so outside of training."""
        generation = trainer.connect(server)
        for dtype, exact in ((torch.bfloat16, False), (torch.float32, True)):
            trainer.model.to(dtype)
            generation.sync_weights()
            assert generation._canary.exact is exact

    def test_where_the_frequencies_are_chosen_by_other_things_a_difference_is_no_error(self, server, trainer):
        """LongRoPE: vLLM goes by its context, transformers by each input."""
        rope = trainer.model.config.rope_parameters
        trainer.model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0}
        generation = trainer.connect(server)
        trainer.model.config.rope_parameters = rope
        expected = generation._canary
        assert expected.compare([-1.0] * 32, [-3.0] * 32, 0) == 2.0
        with pytest.raises(WeightSyncError, match="has kept its old weights"):
            expected.compare([-2.0] * 32, [-3.0] * 32, 1)

    def test_without_the_sync_the_two_sides_differ(self, server, trainer):
        """The test above would not pass by itself."""
        generation = trainer.connect(server)
        generation.sync_weights()
        trainer.change(0.3)
        assert trainer.distance(generation) > 0.1

    def test_the_server_reports_the_policy_version(self, server, trainer):
        generation = trainer.connect(server)
        trainer.step = 41
        trainer.change(0.1)
        generation.sync_weights()
        assert requests.get(f"{server.base_url}/weight_info", timeout=10).json() == {"weight_version": "42"}
        assert generation.sync_seconds > 0

    def test_the_folder_is_the_one_given_and_left_empty(self, server, trainer, tmp_path, monkeypatch):
        generation = trainer.connect(server, weight_sync_dir=str(tmp_path))
        paths = []
        ask = generation._answer

        def remember(method, path, body=None, **options):
            if path == "collective_rpc":
                paths.append(Path(body["kwargs"]["weights_path"]))
                files = list(paths[-1].glob("*.safetensors"))
                # The server may run as another user.
                assert files and {S_IMODE(path.stat().st_mode) for path in files} == {0o644}
                assert S_IMODE(paths[-1].stat().st_mode) == 0o755
            return ask(method, path, body, **options)

        monkeypatch.setattr(generation, "_answer", remember)
        generation.sync_weights()
        assert [path.parent for path in paths] == [tmp_path]
        assert list(tmp_path.iterdir()) == []

    def test_requests_make_way_when_the_files_are_written_and_the_server_has_its_old_weights(
        self, server, trainer, tmp_path
    ):
        generation = trainer.connect(server, weight_sync_dir=str(tmp_path))
        generation.sync_weights()
        trainer.change(0.02)
        seen = []

        def make_way():
            (folder,) = tmp_path.iterdir()
            written = {}
            for file in folder.iterdir():
                written |= load_file(file)
            for name, parameter in trainer.model.named_parameters():
                assert torch.equal(written[name], parameter)
            seen.append(trainer.distance(generation))

        generation.before_sync = make_way
        generation.sync_weights()
        assert len(seen) == 1 and seen[0] > 0.05
        assert trainer.distance(generation) < 1e-4

    def test_requests_make_way_although_the_server_has_gone_away(self, server, trainer, monkeypatch):
        generation = trainer.connect(server)
        made_way = []
        generation.before_sync = lambda: made_way.append(True)
        monkeypatch.setattr(generation, "is_alive", lambda: False)
        with pytest.raises(ServerError, match="gone away in the weight sync"):
            generation.sync_weights()
        assert made_way == [True]

    def test_many_shards_are_one_model(self, server, trainer, monkeypatch):
        monkeypatch.setattr("trl_april.weight_files.SHARD_BYTES", 20_000)
        generation = trainer.connect(server)
        trainer.change(0.3)
        generation.sync_weights()
        assert trainer.distance(generation) < 1e-4

    def test_the_models_mode_is_left_as_it_was(self, server, trainer):
        generation = trainer.connect(server)
        for training in (True, False):
            trainer.model.train(training)
            generation.sync_weights()
            assert trainer.model.training is training


class KeepsOldWeights(ServerGeneration):
    """A server that says it has loaded the weights, and has not."""

    lies = False

    def _sync_through_files(self) -> None:
        if not self.lies:
            super()._sync_through_files()


@pytest.mark.server
class TestCanary:
    @pytest.mark.parametrize("scale", [0.3, 1e-4])
    def test_a_server_that_kept_its_old_weights_is_an_error(self, server, trainer, scale):
        """Also where the weights have moved by so little that both sides still agree within the tolerance."""
        generation = trainer.connect(server, KeepsOldWeights)
        generation.sync_weights()
        generation.lies = True
        trainer.change(scale)
        with pytest.raises(WeightSyncError, match="does not hold|has kept its old weights"):
            generation.sync_weights()

    def test_a_small_step_that_arrives_is_fine(self, server, trainer):
        generation = trainer.connect(server, KeepsOldWeights)
        generation.sync_weights()
        trainer.change(1e-4)
        generation.sync_weights()


@pytest.mark.server
class TestChoice:
    def test_nccl_on_a_cpu_is_refused(self, server, trainer):
        with pytest.raises(ConfigError, match="weight_sync='nccl' needs.*cpu.*filesystem"):
            trainer.connect(server, weight_sync="nccl")

    def test_a_folder_that_is_not_there_is_refused(self, server, trainer, tmp_path):
        with pytest.raises(ConfigError, match="nowhere.*not a folder"):
            trainer.connect(server, weight_sync_dir=str(tmp_path / "nowhere"))

    @pytest.mark.parametrize(
        "error", [RuntimeError("NCCL error: invalid usage"), OSError(98, "Address in use")], ids=["gpu", "port"]
    )
    def test_gpus_that_nccl_does_not_connect(self, server, trainer, monkeypatch, error):
        generation = trainer.connect(server)

        def fails(device):
            raise error

        monkeypatch.setattr(generation.vllm_client, "init_communicator", fails)
        with pytest.raises(WeightSyncError) as caught:
            generation._init_communicator()
        for words in (str(error), "different GPUs", "vllm_group_port=51216", "'filesystem'"):
            assert words in str(caught.value)

    def test_a_new_connection_by_nccl_ends_the_one_before(self, server, trainer, monkeypatch):
        """Which still listens on the port that the new one needs."""
        generation, calls = trainer.connect(server), []
        monkeypatch.setattr(generation.vllm_client, "close_communicator", lambda: calls.append("close"))
        monkeypatch.setattr(generation.vllm_client, "init_communicator", lambda device: calls.append("init"))
        generation._init_communicator()
        assert calls == ["close", "init"]


@pytest.mark.server
class TestNccl:
    """What can be tested of it without GPUs."""

    @pytest.fixture
    def generation(self, server, trainer):
        generation = trainer.connect(server)
        generation.weight_sync = "nccl"
        return generation

    @pytest.mark.parametrize("sent", [0, 2])
    def test_parameters_are_gathered_to_the_end_though_the_server_goes_away(
        self, generation, trainer, monkeypatch, sent
    ):
        """Which takes all processes, and the others do not know."""
        gathered, named = [], VLLMGeneration._iter_named_params

        def noted(self):
            gathered.append([])
            for name, param in named(self):
                gathered[-1].append(name)
                yield name, param

        def update(metadata, params):
            for _ in range(sent):
                next(params)
            raise requests.ConnectionError("The server has gone away.")

        monkeypatch.setattr(VLLMGeneration, "_iter_named_params", noted)
        monkeypatch.setattr(generation.vllm_client, "update_named_params", update)
        with pytest.raises(ServerError, match="has gone away"):
            generation.sync_weights()
        everything = [name for name, _ in trainer.model.named_parameters()]
        assert gathered == [everything, everything]  # TRL asks what they are called first

    @pytest.mark.parametrize(("status", "error"), [(503, ServerError), (500, WeightSyncError)])
    def test_an_answer_is_asked_for_once_and_has_a_name(self, generation, monkeypatch, status, error):
        """TRL's session would ask again, and nothing is broadcast again."""
        with AnsweringServer(status) as url:
            with pytest.raises(error, match=f"{status} to .*/update_weights .*no") as caught:
                generation.vllm_client._post(f"{url}/update_weights", json={"update_info": 1})
        assert type(caught.value) is error

    def test_none_is_waited_for_without_an_end(self, generation, monkeypatch):
        monkeypatch.setattr(generation.vllm_client, "_sync_seconds", 0.2)
        with AnsweringServer(None) as url, pytest.raises(requests.Timeout):
            generation.vllm_client._post(f"{url}/update_weights", json={})


def test_gpus_of_a_host_are_counted_by_their_drivers(tmp_path, monkeypatch):
    monkeypatch.setattr(host_gpus, "NVIDIA_GPUS", tmp_path / "nvidia")
    monkeypatch.setattr(host_gpus, "AMD_NODES", tmp_path / "amd")
    assert host_gpus.gpus_of_host() is None
    for number, gpu_id in enumerate(("0", "51765", "4660")):
        (tmp_path / "amd" / str(number)).mkdir(parents=True)
        (tmp_path / "amd" / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    assert host_gpus.gpus_of_host() == 2
    # A container must not ask those that it must not use.
    read_text, refused = Path.read_text, {"1": PermissionError}

    def read(path: Path) -> str:
        if error := refused.get(path.parent.name):
            raise error
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", read)
    assert host_gpus.gpus_of_host() == 2
    refused["2"] = OSError
    assert host_gpus.gpus_of_host() is None
    refused.clear()
    (tmp_path / "nvidia" / "0000:01:00.0").mkdir(parents=True)
    assert host_gpus.gpus_of_host() == 1


def test_a_shard_holds_no_more_than_asked_beside_its_first_parameter():
    sizes = [4, 4, 4, 20, 1, 1]
    params = [(f"p{place}", torch.zeros(size, dtype=torch.uint8)) for place, size in enumerate(sizes)]
    found = list(shards(iter(params), 10))
    assert [list(shard) for shard in found] == [["p0", "p1"], ["p2"], ["p3"], ["p4", "p5"]]


def prepare(generation: ServerGeneration, folder: Path) -> None:
    """Let it have what a sync through files needs but for the model, without a server."""
    generation.accelerator, generation._processes = Accelerator(cpu=True), OneProcess()
    generation._weight_sync_dir, generation._tied_names = str(folder), {}
    generation.before_sync = generation._gone = None
    generation.server_timeout = 10.0


@pytest.mark.server
def test_experts_come_under_the_names_that_the_server_knows(tmp_path, one_thread, monkeypatch):
    """With those that the model has for them here, the server would end.

    What the experts compute is left out, and they are let pass, since vLLM's CPU build does not pack their weights
    when it loads them again.
    """
    monkeypatch.setattr(server_check, "check_experts", lambda *args: None)
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    tokenizer = build_tokenizer()
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, **sizes, **experts,
    )  # fmt: skip

    def without_their_output(model):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("experts.down_proj"):
                    parameter.zero_()

    model = MixtralForCausalLM(config)
    without_their_output(model)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    trainer = Trainer(str(tmp_path))
    arguments = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    with LocalServer(tmp_path, vllm_args=arguments, quiet=True) as server:
        generation = trainer.connect(server)
        trainer.change(0.1)
        without_their_output(trainer.model)
        generation.sync_weights()
        assert trainer.distance(generation) < 1e-4


class TestMemory:
    """ "The main process never holds a second full copy beyond one shard file's worth.\""""

    SHARD = 16 * 1024**2

    def peak(self, call) -> int:
        """Bytes by which the process grows at most while `call` runs, what it imports then included."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present from here on
        before = self.status("VmRSS")
        call()
        return self.status("VmHWM") - before

    @staticmethod
    def status(name: str) -> int:
        line = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
        return int(line[1]) * 1024

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads its memory from Linux's /proc")
    def test_the_peak_is_some_shards_and_not_the_model(self, tmp_path, monkeypatch):
        monkeypatch.setattr(weight_files, "SHARD_BYTES", self.SHARD)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(96)))
        size = sum(p.nbytes for p in model.parameters())
        assert size == 24 * self.SHARD
        found = []

        def loaded(method, path, body, *, timeout):
            found.append([file.stat().st_size for file in Path(body["kwargs"]["weights_path"]).iterdir()])
            assert sum(found[-1]) > size

        generation = ServerGeneration.__new__(ServerGeneration)
        generation.model = model
        prepare(generation, tmp_path)
        generation._dist = DistributedBackend(generation.accelerator)
        monkeypatch.setattr(generation, "_answer", loaded)
        peak = self.peak(generation._sync_through_files)
        assert [len(files) for files in found] == [24]
        assert peak < 5 * self.SHARD, f"{peak / 2**20:.0f} MiB for shards of {self.SHARD / 2**20:.0f} MiB"


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("failing", ["_answer", "save_file"])
def test_a_sync_that_fails_still_reads_all_parameters(tmp_path, monkeypatch, failing, alive):
    """Other processes wait in reading them, and at the end TRL unmerges adapters that it has merged for the sync."""
    ended = []

    def params():
        for number in range(3):
            yield f"p{number}", torch.zeros(2)
        ended.append(True)

    def fail(*arguments, **options):
        raise WeightSyncError("failed")

    generation = ServerGeneration.__new__(ServerGeneration)
    prepare(generation, tmp_path)
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 1)  # a file per parameter
    monkeypatch.setattr(generation, "_iter_named_params", params)
    monkeypatch.setattr(weight_files if failing == "save_file" else generation, failing, fail)
    monkeypatch.setattr(generation, "is_alive", lambda: alive)
    is_outage = failing == "_answer" and not alive
    with nullcontext() if is_outage else pytest.raises(WeightSyncError, match="failed"):
        generation._sync_through_files()
    if is_outage:
        assert "failed" in str(generation._gone)  # all processes are told at the end
    assert ended == [True]
    assert list(tmp_path.iterdir()) == []


class TestAbandoned:
    """Folders of processes that were killed in the middle of a sync."""

    @pytest.fixture(autouse=True)
    def memory(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setattr(weight_files, "shared_memory", lambda: str(tmp_path))
        return tmp_path

    @staticmethod
    def age(folder: Path) -> None:
        then = folder.stat().st_mtime - 2 * weight_files.UNLOCKED_SECONDS
        os.utime(folder, (then, then))

    def test_what_a_killed_process_has_left_goes_with_the_next_sync(self, memory):
        child = os.fork()
        if child == 0:
            with weight_files.weight_folder(None) as folder:
                (folder / "model.safetensors").write_bytes(b"weights")
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        (left,) = memory.iterdir()
        with weight_files.weight_folder(None):
            assert left.exists(), "it might have been made just now, and not be locked yet"
        self.age(left)
        with weight_files.weight_folder(None) as folder:
            assert list(memory.iterdir()) == [folder]
        assert list(memory.iterdir()) == []

    def test_a_thread_that_hangs_leaves_nothing_at_the_end_of_its_process(self, tmp_path):
        """As a check of the doctor that Ctrl-C does not wait for."""
        code = (
            "import sys, threading; from trl_april.weight_files import weight_folder; made = threading.Event()\n"
            "def hang():\n"
            "    with weight_folder(sys.argv[1]) as folder:\n"
            "        print(folder); made.set(); threading.Event().wait()\n"
            "threading.Thread(target=hang, daemon=True).start(); made.wait()\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert str(tmp_path) in done.stdout and list(tmp_path.iterdir()) == []

    def test_the_server_need_not_have_been_started_in_the_same_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "weights").mkdir()
        with weight_files.weight_folder("weights") as folder:
            assert folder.is_absolute() and folder.parent == tmp_path / "weights"

    def test_that_of_a_process_which_lives_stays(self, memory):
        with weight_files.weight_folder(None) as folder:
            self.age(folder)
            with weight_files.weight_folder(None):
                assert folder.exists()

    def test_nothing_else_is_touched(self, memory, tmp_path_factory):
        elsewhere = tmp_path_factory.mktemp("elsewhere")
        (memory / f"{weight_files.PREFIX}link").symlink_to(elsewhere)
        (memory / f"{weight_files.PREFIX}file").write_text("no folder")
        (memory / "other").mkdir()
        for path in (elsewhere, *memory.iterdir()):
            self.age(path)
        before = {*memory.iterdir()}
        weight_files.remove_abandoned()
        assert {*memory.iterdir()} == before and elsewhere.is_dir()

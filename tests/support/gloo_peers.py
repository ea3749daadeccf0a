"""Trainers and servers in separate processes, joined by gloo where training on GPUs uses NCCL.

The trainer runs `ServerGeneration`; a server runs the update sessions of vLLM's workers and their NCCL engines. Only
the communicator, the CUDA streams, and the served model are replaced. Each process obeys commands from a pipe.
"""

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from aiohttp import web
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from vllm.config import VllmConfig
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.worker.gpu_worker import Worker

from tests.support.fake_vllm import FakeVLLM
from tests.support.tiny import build_model, build_tokenizer
from trl_april.distributed.processes import processes_of
from trl_april.weights import nccl, sync
from trl_april.weights.canary import trainer_logprobs
from trl_april.weights.files import FileTransport
from trl_april.weights.nccl import NcclTransport


SCALE = 1.02  # of all weights, between two syncs
BUFFER = "model.layers.0.mlp.scalar"  # without dimensions


_kept: list[Any] = []  # gloo's groups, whose destructors wait for broadcasts that have lost their peers


class GlooCommunicator:
    """vLLM's NCCL communicator over gloo.

    After the loss of a peer, the trainer's side waits until it is destroyed, as NCCL's kernels do. A receiver that is
    `blind` does, too; otherwise it raises.
    """

    disabled = False
    is_blind = True
    stops_at: int | None = None  # broadcasts until this process stops in one for ever
    on_stop: Any = None

    def __init__(self, group: Any, device: Any) -> None:
        self.group, self._destroyed = group, threading.Event()
        # A store of its own, since a broadcast without a peer would hold the group's, and its port, for minutes.
        is_first = group.rank == 0
        own = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if is_first else None
        port = group.broadcast_obj(own.port if is_first else None, src=0)
        store = own or dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        self._gloo = dist.ProcessGroupGloo(store, group.rank, group.world_size, timedelta(minutes=5))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: None = None) -> None:
        of_all = GlooCommunicator
        if of_all.stops_at is not None:
            of_all.stops_at -= 1
            if of_all.stops_at < 0:
                of_all.on_stop()
                self._destroyed.wait()
        options = dist.BroadcastOptions()
        options.rootRank = src
        try:
            self._finish(self._gloo.broadcast([tensor], options))
            self._finish(self._gloo.barrier())  # gloo sends small tensors before the peer is there
        except RuntimeError:
            if self.is_blind:
                self._destroyed.wait()
            raise

    def _finish(self, work: Any) -> None:
        while not work.is_completed():
            if self._destroyed.wait(0.001):
                raise RuntimeError("The communicator was destroyed.")
        work.wait()

    def destroy(self) -> None:
        self._destroyed.set()
        _kept.append(self._gloo)


def replace_cuda(chunk_bytes: int) -> None:
    nccl.CHUNK_BYTES, nccl.JOIN_SECONDS, nccl.GRACE_SECONDS = chunk_bytes, 3, 0.1
    torch.set_num_threads(1)
    pynccl.PyNcclCommunicator = GlooCommunicator
    stream = SimpleNamespace(synchronize=lambda: None)
    packed_tensor._get_streams = lambda index, count: (stream,) * count
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda: None


def obey(pipe: Any, commands: dict[str, Any]) -> None:
    """Answer commands with their results, or the names and messages of their errors."""
    while True:
        name, *arguments = pipe.recv()
        try:
            pipe.send((None, commands[name](*arguments)))
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))


# The server


class Fused(torch.nn.Module):
    """A layer with the weights of several parameters, as in vLLM's models."""

    PARTS = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        parts = [model.get_parameter(name).detach() for name in self.PARTS]
        self.starts = dict(zip(self.PARTS, (0, len(parts[0]), len(parts[0]) + len(parts[1])), strict=True))
        self.weight = torch.nn.Parameter(torch.cat(parts), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, param: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
        param.data[self.starts[part] :][: len(loaded)].copy_(loaded)


class Received(torch.nn.Module):
    """The served model: parameters by name, which vLLM's layerwise reload knows how to replace."""

    fails_at: str | None = None

    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.inner = with_buffer(build_model(tie_word_embeddings=tie, seed=1))
        self.fused = Fused(self.inner)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        fused = self.fused.weight
        for name, weight in weights:
            if name == self.fails_at:
                raise RuntimeError("out of memory")
            # As vLLM's default loader does with a single element.
            weight = weight.reshape(()) if name == BUFFER else weight
            param = self.inner.get_buffer(name) if name == BUFFER else self.inner.get_parameter(name)
            param.weight_loader(param, weight)
            if name in Fused.PARTS:
                fused.weight_loader(fused, weight, name)


class GlooWorker:
    """A worker of a server: vLLM's, with a thread that handles one request after the other."""

    def __init__(self, rank: int, workers: int, *, tie: bool) -> None:
        self.served = Received(tie=tie)
        self.thread = ThreadPoolExecutor(1)
        worker = self.worker = Worker.__new__(Worker)
        config = worker.vllm_config = VllmConfig()
        config.model_config = SimpleNamespace(dtype=torch.float32)
        config.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=workers, rank=rank)
        worker._weight_update_active = worker._weight_update_is_draft = False
        worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        worker.weight_transfer_engine = NCCLWeightTransferEngine(None, config, torch.device("cpu"), self.served)

    def reload(self, folder: Path) -> None:
        """As `reload_weights` of vLLM's model runner."""
        weights = [item for file in sorted(folder.iterdir()) for item in load_file(file).items()]
        initialize_layerwise_reload(self.served)
        self.served.load_weights(weights)
        finalize_layerwise_reload(self.served, self.worker.vllm_config.model_config)

    def state(self) -> dict[str, Any]:
        parts = torch.cat([self.served.inner.get_parameter(name) for name in Fused.PARTS])
        assert torch.equal(self.served.fused.weight, parts), "a part of a fused layer was lost"
        return {name: param.detach().float().numpy() for name, param in whole_state(self.served.inner)}


REQUESTS = {"init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"}


class GlooVLLM(FakeVLLM):
    """vLLM's weight endpoints, in front of workers."""

    def __init__(self, *, device: str, tie: bool, workers: int) -> None:
        self.workers = [GlooWorker(rank, workers, tie=tie) for rank in range(workers)]
        served = self.workers[0].served.inner
        super().__init__(vocab_size=served.config.vocab_size, device=device, weight_transfer={"backend": "nccl"})
        self.prompt_logprobs = lambda ids: trainer_logprobs(served, ids, torch.device("cpu"))

    async def _load(self, request: web.Request) -> web.Response:
        folder = Path((await request.json())["kwargs"]["weights_path"])
        return await self._ask(lambda worker: worker.reload(folder))

    async def _ask(self, question: Any) -> web.Response:
        """Let all workers do something at once, and answer with the first error."""
        try:
            await asyncio.gather(
                *(self._loop.run_in_executor(worker.thread, question, worker) for worker in self.workers)
            )
        except Exception as error:
            return web.Response(status=500, text=str(error))
        return web.json_response({"results": [None]})

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        name = request.path.lstrip("/")
        if name == "get_world_size":
            return web.json_response({"world_size": len(self.workers)})
        if name not in REQUESTS or request.path in self.answers:
            return await super()._gate(request, handler)
        if "update" in name and (refusal := self.refuse_unless_paused(request.path)):
            return refusal
        body = await request.json()
        return await self._ask(lambda worker: getattr(worker.worker, name)(*body.values()))


def serve(pipe: Any, chunk_bytes: int, device: str, tie: bool, workers: int) -> None:
    replace_cuda(chunk_bytes)
    with GlooVLLM(device=device, tie=tie, workers=workers) as server:
        communicator = GlooCommunicator
        communicator.is_blind, communicator.on_stop = False, lambda: pipe.send((None, "stopped"))
        obey(
            pipe,
            {
                "url": lambda: server.base_url,
                "states": lambda: [worker.state() for worker in server.workers],
                "answer": server.answers.update,
                "forget": server.answers.clear,
                "fail at": lambda name: setattr(server.workers[0].served, "fails_at", name),
                "stop at": lambda number: setattr(communicator, "stops_at", number),
                "be blind": lambda: setattr(communicator, "is_blind", True),
            },
        )


# The trainers


def build(kind: str, *, tie: bool) -> torch.nn.Module:
    """The trained model, not sharded yet."""
    model = build_model(tie_word_embeddings=tie)
    if "real" not in kind:
        model = with_buffer(model)
    if "lora" in kind:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model


def with_buffer(model: torch.nn.Module) -> torch.nn.Module:
    """The model with a persistent buffer, as some activations have them."""
    module, _, name = BUFFER.rpartition(".")
    model.get_submodule(module).register_buffer(name, torch.tensor(0.5))
    return model


def whole_state(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = dict(model.named_buffers())
    return [*model.named_parameters(), *((name, buffers[name]) for name in [BUFFER] if name in buffers)]


def scale(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.replace("_orig_mod.", "").endswith(BUFFER):
                buffer.mul_(SCALE)
        for param in model.parameters():
            getattr(param, "ds_tensor", param).mul_(SCALE)  # DeepSpeed's shard, if there is one


def expected_state(kind: str, *, tie: bool, steps: int) -> dict[str, Any]:
    """What the server must hold after the sync that follows `steps` calls of [`scale`]."""
    model = build(kind, tie=tie)
    for _ in range(steps):
        scale(model)
    model = deepcopy(model).merge_and_unload() if "lora" in kind else model
    return {name: param.detach().numpy() for name, param in whole_state(model)}


def compiled(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    if "blocks" in kind:
        layers = next(one.layers for one in model.modules() if type(one).__name__ == "Qwen3Model")
        for number, layer in enumerate(layers):
            layers[number] = torch.compile(layer, backend="eager")
    return torch.compile(model, backend="eager") if "compiled" in kind else model


def shard(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    if "fsdp2" in kind:
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in model.modules():
            if type(layer).__name__ == "Qwen3DecoderLayer":
                fully_shard(layer, mesh=mesh)
        return compiled(fully_shard(model, mesh=mesh), kind)
    if "zero3" in kind:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}  # otherwise kernels are compiled for a minute
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        return deepspeed.initialize(model=model, config=config)[0].module
    return model


def train(
    pipe: Any, chunk_bytes: int, rank: int, world: int, ports: tuple[int, int], url: str, kind: str, tie: bool
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "ACCELERATE_USE_CPU": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "LOCAL_WORLD_SIZE": str(world)}
    replace_cuda(chunk_bytes)
    # Files would be chosen on a CPU.
    sync.connected_transport = lambda *_, servers, group_port, **__: connected(servers, group_port, rank, kind)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world
    model = shard(build(kind, tie=tie), kind)
    local = sum(getattr(p, "ds_tensor", getattr(p, "_local_tensor", p)).numel() for p in model.parameters())
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    assert local < 0.6 * whole or world == 1, "the model is not sharded"
    processes = processes_of(accelerator)
    versions: list[int] = []
    try:
        generation = sync.ServerGeneration(
            weight_sync="nccl", weight_sync_dir=None, policy_version=lambda: len(versions),
            trained_model=lambda: model, processes=processes, needs_logprobs=True, api_key=None, model=model,
            accelerator=accelerator, processing_class=build_tokenizer(), server_base_url=url, server_timeout=10.0,
            max_completion_length=64, group_port=ports[1],
        )  # fmt: skip
    except Exception as error:
        return pipe.send((type(error).__name__, str(error)))
    generation._dist.fsdp_version = 2 if "fsdp2" in kind else None
    generation._dist.zero_stage = 3 if "zero3" in kind else 0
    GlooCommunicator.on_stop = lambda: pipe.send((None, "stopped"))

    def send() -> int:
        versions.append(1)
        with processes.watched():
            generation.sync_weights()
        return len(versions)

    pipe.send((None, "connected"))
    obey(
        pipe,
        {
            "sync": send,
            "scale": lambda: scale(model),
            "serve from": lambda urls: setattr(generation, "_addresses", lambda: urls),
            "stop at": lambda number: setattr(GlooCommunicator, "stops_at", number),
            "is merged": lambda: any(getattr(module, "merged", False) for module in model.modules()),
        },
    )


def connected(servers: list[Any], group_port: int, rank: int, kind: str) -> NcclTransport | FileTransport:
    transport = FileTransport(None) if "files" in kind else NcclTransport(torch.device("cpu"), group_port)
    for server in servers if rank == 0 else ():
        transport.connect(server)
    if rank == 0 and isinstance(transport, NcclTransport):
        transport.join(servers)
    return transport


class Extension:
    """Extends the worker of a real vLLM server, so that its process imports this module."""


if "GLOO_CHUNK_BYTES" in os.environ:
    replace_cuda(int(os.environ["GLOO_CHUNK_BYTES"]))

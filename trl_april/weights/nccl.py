"""Weight transfer over NCCL (RCCL on AMD), in the format of vLLM's packed broadcasts.

Invariants: a server receives the values that the iteration over the parameters yielded, whatever its end does to them,
a failure of either side ends the sync with an error within the time limit of loading weights, and the port of a group
is bound before a server hears of it: it might join another training's group there.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from trl import GRPOConfig
from trl.generation.vllm_client import VLLMClient

from ..errors import ServerError, WeightSyncError
from .client import ANSWER_SECONDS
from .files import common_dtype, dtype_of, stored_dtype
from .names import Parameters, read_to_end
from .synced_server import Each, Load, SyncedServer


logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**28  # a worker holds two beside its share of the memory
ALIGNED = 4  # elements of 16 bits, which are as many bytes as the widest element has
JOIN_SECONDS = 60  # for the workers of a running server to join a group
DEFAULT_PORTS = range(GRPOConfig.vllm_group_port, GRPOConfig.vllm_group_port + 100)  # the next ones: of more servers

Converted = Iterable[tuple[torch.Tensor, torch.dtype]]  # parameters, and the data types to send them in


class NcclTransport:
    """TRL's weight-transfer group between GPUs: one for each server, used one after the other."""

    name = "nccl"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._metadata: list[tuple[str, torch.dtype, torch.Size]] = []
        self._dtypes: tuple[Any, ...] | None = None  # of model and servers when the metadata was read
        self._of_servers: dict[str, torch.dtype | None] = {}  # what servers convert weights to, by address
        self._joining: dict[int, Future[Any]] = {}  # groups that are being formed, by port

    def connect(self, server: SyncedServer) -> None:
        client = server.client
        disconnect(client)  # its port would still be in use
        try:
            client.communicator = self._join(server)
        except (ServerError, requests.RequestException):
            raise  # an OSError too, but the server may be down
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"The trainer on {self._device} and the vLLM server at {client.base_url} cannot be connected by "
                f"NCCL (RCCL): {str(error).rstrip('.')}. They need different GPUs (CUDA_VISIBLE_DEVICES for each) and "
                f"open ports between them; vllm_group_port={client.group_port} must be free on the trainer's host and "
                "VLLM_HOST_IP, if it is set, an address of that host. weight_sync='filesystem' needs neither."
            ) from error
        self._of_servers[server.base_url] = dtype_of(server)

    def _join(self, server: SyncedServer) -> Any:
        """Form a group with the server's workers. TRL's own method sees a refusal only after 300 seconds."""
        client, port = server.client, server.client.group_port
        wait([self._joining[port]] if port in self._joining else [])  # after a refusal, it holds the port for a while
        info: dict[str, Any] = {"rank_offset": 1, "world_size": client.get_world_size() + 1, "packed": True}
        info |= {"packed_buffer_size_bytes": CHUNK_BYTES, "packed_num_buffers": 2}
        listener = listen(address_seen_by(client.base_url), port)
        info["master_address"], info["master_port"] = listener.getsockname()[:2]
        # The workers wait for this process while they handle the request.
        answered = in_thread(lambda: server.control.load("init_weight_transfer_engine", {"init_info": info}))
        joined = self._joining[port] = in_thread(lambda: self._open(info, listener))
        _wait_for(joined, answered)
        del self._joining[port]
        answered.result()
        return joined.result()

    def _open(self, info: dict[str, Any], listener: socket.socket) -> Any:
        # Imported here, since TRL does without vLLM until a server is used.
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        address, port = info["master_address"], info["master_port"]
        try:
            group = StatelessProcessGroup.create(
                address, port, 0, info["world_size"], store_timeout=JOIN_SECONDS, listen_socket=listener
            )
        except (RuntimeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EBADF:  # from vLLM, after a time-out
                raise
            raise RuntimeError(
                f"the server's workers have not joined at {address}, port {port}, within {JOIN_SECONDS} s. Set "
                "VLLM_HOST_IP if they reach the trainer's host at another address, and restart the server if a "
                "trainer was killed while it sent weights"
            ) from error
        index = self._device.index
        communicator = PyNcclCommunicator(group, torch.accelerator.current_device_index() if index is None else index)
        if communicator.disabled:  # it would send nothing, without an error
            raise RuntimeError("its library cannot be loaded (vLLM's log says why)")
        return communicator

    @contextmanager
    def stage(
        self, parameters: Callable[[], Parameters], *, sends: bool, dtypes: frozenset[torch.dtype]
    ) -> Iterator[Load]:
        # The server is told of all tensors before the first one is sent. Evaluation may change their data types.
        if self._dtypes != (found := (dtypes, common_dtype(self._of_servers))):
            self._metadata = [(name, self._sent_dtype(param), param.shape) for name, param in parameters()]
            self._dtypes = found

        def load(servers: Sequence[SyncedServer], each: Each) -> None:
            with ExitStack() as rest:  # all servers' turns, even if one fails
                for server in servers:
                    rest.callback(self._take_turn, server, parameters, each, sends=sends)

        yield load

    def _sent_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Large matrices travel in the servers' data type. vLLM reads tensors in place, so all have to be aligned."""
        is_aligned = param.numel() % ALIGNED == 0
        return stored_dtype(param, common_dtype(self._of_servers)) if is_aligned else param.dtype

    def _take_turn(
        self, server: SyncedServer, parameters: Callable[[], Parameters], each: Each, *, sends: bool
    ) -> None:
        with read_to_end(parameters()) as params:
            if sends:
                each(lambda server: self._send(server, params), [server])

    def _send(self, server: SyncedServer, params: Parameters) -> None:
        if server.client.communicator is None:  # after a failure
            self.connect(server)
        control = server.control
        _start_update(server)
        info: dict[str, Any] = {
            "names": [name for name, _, _ in self._metadata],
            "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in self._metadata],
            # vLLM cannot view a tensor without dimensions, and loads one of a single element into it.
            "shapes": [list(shape) or [1] for _, _, shape in self._metadata],
        }
        # The workers wait for the broadcasts while they handle the request.
        received = in_thread(lambda: control.load("update_weights", {"update_info": info}))
        try:
            self._broadcast(server.client.communicator, self._as_announced(params), received)
            received.result()
        except BaseException:
            disconnect(server.client)  # ends a broadcast that waits for its peer
            raise
        control.load("finish_weight_update", {})

    def _broadcast(self, group: Any, params: Converted, received: Future[Any]) -> None:
        """Broadcast chunk by chunk: while one is on its way, the next one is packed. Raises the error of `received`.

        All packing runs on the current stream, on which parameters are gathered, merged and unmerged.
        """
        stream = self._stream

        def send(chunk: torch.Tensor) -> None:
            with nullcontext() if stream is None else torch.cuda.stream(stream):  # a thread's own device is the first
                group.broadcast(chunk, src=0, stream=stream)
                if stream is not None:
                    stream.synchronize()

        sent: Future[None] | None = None
        for chunk in packed(params, CHUNK_BYTES, self._device):
            if stream is not None:
                torch.accelerator.current_stream(stream.device).synchronize()
            _wait_for(sent, received)
            sent = in_thread(lambda chunk=chunk: send(chunk))  # type: ignore[misc]
        _wait_for(sent, received)

    @cached_property
    def _stream(self) -> Any:
        """Stream of the broadcasts; `None` without a GPU, as in tests."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # ROCm's name, too

    def _as_announced(self, params: Parameters) -> Converted:
        """Check that parameters are those that were announced: the workers would wait for ever, or read garbage."""
        expected = iter(self._metadata)
        for name, param in params:
            announced, dtype = next(expected, None), self._sent_dtype(param)
            if announced != (name, dtype, param.shape):
                raise WeightSyncError(
                    f"The parameter {name} ({param.dtype}, {tuple(param.shape)}) was announced to the server as "
                    f"{announced}. The model must not change its parameters during training; "
                    "weight_sync='filesystem' allows it."
                )
            yield param, dtype
        if (missing := next(expected, None)) is not None:
            raise WeightSyncError(
                f"The parameter {missing[0]} was announced to the server and is no longer one of the model. The model "
                "must not change its parameters during training; weight_sync='filesystem' allows it."
            )


def _start_update(server: SyncedServer) -> None:
    """Let a server expect weights. An update that broke off is finished first: vLLM keeps what it had of a layer."""
    load = server.control.load
    with suppress(WeightSyncError):  # refused in the middle of an update
        load("start_weight_update", {})
        if not server.is_incomplete:
            return
    with suppress(WeightSyncError):
        load("finish_weight_update", {})
    load("start_weight_update", {})


def address_seen_by(base_url: str) -> str:
    """The address of this host at which the server's host reaches it: `VLLM_HOST_IP`, or that of a connection."""
    if address := os.environ.get("VLLM_HOST_IP"):
        return address
    url = urlsplit(base_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    with socket.create_connection((url.hostname, port), timeout=ANSWER_SECONDS) as connection:
        return str(connection.getsockname()[0])


def listen(address: str, port: int) -> socket.socket:
    """Listen on the port. If another program has it and it is a default one, a free port is taken instead."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or port not in DEFAULT_PORTS:
            raise
    listener = socket.create_server((address, 0), family=family)
    logger.warning(
        "Port %s of %s (vllm_group_port) is in use, as by another training. The NCCL group meets at port %s instead.",
        port, address, listener.getsockname()[1],
    )  # fmt: skip
    return listener


def disconnect(client: VLLMClient) -> None:
    """End the broadcasts of a group and free its port, although the traceback of an error may hold the group."""
    if client.communicator is not None:
        client.communicator.destroy()
        client.close_communicator()


def packed(params: Converted, chunk_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Concatenate the bytes of parameters on a device, up to and including the one that exceeds `chunk_bytes`.

    Each is copied when it is yielded: merged or gathered values change when the iteration continues. A model may be
    divided among several devices.
    """
    parts: list[torch.Tensor] = []
    size = 0
    for param, dtype in params:
        parts.append(param.detach().to(device, dtype, copy=True).reshape(-1).view(torch.uint8))
        size += parts[-1].numel()
        if size > chunk_bytes:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat(parts)


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in a daemon thread: one that waits for a lost peer must not keep the interpreter from exiting."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="trl-april-nccl", daemon=True).start()
    return future


def _wait_for(sent: Future[None] | None, received: Future[Any]) -> None:
    """Wait for a broadcast, unless the server fails before it arrives."""
    if sent is None:
        return
    wait([sent, received], return_when=FIRST_COMPLETED)
    if received.done() and received.exception() is not None:
        received.result()
    sent.result()

"""Weight transfer over NCCL (RCCL on AMD), in the format of vLLM's packed broadcasts.

A single group connects the trainer (rank 0) to the workers of all servers: each parameter is read and sent once.

Invariants: a server receives the values that the iteration over the parameters yielded, even if they change when the
iteration continues. A failure on either side closes the group and ends the sync with an error, within the time limit
of loading weights. The port of a group is bound before a server is told of it: otherwise the server could join another
run's group there.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import torch
from trl import GRPOConfig

from ..errors import ServerError, WeightSyncError
from .client import ANSWER_SECONDS
from .files import common_dtype, dtype_of, stored_dtype
from .names import Parameters, read_to_end
from .synced_server import Each, Load, SyncedServer, in_thread


logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**28  # a worker holds two chunks outside of its share of the memory
ALIGNED = 4  # elements: at 16 bits, as many bytes as the widest data type
JOIN_SECONDS = 60  # for the workers of running servers to join a group
GRACE_SECONDS = 5.0  # for a server's request to fail after the broadcast failed

Converted = Iterable[tuple[torch.Tensor, torch.dtype]]  # parameters, and the data types to send them in


@dataclass(frozen=True)
class _Member:
    """A server as a group knows it."""

    workers: int
    dtype: torch.dtype | None  # of its weights; `None` if it quantizes them
    address: str  # of this host, as seen from the server


class NcclTransport:
    """Broadcasts to all servers at once, through a group that is re-formed when the servers change."""

    name = "nccl"

    def __init__(self, device: torch.device, port: int) -> None:
        self._device, self._port = device, port
        self._announced: list[tuple[str, torch.Tensor]] = []  # names and meta tensors of the parameters
        self._dtypes: frozenset[torch.dtype] | None = None  # of the model when the parameters were listed
        self._known: dict[str, _Member] = {}  # by address; lost servers too
        self._group: Any = None
        self._joined: list[SyncedServer] = []  # by rank
        self._joining: Future[Any] | None = None

    def connect(self, server: SyncedServer) -> None:
        workers = server.control.request("GET", "get_world_size", seconds=ANSWER_SECONDS)["world_size"]
        self._known[server.base_url] = _Member(workers, dtype_of(server), address_seen_by(server.base_url))
        self.close()  # a restarted server has left the group

    def close(self) -> None:
        """Abort the group's broadcasts and free its port, even if the traceback of an error holds the group."""
        group, self._group, self._joined = self._group, None, []
        if group is not None:
            group.destroy()
            group.group.store = group.group.socket = None

    def join(self, servers: Sequence[SyncedServer]) -> None:
        """Form the group with the workers of these servers, unless it exists."""
        if self._group is not None and self._joined == list(servers):
            return
        self.close()
        try:
            self._form(servers)
        except ServerError:
            raise  # an OSError too, but the server may be down
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"The trainer on {self._device} and {', '.join(server.base_url for server in servers)} cannot be "
                f"connected by NCCL (RCCL): {str(error).rstrip('.')}. They need different GPUs (CUDA_VISIBLE_DEVICES "
                f"for each) and open ports between them; vllm_group_port={self._port} must be free on the trainer's "
                "host and VLLM_HOST_IP, if it is set, an address of that host. weight_sync='filesystem' needs neither."
            ) from error
        self._joined = list(servers)

    def _form(self, servers: Sequence[SyncedServer]) -> None:
        wait([self._joining] if self._joining else [])  # after a refused join, it holds the port for a while
        members = [self._known[server.base_url] for server in servers]
        first_ranks = accumulate((member.workers for member in members), initial=1)
        listener = listen(common_address([member.address for member in members]), self._port)
        info: dict[str, Any] = {"world_size": 1 + sum(member.workers for member in members), "packed": True}
        info |= {"packed_buffer_size_bytes": CHUNK_BYTES, "packed_num_buffers": 2}
        info["master_address"], info["master_port"] = listener.getsockname()[:2]
        bodies = [{"init_info": {**info, "rank_offset": rank}} for rank in first_ranks]
        # The workers wait for this process while they handle the request.
        answers = _Answers("init_weight_transfer_engine", dict(zip(servers, bodies, strict=False)))
        self._joining = in_thread(partial(self._open, info, listener))
        self._group = answers.wait_for(self._joining)
        self._joining = None
        answers.wait()

    def _open(self, info: dict[str, Any], listener: socket.socket) -> Any:
        # Imported here, since TRL needs no vLLM until a server is used.
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
        # Servers must know all tensors before the first is sent. Evaluation may change data types.
        if self._dtypes != dtypes:
            self._announced = [(name, torch.empty_like(param, device="meta")) for name, param in parameters()]
            self._dtypes = dtypes

        def load(servers: Sequence[SyncedServer], each: Each) -> None:
            with read_to_end(parameters()) as params:
                if sends:
                    self._send(servers, params, each)

        yield load

    def _sent_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Large matrices travel in the servers' data type. vLLM reads tensors in place, so all have to be aligned."""
        is_aligned = param.numel() % ALIGNED == 0
        common = common_dtype(member.dtype for member in self._known.values())
        return stored_dtype(param, common) if is_aligned else param.dtype

    def _send(self, servers: Sequence[SyncedServer], params: Parameters, each: Each) -> None:
        each(_start_update, servers)
        if not (present := [server for server in servers if server.takes_part]):
            return
        try:
            self.join(present)
            self._update(present, params)
        except BaseException as error:
            self.close()  # ends a broadcast that waits for a server
            if not isinstance(error, Exception):
                raise
            failure = error
        else:
            each(lambda server: server.control.load("finish_weight_update", {}), present)
            return
        # The broadcast has ended for all, so one server that is down is an outage of all. The sync is repeated.
        for server in present:
            if problem := server.control.problem():
                failure = ServerError(f"The weight sync broke off: {server.base_url} is down ({problem}). {failure}")

        def fail(server: SyncedServer) -> None:
            raise failure

        each(fail, present)

    def _update(self, servers: Sequence[SyncedServer], params: Parameters) -> None:
        sent = [(name, str(self._sent_dtype(param)).removeprefix("torch."), param) for name, param in self._announced]
        info: dict[str, Any] = {
            "names": [name for name, _, _ in sent],
            "dtype_names": [dtype for _, dtype, _ in sent],
            # vLLM cannot view a tensor without dimensions, and loads a single element into it.
            "shapes": [list(param.shape) or [1] for _, _, param in sent],
        }
        # The workers wait for the broadcasts while they handle the request.
        answers = _Answers("update_weights", dict.fromkeys(servers, {"update_info": info}))
        self._broadcast(self._as_announced(params), answers)
        answers.wait()

    def _broadcast(self, params: Converted, answers: _Answers) -> None:
        """Broadcast chunk by chunk: while a chunk is on its way, the next is packed.

        All packing runs on the current stream, on which parameters are gathered, merged and unmerged.
        """
        stream, group = self._stream, self._group

        def send(chunk: torch.Tensor) -> None:
            with nullcontext() if stream is None else torch.cuda.stream(stream):  # a thread's own device is the first
                group.broadcast(chunk, src=0, stream=stream)
                if stream is not None:
                    stream.synchronize()

        sent: Future[None] | None = None
        for chunk in packed(params, CHUNK_BYTES, self._device):
            if stream is not None:
                torch.accelerator.current_stream(stream.device).synchronize()
            if sent is not None:
                answers.wait_for(sent)
            sent = in_thread(partial(send, chunk))
        if sent is not None:
            answers.wait_for(sent)

    @cached_property
    def _stream(self) -> Any:
        """Stream of the broadcasts; `None` without a GPU, as in tests."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # ROCm's name, too

    def _as_announced(self, params: Parameters) -> Converted:
        """Check parameters against the announcement: else the workers would wait forever, or read garbage."""
        expected = iter(self._announced)
        for name, param in params:
            known, announced = next(expected, ("", torch.empty(0)))
            if (known, announced.dtype, announced.shape) != (name, param.dtype, param.shape):
                raise WeightSyncError(
                    f"The parameter {name} ({param.dtype}, {tuple(param.shape)}) was announced to the servers as "
                    f"{known or None} ({announced.dtype}, {tuple(announced.shape)}). The model must not change its "
                    "parameters during training; weight_sync='filesystem' allows it."
                )
            yield param, self._sent_dtype(param)
        if (missing := next(expected, None)) is not None:
            raise WeightSyncError(
                f"The parameter {missing[0]} was announced to the servers and has left the model. The model must not "
                "change its parameters during training; weight_sync='filesystem' allows it."
            )


class _Answers:
    """Requests that servers answer when their workers have ended a collective operation with this process."""

    def __init__(self, path: str, bodies: Mapping[SyncedServer, dict[str, Any]]) -> None:
        self._futures = {in_thread(partial(server.control.load, path, body)) for server, body in bodies.items()}

    def wait_for(self, own: Future[Any]) -> Any:
        """Return the result of this process's part, or raise the error of a server that fails before it ends."""
        pending = {own, *self._futures}
        while own in pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            _raise_error(done - {own})
        if own.exception() is not None:  # perhaps because a server died
            _raise_error(wait(self._futures, GRACE_SECONDS, FIRST_EXCEPTION).done)
        return own.result()

    def wait(self) -> None:
        """Wait for all servers, or raise the first error."""
        _raise_error(wait(self._futures, return_when=FIRST_EXCEPTION).done)


def _raise_error(done: Iterable[Future[Any]]) -> None:
    for future in done:
        future.result()


def _start_update(server: SyncedServer) -> None:
    """Prepare a server for weights. An interrupted update is finished first, since vLLM keeps its partial layers."""
    load = server.control.load
    with suppress(WeightSyncError):  # refused in the middle of an update
        load("start_weight_update", {})
        if not server.was_incomplete:
            return
    with suppress(WeightSyncError):
        load("finish_weight_update", {})
    load("start_weight_update", {})


def address_seen_by(base_url: str) -> str:
    """The address of this host as the server's host sees it: `VLLM_HOST_IP`, or the local end of a connection."""
    if address := os.environ.get("VLLM_HOST_IP"):
        return address
    url = urlsplit(base_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    with socket.create_connection((url.hostname, port), timeout=ANSWER_SECONDS) as connection:
        return str(connection.getsockname()[0])


def common_address(addresses: Sequence[str]) -> str:
    """The address of this host that all servers reach: servers here reach all, servers elsewhere not the loopback."""
    return next((address for address in addresses if not address.startswith(("127.", "::1"))), addresses[0])


def listen(address: str, port: int) -> socket.socket:
    """Listen on the port, or on a free port if another program has TRL's default port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or port != GRPOConfig.vllm_group_port:
            raise
    listener = socket.create_server((address, 0), family=family)
    logger.warning(
        "Port %s of %s (vllm_group_port) is in use, as by another training. The NCCL group meets at port %s instead.",
        port, address, listener.getsockname()[1],
    )  # fmt: skip
    return listener


def packed(params: Converted, chunk_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Concatenate the bytes of parameters on a device, until they exceed `chunk_bytes`.

    Each parameter is copied when it is yielded: merged or gathered values change when the iteration continues. A model
    may be divided among several devices.
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

"""A vLLM server in the weight sync: connections to it, its configuration, and the weights that it has.

Invariant: a lost server takes no part in syncs until its watch has seen it answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import requests

from ..engine.protocol import ServerLoad
from ..errors import ServerError, WeightSyncError
from ..server.check import ServerInfo
from ..server.lease import ServerLease
from ..server.traffic import ServerPause, server_load
from .canary import DECODED, Canary, decoded_logprobs, distance, next_logprobs, server_logprobs
from .client import ANSWER_SECONDS, ServerControl
from .server_state import ServerLifecycle, ServerState


Step = Callable[["SyncedServer"], object]
Each = Callable[[Step, Sequence["SyncedServer"]], None]  # as [`for_each`]
Load = Callable[[Sequence["SyncedServer"], Each], None]  # loads weights into servers

FRESH = "default"  # vLLM's weight version of the weights that a server was started with
INCOMPLETE = "incomplete"  # weight version while weights are loaded
DECODES_EVERY = 50  # syncs between two comparisons of decoded tokens, from the first sync on
WATCH_SECONDS = 1.0  # between two health checks of a lost server


class SyncedServer:
    """A server as the main process sees it. Other processes know its address and, once it is connected, its `info`."""

    canary: Canary

    def __init__(self, base_url: str, seconds: float, headers: Mapping[str, str]) -> None:
        self.base_url = base_url
        self.control = ServerControl(base_url, seconds, headers)
        answer = partial(self.control.request, seconds=ANSWER_SECONDS)
        self.pause, self.lease = ServerPause(answer, base_url), ServerLease(answer, base_url)
        self.life = ServerLifecycle()
        self.known_info: ServerInfo | None = None  # set on the first connection
        self.outage: Exception | None = None  # why it is down
        self.version = ""  # the last weight version sent to it, even if its answer was lost
        self.was_incomplete = False  # whether an earlier sync, of any run, left the weights incomplete
        self.mismatch = 0.0  # of server and trainer after the last sync, in nats
        self.values_before: list[list[float]] | None = None  # of the canary, before the first sync
        self._syncs = 0
        self._watch: _Watch | None = None

    @property
    def info(self) -> ServerInfo:
        """The configuration that the server reported."""
        assert self.known_info is not None
        return self.known_info

    @property
    def takes_part(self) -> bool:
        """Whether the current sync includes this server."""
        return self.life.takes_part

    @property
    def has_returned(self) -> bool:
        """Whether the server was lost and answers again."""
        return self.life.state is ServerState.LOST and (self._watch is None or self._watch.answers.is_set())

    def reserve(self) -> None:
        """Raise [`WeightSyncError`] if a lease or running requests show that another training run uses the server."""
        if self.lease.take() or self.control.weight_version() in (None, FRESH):
            return
        load = server_load(self.control.session, self.base_url, timeout=ANSWER_SECONDS)
        if load is not None and load.running + load.waiting:
            raise WeightSyncError(
                f"The vLLM server at {self.base_url} has the weights of a training run, and requests are running: two "
                "runs would overwrite each other's weights. Use a separate server for every training run."
            )

    def begin_sync(self) -> None:
        """Check the server in this sync, unless it was just connected to or is still lost."""
        self.outage = None
        begun, lost = (ServerState.READY, ServerState.CHECKING), self.life.state is ServerState.LOST
        if self.life.state not in begun and (not lost or self.has_returned):
            self.life.enter(ServerState.CHECKING)

    def fail(self, outage: Exception) -> None:
        """Leave the server out of the current sync."""
        self.outage = outage
        self.life.enter(ServerState.DOWN)

    def problem(self) -> str | None:
        """Why the server is not ready to generate. A lost server that is ready rejoins at the next sync."""
        problem = self.control.problem()
        if problem is None and self._watch is not None:
            self._watch.answers.set()
        return problem

    def lose(self) -> None:
        """Leave the server out, and watch for its return in the background. No effect while a sync uses the server."""
        if self.life.lose():
            self._watch = _Watch(ServerControl(self.base_url, self.control.session.seconds, self.control.headers))

    def give_up(self) -> None:
        """End the watch and the lease, and resume a server left paused by a sync that will not be repeated.

        With incomplete weights, it stays paused: vLLM has not allocated all of them, and crashes at the first request.
        """
        if self._watch is not None:
            self._watch.end()
        if self.life.state is not ServerState.LOST and self.version != INCOMPLETE:
            self.pause.give_up()
        self.lease.give_back()

    def holds_weights(self) -> bool:
        """Whether the server answers, and has the weights of its last sync."""
        try:
            return self.life.state is ServerState.HOLDING and self.control.weight_version() == self.version
        except ServerError:
            return False

    def load(self) -> ServerLoad:
        """The server's load; all 0 if it does not report it."""
        with suppress(requests.RequestException):
            return server_load(self.control.session, self.base_url, timeout=ANSWER_SECONDS) or ServerLoad()
        return ServerLoad()

    def requests_waiting(self) -> float:
        """Number of requests queued on the server, 0 if it does not report it."""
        return self.load().waiting

    def look_before(self, path: str, sequences: Sequence[list[int]], *, as_next: bool) -> None:
        """Record log-probabilities of `sequences` if the server still has the weights of `path`, a folder or id."""
        is_same = bool(path) and os.path.realpath(path) == os.path.realpath(self.info.path)
        if is_same and self.info.has_weights and self.control.weight_version() == FRESH:
            ask = next_logprobs if as_next else server_logprobs
            first = ask(self.control, self.info.model, sequences[0])
            self.values_before = [first, *self._longer(self.info.model, sequences)]

    def _longer(self, model: str, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Next-token log-probabilities after the sequences that are longer than the canary."""
        return [next_logprobs(self.control, model, sequence) for sequence in sequences[1:]]

    def begin_load(self) -> None:
        """Pause the server, and mark its weights as incomplete until they have their version."""
        self.pause.begin()
        self.was_incomplete = self.control.weight_version() == INCOMPLETE
        self.version = INCOMPLETE
        self.control.request("POST", "update_weight_version", {"new_version": INCOMPLETE})

    def end_load(self, version: str) -> None:
        """Give the loaded weights their version, and resume the server."""
        self.version = version
        self.control.request("POST", "update_weight_version", {"new_version": version})
        reported = self.control.weight_version()
        if reported != version:
            raise WeightSyncError(
                f"The server at {self.base_url} reports weight version {reported!r} after the sync of {version}, so "
                "another client may be sending it weights. Use a separate server for every training run."
            )
        self.pause.end()

    def stamp_and_verify(
        self,
        version: int,
        expected: Sequence[Sequence[float]],
        sequences: Sequence[list[int]],
        *,
        as_next: bool,
        keeps_cache: bool,
        sees_images: bool = False,
        adapter: str | None = None,
    ) -> None:
        """Give the loaded weights their version, resume the server, and compare it with the trainer.

        `expected` are the trainer's values of `sequences`: the canary (`as_next` as in [`next_logprobs`]), and around
        the first sync longer sequences. The version is the name of the `adapter` if only the adapter was loaded. For a
        model that `sees_images`, vLLM keeps embeddings in a separate cache, by the hash of the image alone.
        """
        if sees_images:
            self.control.request("POST", "reset_encoder_cache")
        if not keeps_cache:
            self.control.request("POST", "reset_prefix_cache")  # for other clients; our requests use cache salts
        self.end_load(adapter or str(version))
        ask, model = next_logprobs if as_next else server_logprobs, adapter or self.info.model
        several = self.info.engines > 1
        ranks = [{"X-data-parallel-rank": str(rank)} if several else None for rank in range(self.info.engines)]
        values = [ask(self.control, model, sequences[0], headers) for headers in ranks]
        furthest = max(values, key=partial(distance, expected[0]))
        after = [furthest, *self._longer(model, sequences)]
        lengths = [len(sequence) for sequence in sequences]
        self.mismatch = self.canary.compare_around(lengths, expected, self.values_before, after, version)
        self.values_before = None
        if not as_next and self._syncs % DECODES_EVERY == 0:
            for headers in ranks:
                self._verify_decoding(version, sequences[0][:DECODED], headers)
        self._syncs += 1
        self.life.enter(ServerState.HOLDING)

    def _verify_decoding(self, version: int, prompt: list[int], headers: dict[str, str] | None) -> None:
        """Compare log-probabilities of the same tokens, decoded as in rollouts and as a prompt."""
        token_ids, decoded = decoded_logprobs(self.control, self.info.model, prompt, headers)
        prefilled = server_logprobs(self.control, self.info.model, prompt + token_ids, headers)[-DECODED:]
        self.canary.compare_decoded(decoded, prefilled, version, exact=self.info.dtype == "float32")


class _Watch:
    """Polls a lost server in the background until it answers or the watch is ended."""

    def __init__(self, control: ServerControl) -> None:
        self.answers, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._ask, args=[control], name="trl-april-watch", daemon=True).start()

    def end(self) -> None:
        self._ended.set()
        self.answers.set()  # so that the next sync tries the server

    def _ask(self, control: ServerControl) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            try:
                if control.problem() is None:
                    return self.answers.set()
            except ServerError:
                pass  # another program now listens at its address


def combined(infos: Sequence[ServerInfo]) -> ServerInfo:
    """The combined configuration of several servers: the smallest context, and all concurrent sequences."""
    sequences = [info.max_sequences for info in infos if info.max_sequences is not None]
    return replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        stream_interval=max(info.stream_interval for info in infos),
        max_sequences=sum(sequences) if len(sequences) == len(infos) else None,
    )


def for_each(step: Step, servers: Sequence[SyncedServer]) -> None:
    """Run a step for all servers at once, and raise the first error after all have ended."""
    futures = [in_thread(partial(step, server)) for server in servers]
    wait(futures)
    for future in futures:
        future.result()


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in a daemon thread, so that waiting for a server cannot keep the interpreter from exiting."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="trl-april-weights", daemon=True).start()
    return future

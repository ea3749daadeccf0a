"""Several processes of a training run as threads, which exchange their values in this interpreter.

Collective calls are compared: where processes wait in different ones, which would hang on gloo or mix up their values,
each fails at once.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from trl_april.distributed import processes
from trl_april.distributed.processes import ManyProcesses


class Peers:
    """`count` processes. `rank` is that of the present thread, or 0 in further threads of the first process."""

    def __init__(self, count: int = 2) -> None:
        self.count, self._own = count, threading.local()
        self._calls: dict[int, dict[int, tuple[str, Any]]] = defaultdict(dict)  # by their number and process
        self._ended: set[int] = set()
        self._changed = threading.Condition()

    @property
    def rank(self) -> int:
        return getattr(self._own, "rank", 0)

    def run(self, function: Callable[["Peer"], Any]) -> list[Any]:
        """The result of `function`, or its error, in each process."""
        outcomes: list[Any] = [None] * self.count
        self._calls.clear()
        self._ended.clear()

        def run(rank: int) -> None:
            self._own.rank = rank
            try:
                outcomes[rank] = function(Peer(self, rank))
            except Exception as error:
                outcomes[rank] = error
            with self._changed:
                self._ended.add(rank)
                self._changed.notify_all()

        threads = [threading.Thread(target=run, args=[rank]) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def exchange(self, number: int, rank: int, kind: str, value: Any) -> list[Any]:
        """The value that each process gives in its call of this number."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename in (__file__, processes.__file__):
            frame = frame.f_back
        calls = self._calls[number]
        with self._changed:
            calls[rank] = (f"{kind} in {frame.f_code.co_filename}:{frame.f_lineno}", value)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(calls) == self.count or self._ended - calls.keys(), timeout=30)
        where = sorted({where for where, _ in calls.values()})
        assert len(calls) == self.count, f"process {rank} waits for ever, {where[0]}"
        assert len(where) == 1, f"processes wait in different calls: {where}"
        return [calls[rank][1] for rank in range(self.count)]


class Peer(ManyProcesses):
    def __init__(self, peers: Peers, rank: int) -> None:
        self._peers, self.rank, self.count, self._number = peers, rank, peers.count, 0

    def check(self) -> None: ...

    def _exchange(self, messages: list[bytes]) -> list[bytes]:
        return [sent[self.rank] for sent in self._call("exchange", messages)]

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        reduce = {"SUM": sum, "MAX": max}[how.name]
        found = self._call(f"{how.name} of {len(values)}", list(values))
        return [float(reduce(column)) for column in zip(*found, strict=True)]

    def _call(self, kind: str, value: Any) -> list[Any]:
        self._number += 1
        return self._peers.exchange(self._number, self.rank, kind, value)

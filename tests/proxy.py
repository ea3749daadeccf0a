"""A server that goes away and comes back, with no server that does."""

from __future__ import annotations

import socket
import threading
import time


class Proxy:
    """Forwards connections to a server, until it breaks them all off and takes no more."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._frozen = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                while self._frozen.is_set():
                    time.sleep(0.05)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def freeze(self) -> None:
        """Let nothing through any more, and close nothing."""
        self._frozen.set()

    def come_back(self) -> None:
        """Take connections again."""
        self._listener = socket.create_server(("127.0.0.1", int(self.url.rsplit(":", 1)[1])))
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def break_off(self) -> None:
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.close()

"""A proxy that makes a server unreachable and reachable again."""

import socket
import threading
import time
from contextlib import suppress


class Proxy:
    """Forwards connections to a server until it breaks them."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._frozen = threading.Event()
        self._listen(0)
        self.url = f"http://127.0.0.1:{self._sockets[0].getsockname()[1]}"

    def _listen(self, port: int) -> None:
        self._sockets = [socket.create_server(("127.0.0.1", port))]
        threading.Thread(target=self._accept, args=(self._sockets[0],), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                pair = (listener.accept()[0], socket.create_connection(self._target))
                self._sockets += pair
                for ends in (pair, pair[::-1]):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                while self._frozen.is_set():
                    time.sleep(0.05)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def freeze(self) -> None:
        """Forward nothing more, without closing a connection."""
        self._frozen.set()

    def break_off(self) -> None:
        """Close all connections and accept no others."""
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def come_back(self) -> None:
        """Accept connections again."""
        self._listen(int(self.url.rsplit(":", 1)[1]))

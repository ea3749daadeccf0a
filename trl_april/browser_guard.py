"""A guard for the vLLM server: pages that are open in a browser of its machine have no business with it.

A server that only this machine reaches is also reached by every page in a browser on it, and through an SSH tunnel by
those on the machine at the other end. vLLM takes requests from all origins, and its development endpoints, which
training needs, run commands without asking for the API key. `trl-april serve` adds the guard by vLLM's own option
`--middleware`, unless `--allowed-origins` says who may.

The invariant owned here: what has an `Origin` header does not reach the server.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any


Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

REFUSAL = (
    "This server is for training, and browsers are not let in: requests with an Origin header are refused. Start it "
    "with --allowed-origins to let them in."
)


class BrowserGuard:
    """ASGI middleware that refuses what a page in a browser sends, by the `Origin` header, which a page cannot leave
    out of a request that changes anything, and which other clients do not send.

    Args:
        app:
            The ASGI application behind it.
    """

    def __init__(self, app: Callable[[Message, Any, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        if not any(name.lower() == b"origin" for name, _ in scope.get("headers", ())):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": REFUSAL}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": body})

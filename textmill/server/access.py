"""Who may send requests: an API key, the name of the server, and a limit of requests at a time for each client.

All are checked before the body of a request is read, so a refused request costs nothing.
"""

import hashlib
import hmac
import re
from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from textmill.server.requests import ApiError

OPEN_PATHS = frozenset({"/", "/health"})
"""The page, which asks for the key itself, and the check of a load balancer."""
_LOOPBACK = rb"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?"
_LOOPBACK_HOST = re.compile(_LOOPBACK, re.IGNORECASE)
_LOOPBACK_ORIGIN = re.compile(rb"https?://" + _LOOPBACK, re.IGNORECASE)


class AccessControl:
    """ASGI middleware that answers 401 without the key, and 429 beyond ``max_requests_per_client``.

    The key is sent as ``Authorization: Bearer KEY``. A client is an IP address: that of the connection, or behind a
    proxy on this machine that of its ``X-Forwarded-For``. Without a key, and with 0 as the limit, all may send.

    With ``is_private``, the answer is 421 to a ``Host`` that does not name this machine: a web page that points its own
    name at this machine ("DNS rebinding") could use the server through the browser of someone here. It is 403 to an
    ``Origin`` of another machine: a web page can have a browser here send requests, though it cannot read the answers.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None = None, max_requests_per_client: int = 0, is_private: bool = False
    ) -> None:
        self._app, self._is_private = app, is_private
        self._key_digest = None if api_key is None else _digest(api_key.encode())
        self._max_requests = max_requests_per_client
        self._requests_of: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._is_private and (error := _find_foreign_header(scope)):
            await error.response()(scope, receive, send)
            return
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if not self._has_key(scope):
            # Clients look for the first words, which are OpenAI's.
            message = "Incorrect API key provided, or none; send the server's key as a bearer token."
            error = ApiError(401, message, code="invalid_api_key")
            await error.response()(scope, receive, send)
            return
        client = scope["client"][0] if scope.get("client") else ""
        if 0 < self._max_requests <= self._requests_of[client]:
            message = f"{self._max_requests} requests of this client are unfinished, the most at a time. Retry later."
            await ApiError(429, message).response()(scope, receive, send)
            return
        self._requests_of[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests_of[client] -= 1
            if not self._requests_of[client]:
                del self._requests_of[client]

    def _has_key(self, scope: Scope) -> bool:
        if self._key_digest is None:
            return True
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        # Digests have one length, so that the time of the comparison says nothing about the key.
        return hmac.compare_digest(_digest(key.strip()), self._key_digest) and scheme.lower() == b"bearer"


def _find_foreign_header(scope: Scope) -> ApiError | None:
    """Return what is wrong with a request that names another machine than this; None if it names none."""
    for name, value in scope["headers"]:
        if name == b"host" and not _LOOPBACK_HOST.fullmatch(value):
            message = "Without an API key, the server answers requests to localhost, 127.0.0.1 or [::1] only."
            return ApiError(421, message)
        if name == b"origin" and not _LOOPBACK_ORIGIN.fullmatch(value):
            return ApiError(403, "Without an API key, the server answers no web pages of other machines.")
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""Who may send requests: an API key, the name of the server, the origins of web pages, a limit of requests at a time
for each client, and a time limit for the arrival of a request.

All but the last are checked before the body of a request is read, so a refused request costs nothing.
"""

import asyncio
import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Collection

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from lm.common.errors import UserError
from textmill.server.requests import ApiError

_OPEN_PATHS = frozenset({"/", "/health"})  # the page, which asks for the key itself, and the check of a load balancer
_LOOPBACK = rb"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?"
_ARRIVAL_SECONDS = 30.0  # for the headers, and again for the body
ANY_ORIGIN = "*"
_HOST = r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\]"
_ORIGIN = re.compile(rf"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>{_HOST})(:(?P<port>[0-9]{{1,5}}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_origin(text: str) -> str:
    """Return an origin as a browser sends it: in lower case, without the default port of its scheme.

    ``*`` stands for all origins. Raises UserError if the text is neither. Source: RFC 6454, section 6.2.
    """
    if text == ANY_ORIGIN:
        return text
    match = _ORIGIN.fullmatch(text.lower())
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (port is not None and not 0 < port < 1 << 16):
        raise UserError(
            f"--allowed_origins: {text[:80]!r} is not an origin. Write SCHEME://HOST or SCHEME://HOST:PORT without a "
            'path, such as https://app.example.com, or "*" in quotes for all.'
        )
    is_default = port is None or port == _DEFAULT_PORTS.get(match["scheme"])
    return f"{match['scheme']}://{match['host']}" + ("" if is_default else f":{port}")


class AccessControl:
    """ASGI middleware that answers 401 without the key, and 429 beyond ``max_requests_per_client``.

    The key is sent as ``Authorization: Bearer KEY``, or as ``X-Api-Key: KEY``. A client is an IP address: that of the
    connection, or behind a proxy on this machine that of its ``X-Forwarded-For``. Without a key, and with 0 as the
    limit, all may send.

    With ``is_private``, the answer is 421 to a ``Host`` that does not name this machine: a web page that points its own
    name at this machine ("DNS rebinding") could use the server through the browser of someone here. It is 403 to an
    ``Origin`` of another machine that is not among ``allowed_origins``: a web page can have a browser here send
    requests, though it cannot read the answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None = None,
        max_requests_per_client: int = 0,
        is_private: bool = False,
        allowed_origins: Collection[str] = (),
    ) -> None:
        self._app, self._is_private = app, is_private
        self._allowed_origins = frozenset(origin.encode() for origin in allowed_origins)
        self._key_digest = None if api_key is None else _digest(api_key.encode())
        self._max_requests = max_requests_per_client
        self._requests_of: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope["client"][0] if scope.get("client") else ""
        if error := self._find_error(scope, client):
            await error.response(scope["path"])(scope, receive, send)
            return
        is_limited = scope["path"] not in _OPEN_PATHS
        self._requests_of[client] += is_limited
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests_of[client] -= is_limited
            if not self._requests_of[client]:
                del self._requests_of[client]

    def _find_error(self, scope: Scope, client: str) -> ApiError | None:
        """Return why a request is refused; None if it is not."""
        for name, value in scope["headers"] if self._is_private else ():
            if name == b"host" and not re.fullmatch(_LOOPBACK, value, re.IGNORECASE):
                message = "Without an API key, the server answers requests to localhost, 127.0.0.1 or [::1] only."
                return ApiError(421, message)
            if name == b"origin" and not self._is_allowed_origin(value):
                message = (
                    "Without an API key, the server answers no web pages of other machines, unless --allowed_origins "
                    "has their origin."
                )
                return ApiError(403, message)
        if scope["path"] in _OPEN_PATHS:
            return None
        if not self._has_key(scope):
            # Clients look for the first words, which are OpenAI's.
            message = "Incorrect API key provided, or it is missing; send the server's key as a bearer token."
            return ApiError(401, message, code="invalid_api_key")
        if 0 < self._max_requests <= self._requests_of[client]:
            message = f"{self._max_requests} requests of this client are unfinished, the most at a time. Retry later."
            return ApiError(429, message)
        return None

    def _is_allowed_origin(self, origin: bytes) -> bool:
        if ANY_ORIGIN.encode() in self._allowed_origins or origin in self._allowed_origins:
            return True
        return re.fullmatch(rb"https?://" + _LOOPBACK, origin, re.IGNORECASE) is not None

    def _has_key(self, scope: Scope) -> bool:
        if self._key_digest is None:
            return True
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        plain_keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        candidates = ([key] if scheme.lower() == b"bearer" else []) + (plain_keys if len(plain_keys) == 1 else [])
        # Digests have one length, so that the time of the comparison says nothing about the key.
        matches = [hmac.compare_digest(_digest(candidate.strip()), self._key_digest) for candidate in candidates]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class RequestTimeout(H11Protocol):
    """uvicorn's HTTP protocol, which closes a connection if the headers or the body take more than 30 seconds.

    uvicorn itself limits only the time between two requests. The answer is 408, unless the request has one already.
    """

    _timer: asyncio.TimerHandle | None = None
    _timed_cycle: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time of the first headers."""
        super().connection_made(transport)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has arrived, and start or stop the time of the next part."""
        super().handle_events()
        self._update_timer()

    def _update_timer(self) -> None:
        is_arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not is_arriving or self._timed_cycle is not self.cycle:  # the headers of a request make a cycle
            self._stop_timer()
        if is_arriving and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(_ARRIVAL_SECONDS, self._close)
            self._timed_cycle = self.cycle

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        has_response = self.conn.their_state is h11.SEND_BODY and self.cycle.response_started
        if not has_response and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()

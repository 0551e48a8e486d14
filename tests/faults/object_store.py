"""A local S3 server that can fail: with status 500, a connection reset, or a slow response."""

import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

_MAX_DELAY_SECONDS = 1.5  # of a slow response
_ERROR = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>Please try again.</Message></Error>"
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


class ObjectStore:
    """A moto server. After ``fail(kind, share)``, this share of the responses fails, until ``recover()``."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._rng = random.Random(0)
        self.kind, self.share = "", 0.0
        self._server = make_server("127.0.0.1", 0, self._respond, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def fail(self, kind: str, share: float, seed: int) -> None:
        """Fail from now on. ``kind`` is ``500``, ``reset`` or ``slow``."""
        self._rng, self.kind, self.share = random.Random(seed), kind, share

    def recover(self) -> None:
        """Stop failing."""
        self.kind = ""

    def close(self) -> None:
        self._server.shutdown()

    def _respond(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        kind = self.kind if self._rng.random() < self.share else ""
        if kind == "slow":
            time.sleep(self._rng.uniform(0, _MAX_DELAY_SECONDS))
        elif kind == "500":
            start("500 Internal Server Error", [("Content-Type", "text/xml"), ("Content-Length", str(len(_ERROR)))])
            return [_ERROR]
        elif kind == "reset":
            connection: socket.socket = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        return self._app(environ, start)

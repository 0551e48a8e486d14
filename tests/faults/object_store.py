"""An S3 of the suite's own, which can be told to fail: an answer of 500, a connection reset, an answer that is late."""

import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

_SECONDS = 1.5  # that a slow answer is late, at most
_ERROR = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>Please try again.</Message></Error>"
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


class ObjectStore:
    """moto behind a door: ``fail(how, share)`` has that share of the answers fail, until ``mend()``."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._rng = random.Random(0)
        self.how, self.share = "", 0.0
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def fail(self, how: str, share: float, seed: int) -> None:
        """From now on, answer so: ``500``, ``reset`` or ``slow``."""
        self._rng, self.how, self.share = random.Random(seed), how, share

    def mend(self) -> None:
        """Answer as a store should."""
        self.how = ""

    def close(self) -> None:
        self._server.shutdown()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        how = self.how if self._rng.random() < self.share else ""
        if how == "slow":
            time.sleep(self._rng.uniform(0, _SECONDS))
        elif how == "500":
            start("500 Internal Server Error", [("Content-Type", "text/xml"), ("Content-Length", str(len(_ERROR)))])
            return [_ERROR]
        elif how == "reset":
            connection: socket.socket = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        return self._app(environ, start)

"""A local S3 server that counts and delays requests."""

import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

BUCKET = "scale"
COUNTER_PATH = "/_requests"  # returns the number of requests
_KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


class ObjectStore:
    """A moto server that counts its requests and delays each by ``delay_seconds``."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.delay_seconds, self.requests, self._busy_seconds = 0.0, 0, 0.0
        self._server = make_server("127.0.0.1", 0, self._respond, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {**_KEYS, "AWS_ENDPOINT_URL": self.url}
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")).close()

    @property
    def seconds_per_request(self) -> float:
        """Mean time of moto itself."""
        return self._busy_seconds / max(1, self.requests)

    def put(self, path: str, data: bytes) -> None:
        """Write an object."""
        headers = {"Content-Type": "application/octet-stream"}  # moto would take the default for a form
        request = urllib.request.Request(f"{self.url}/{BUCKET}/{path}", data, headers, method="PUT")
        urllib.request.urlopen(request).close()

    def close(self) -> None:
        self._server.shutdown()

    def _respond(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == COUNTER_PATH:
            start("200 OK", [("Content-Type", "text/plain")])
            return [str(self.requests).encode()]
        time.sleep(self.delay_seconds)
        started = time.perf_counter()
        body = self._app(environ, start)
        with self._lock:
            self.requests += 1
            self._busy_seconds += time.perf_counter() - started
        return body

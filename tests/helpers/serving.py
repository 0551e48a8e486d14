"""A web application that runs in a thread of the test."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI


@contextmanager
def serve_app(application: FastAPI, **options: Any) -> Iterator[str]:
    """Serve ``application`` on a free port with options of ``uvicorn.Config``, and yield its URL."""
    server = uvicorn.Server(uvicorn.Config(application, log_level="critical", timeout_graceful_shutdown=1, **options))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()

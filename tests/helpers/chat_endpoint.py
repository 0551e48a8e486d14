"""A server with OpenAI's chat API in threads of the test, which answers as the test says, and records the requests."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: Any, **changes: Any) -> bytes:
    """Return the body of an answer with the content ``text``, with 5 tokens in the prompt and 3 in the answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    return json.dumps({"choices": [choice], "usage": usage, **changes}).encode()


@dataclass
class Reply:
    """What the server sends. Without a status, it closes the connection."""

    body: bytes = b""
    status: int | None = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0


@dataclass
class Asked:
    """A request that the server received."""

    prompt: str
    """The content of the last message."""
    body: dict[str, Any]
    headers: dict[str, str]
    path: str
    time: float


class ChatEndpoint:
    """The server's URL, its ``requests``, and the prompts ``answered`` with status 200.

    ``reply`` returns the reply to a request, given the number of earlier requests with the same prompt.
    """

    def __init__(self, reply: Callable[[Asked, int], Reply]) -> None:
        self.reply = reply
        self.requests: list[Asked] = []
        self.answered: list[str] = []
        self.max_in_flight = 0
        self._in_flight = 0
        self._attempts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                endpoint._handle(self)

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *arguments: Any) -> None:  # a client that is killed
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def prompts(self) -> list[str]:
        """The prompts of all requests, in the order in which they arrived."""
        return [asked.prompt for asked in self.requests]

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        asked = Asked(prompt, body, dict(handler.headers), handler.path, time.monotonic())
        with self._lock:
            self.requests.append(asked)
            attempt = self._attempts[prompt]
            self._attempts[prompt] += 1
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
        reply = self.reply(asked, attempt)
        self._is_stopped.wait(reply.delay)
        with self._lock:
            self._in_flight -= 1
            if reply.status == 200:
                self.answered.append(prompt)
        if reply.status is None:
            handler.close_connection = True
            return
        handler.send_response(reply.status)
        for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        with suppress(OSError):
            handler.wfile.write(reply.body)

    def start(self) -> None:
        """Answer requests in threads."""
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections from now on, and end all delays."""
        self._is_stopped.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serve_chat(reply: Callable[[Asked, int], Reply]) -> Iterator[ChatEndpoint]:
    """Serve replies until the end of the block."""
    endpoint = ChatEndpoint(reply)
    endpoint.start()
    try:
        yield endpoint
    finally:
        endpoint.stop()

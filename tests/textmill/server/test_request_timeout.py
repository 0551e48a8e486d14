"""Half-sent requests: the server closes their connections, and no others."""

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Request

from tests.helpers.serving import serve_app
from textmill.server import access
from textmill.server.access import AccessControl, RequestTimeout

SECONDS = 1.0
SLOW_SECONDS = 2.5  # longer than a request may take to arrive
POST = b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    application = FastAPI()
    application.add_middleware(AccessControl, api_key=None)

    @application.post("/slow")
    async def slow(request: Request) -> str:
        await request.body()
        await asyncio.sleep(SLOW_SECONDS)
        return "done"

    @application.post("/fast")
    async def fast(request: Request) -> str:
        await request.body()
        return "done"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access, "_ARRIVAL_SECONDS", SECONDS)
        with serve_app(application, http=RequestTimeout) as url:
            yield "127.0.0.1", int(url.rpartition(":")[2])


def read_all(connection: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    connection.settimeout(60)
    received = b""
    while block := connection.recv(1 << 16):
        received += block
    return received


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /slow HT",
        POST,
        POST + b"\r\nab",
        b"POST /fast HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nab",
    ],
    ids=["nothing", "request line", "headers", "body", "chunked body"],
)
def test_a_half_sent_request_is_closed(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        assert read_all(connection).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@pytest.mark.slow
def test_bytes_that_trickle_in_do_not_extend_the_time(address: tuple[str, int]) -> None:
    start = time.monotonic()
    with socket.create_connection(address) as connection:
        connection.sendall(POST)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            while time.monotonic() - start < 60:
                connection.sendall(b"X-A: b\r\n")
                time.sleep(0.1)


@pytest.mark.slow
def test_the_rest_of_a_refused_request_is_not_waited_for(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(POST.replace(b"/slow", b"/nowhere") + b"\r\nab")
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 404") and b" 408 " not in received


@pytest.mark.slow
def test_the_answer_may_take_longer_and_the_connection_goes_on(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.settimeout(60)
        for path in (b"/slow", b"/fast", b"/slow"):
            connection.sendall(POST.replace(b"/slow", path) + b"\r\nab")
            time.sleep(0.1)
            connection.sendall(b"cd")
            received = b""
            while not received.endswith(b'"done"'):
                received += connection.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200")

"""A server with many clients, clients that leave, and failures while it generates."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lm.model.config import MoEConfig
from tests.helpers.completion_server import (
    CLIENT_TIMEOUT_SECONDS,
    CONTEXT,
    RunningServer,
    httpx,
    openai,
    run_server,
)
from tests.helpers.generating import fixed_model, make_model
from tests.helpers.limits import TIMEOUT_SCALE
from textmill.server.logprobs import LogprobsWriter


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server that generates one completion at a time, queues two more, and takes 0.1 s per token.

    Its completions have the length that was asked for: <|endoftext|>, the last id, is never chosen.
    """
    model = fixed_model([0.0] * 256 + [-1000.0], CONTEXT).eval()
    hidden = model.hidden_states

    def slow_hidden(*arguments: Any) -> Any:
        time.sleep(0.1)
        return hidden(*arguments)

    monkeypatch.setattr(model, "hidden_states", slow_hidden)
    with run_server(model, 1, 2) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_other_requests_do_not_wait_for_log_probabilities(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    is_rendering, is_healthy, to_json = threading.Event(), threading.Event(), LogprobsWriter.to_json

    def wait(*arguments: Any) -> Any:
        is_rendering.set()
        assert is_healthy.wait(CLIENT_TIMEOUT_SECONDS)
        return to_json(*arguments)

    monkeypatch.setattr(LogprobsWriter, "to_json", wait)
    with ThreadPoolExecutor() as pool:
        request = {"prompt": "ab", "echo": True, "logprobs": 2, "max_tokens": 2, "stream": stream}
        response = pool.submit(server.post, request)
        assert is_rendering.wait(CLIENT_TIMEOUT_SECONDS)
        try:
            assert httpx.get(f"{server.url}/health", timeout=10 * TIMEOUT_SCALE).status_code == 200
        finally:
            is_healthy.set()
        assert response.result().status_code == 200


@pytest.fixture(scope="module")
def mixture_server() -> Iterator[RunningServer]:
    """A server of a mixture of experts: which experts compute a token must not depend on the other requests."""
    moe = MoEConfig(num_experts=4, top_k=2, bias_update_rate=0.1, capacity_factor=1.0)
    with run_server(make_model(257, CONTEXT, moe=moe).eval()) as running:
        yield running


@pytest.mark.parametrize("name", ["server", "mixture_server"])
def test_many_streams_at_once_have_the_same_text_as_single_ones(name: str, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue(name)
    prompts = [f"Client {number}: {'x' * number}" for number in range(20)]
    expected = [server.expected_text(prompt, 30) for prompt in prompts]
    client = openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=CLIENT_TIMEOUT_SECONDS
    )

    async def ask(prompt: str) -> str:
        stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=30, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*map(ask, prompts))

    assert asyncio.run(ask_all()) == expected


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_the_generation(slow: RunningServer, stream: bool) -> None:
    """The first generation runs, the second is in the queue."""
    body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = ("127.0.0.1", int(slow.url.rpartition(":")[2]))
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        for number, connection in enumerate((first, second), start=1):
            connection.sendall(head + body)
            slow.wait_for_generations(number)
        second.close()
        slow.wait_for_generations(1)
        first.close()
        slow.wait_for_generations(0)
    assert slow.post({"prompt": "a", "max_tokens": 1}).status_code == 200
    metrics = httpx.get(f"{slow.url}/metrics", timeout=CLIENT_TIMEOUT_SECONDS).text
    assert "\ntextmill_prompt_tokens_total 2.0\n" in metrics, "without the one that left the queue"
    generated = re.search(r"^textmill_completion_tokens_total (.+)$", metrics, re.MULTILINE)
    assert generated and float(generated[1]) < 500, "the first one ended early"


def test_a_full_queue_is_reported_as_429(slow: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 100, "stream": True}
    with httpx.stream(
        "POST", f"{slow.url}/v1/completions", json={**body, "n": 3}, timeout=CLIENT_TIMEOUT_SECONDS
    ) as first:
        assert first.status_code == 200
        response = slow.post(body)
        assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["type"] == "rate_limit_error"
    slow.wait_for_generations(0)
    assert slow.post({"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_failure_of_the_model_is_reported_as_500(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(257, CONTEXT).eval()
    with run_server(model) as other:

        def fail(*arguments: Any) -> None:
            raise MemoryError("secret")

        with monkeypatch.context() as patch:
            patch.setattr(model, "hidden_states", fail)
            response = other.post({"prompt": "a"})
            assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
            streamed = other.post({"prompt": "a", "stream": True}).text
            assert "server_error" in streamed and streamed.endswith("data: [DONE]\n\n") and "secret" not in streamed
        assert other.post({"prompt": "a"}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_server_ends_open_responses_by_an_error(number: int) -> None:
    """Long after the time that the server leaves them."""
    code = """
import time
from flows.prefect_support.signals import handle_termination
from textmill.server import listener
from lm.inference.engine import Engine
from tests.helpers.generating import LoadedModel, make_model
from tests.helpers.tokenizers import bytes_tokenizer
handle_termination()
listener._SHUTDOWN_SECONDS = 1
Engine.decode = lambda engine: time.sleep(0.1)  # no generation ever ends
model = LoadedModel(make_model(257, 64).eval(), bytes_tokenizer(["<|endoftext|>"]))
listener.serve(model, "127.0.0.1", 0, "cpu", max_batch_size=2)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    url = re.search(r"(http://\S+)/v1", process.stdout.readline())
    assert url
    answers: list[Any] = []

    def ask(is_streamed: bool) -> None:
        body = {"prompt": "a", "stream": is_streamed}
        answers.append(httpx.post(f"{url[1]}/v1/completions", json=body, timeout=CLIENT_TIMEOUT_SECONDS))

    threads = [threading.Thread(target=ask, args=(is_streamed,)) for is_streamed in (False, True)]
    for thread in threads:
        thread.start()
    time.sleep(2 * TIMEOUT_SCALE)
    process.send_signal(number)
    for thread in threads:
        thread.join()
    assert process.wait(CLIENT_TIMEOUT_SECONDS) == 0
    assert "Traceback" not in process.stderr.read()
    assert sorted(answer.status_code for answer in answers) == [200, 503]
    assert all("The server is stopping." in answer.text for answer in answers)

"""A server within a limit of memory for keys and values: who fits runs, who does not fit yet waits, nobody is ended."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lm.common.errors import UserError
from lm.inference.kv_cache import page_bytes
from lm.inference.scheduler import Scheduler
from tests.helpers.completion_server import CLIENT_TIMEOUT_SECONDS, RunningServer, httpx, run_server
from tests.helpers.generating import make_model
from textmill.server.kv_memory import describe_kv_memory

CONTEXT, PAGES = 128, 5  # all requests together have 80 tokens
MODEL = make_model(257, CONTEXT).eval()
PAGE_BYTES = page_bytes(MODEL.config, torch.float32, False)


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    with run_server(MODEL, 4, 2, max_context=96, kv_bytes=PAGES * PAGE_BYTES) as running:
        yield running


def test_a_request_that_can_never_fit_is_refused(small: RunningServer) -> None:
    fitting = {"prompt": "a" * 60, "max_tokens": 20, "temperature": 0}
    assert small.post(fitting).json()["choices"][0]["text"] == small.expected_text("a" * 60, 20)
    response = small.post({"prompt": "a" * 60, "max_tokens": 21})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    message = "The prompt has 60 tokens and 21 more are requested; this server takes at most 80."
    assert (error["message"], error["max_tokens"]) == (message, 20)
    assert httpx.get(f"{small.url}/v1/models").json()["data"][0]["max_model_len"] == 80


def test_requests_wait_for_memory_and_have_the_same_text(small: RunningServer) -> None:
    """Six of three pages each: one runs after the other."""
    prompts = [f"{number} is a prompt" for number in range(6)]
    expected = [small.expected_text(prompt, 20) for prompt in prompts]

    def ask(prompt: str) -> Any:
        return small.post({"prompt": prompt, "max_tokens": 20, "temperature": 0}).json()["choices"][0]

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(ask, prompts))
    assert [(answer["text"], answer["finish_reason"]) for answer in answers] == [(text, "length") for text in expected]


def test_a_full_queue_is_429_and_the_running_request_goes_on(
    small: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first takes all memory. Five more places are in the queue, although three rows are free."""
    body = {"prompt": "a" * 16, "max_tokens": 64, "temperature": 0}
    opened, hidden = threading.Event(), MODEL.hidden_states

    def wait(*arguments: Any) -> Any:
        assert opened.wait(CLIENT_TIMEOUT_SECONDS)
        return hidden(*arguments)

    monkeypatch.setattr(MODEL, "hidden_states", wait)
    with httpx.stream(
        "POST", f"{small.url}/v1/completions", json={**body, "n": 5, "stream": True}, timeout=CLIENT_TIMEOUT_SECONDS
    ) as first:
        assert first.status_code == 200
        response = small.post({**body, "n": 2})
        assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
        opened.set()
        text = "".join(first.iter_text())
    assert text.count('"finish_reason": "length"') == 5
    small.wait_for_generations(0)


def test_a_context_longer_than_the_models_is_refused() -> None:
    with (
        pytest.raises(UserError, match=r"--max_context is 200; this model has a context of 128 tokens"),
        run_server(MODEL, max_context=200),
    ):
        pass


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        (16, "KV cache: up to {} of memory, for 256 tokens; a request can have 128."),
        (3, "KV cache: up to {} of memory, for 48 tokens; a request can have only 48 of the 128. Set --kv_memory"),
    ],
)
def test_the_memory_is_described(pages: int, text: str) -> None:
    scheduler = Scheduler(MODEL, 2, 0, kv_bytes=pages * PAGE_BYTES)
    scheduler.close()
    size = f"{pages * PAGE_BYTES / 1000:.3g} kB"
    assert describe_kv_memory(scheduler, CONTEXT).startswith(text.format(size))

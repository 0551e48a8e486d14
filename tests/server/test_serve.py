"""The HTTP server: OpenAI's client, invalid requests, and clients that disconnect."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from flows.cli import commands
from flows.cli.parser import main
from flows.server.app import build_app
from flows.server.logprobs import CompletionLogprobs
from lm.data.dialogs import Message
from lm.inference.chat_format import PLAIN_STOP, render_plain
from lm.inference.completion import complete
from lm.inference.config import SampleConfig
from lm.inference.scheduler import Scheduler
from lm.model.moe_config import MoEConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.generating import LoadedModel, fixed_model, make_model
from tests.helpers.limits import TIMEOUT_SCALE, wait_for
from tests.helpers.serving import serve_app

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

END = "<|endoftext|>"
TOKENIZER = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], [END])
CONTEXT = 512
CLIENT_TIMEOUT_SECONDS = 120 * TIMEOUT_SCALE


class RunningServer:
    """A running server, and its clients."""

    def __init__(self, url: str, scheduler: Scheduler, model: TransformerLM) -> None:
        self.url, self.scheduler, self.model = url, scheduler, model
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=CLIENT_TIMEOUT_SECONDS)

    def post(self, body: Any, path: str = "completions") -> Any:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return httpx.post(f"{self.url}/v1/{path}", content=content, timeout=CLIENT_TIMEOUT_SECONDS)

    def expected_text(self, prompt: str, tokens: int, **options: Any) -> str:
        config = SampleConfig(prompts=[prompt], max_new_tokens=tokens, temperature=0, **options)
        return complete(self.model, TOKENIZER, config)[0].text

    def wait_for_generations(self, count: int) -> None:
        wait_for(lambda: len(self.scheduler) == count, 60, f"time with {count} unfinished generations")


@contextmanager
def run_server(model: TransformerLM, max_batch_size: int = 4, max_waiting: int = 30) -> Iterator[RunningServer]:
    application = build_app(model, TOKENIZER, "tiny", max_batch_size, max_waiting)
    with serve_app(application) as url:
        yield RunningServer(url, application.state.scheduler, model)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with run_server(make_model(257, CONTEXT).eval()) as running:
        yield running


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


def test_completions(server: RunningServer) -> None:
    expected = server.expected_text("Once", 12)
    for prompt in ("Once", list(b"Once")):
        completion = server.client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        assert completion.choices[0].text == expected
        assert completion.choices[0].finish_reason == "length" and completion.choices[0].logprobs is None
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 12, 16)
        assert (completion.object, completion.model) == ("text_completion", "tiny")
        assert completion.id.startswith("cmpl-")
        assert abs(completion.created - time.time()) < 60
    assert [model.id for model in server.client.models.list()] == ["tiny"]


def test_several_prompts_and_choices(server: RunningServer) -> None:
    completion = server.client.completions.create(model="tiny", prompt=["ab", "c"], n=2, max_tokens=5, temperature=0)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    expected = [server.expected_text(prompt, 5) for prompt in ("ab", "ab", "c", "c")]
    assert [choice.text for choice in completion.choices] == expected
    assert completion.usage.prompt_tokens == 3


def test_seeds(server: RunningServer) -> None:
    def complete_twice(**options: Any) -> list[str]:
        request = {"model": "tiny", "prompt": "a", "n": 2, "max_tokens": 20, "temperature": 1, **options}
        return [choice.text for choice in server.client.completions.create(**request).choices]

    assert complete_twice(seed=-5) == complete_twice(seed=-5)
    assert complete_twice(seed=(1 << 63) - 1) == complete_twice(seed=(1 << 63) - 1)
    assert len({*complete_twice(), *complete_twice()}) == 4


def test_a_stream(server: RunningServer) -> None:
    stream = server.client.completions.create(
        model="tiny", prompt="Once", max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == server.expected_text("Once", 12)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert usage.choices == [] and usage.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_in_done(server: RunningServer) -> None:
    response = server.post({"prompt": "a", "stream": True, "max_tokens": 2})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    assert all(line.startswith("data: ") for line in response.text.split("\n\n") if line)


def test_chat(server: RunningServer) -> None:
    dialog: list[Message] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi!"},
    ]
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Hi!"},
    ]
    expected = server.expected_text(render_plain(dialog), 30, stop=[PLAIN_STOP]).lstrip()
    request: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 30}
    completion = server.client.chat.completions.create(**request)
    message = completion.choices[0].message
    assert (message.role, message.content) == ("assistant", expected)
    assert completion.object == "chat.completion"
    assert completion.usage.prompt_tokens == len(render_plain(dialog))
    chunks = list(server.client.chat.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length" and chunks[0].object == "chat.completion.chunk"
    del request["max_completion_tokens"]
    assert server.client.chat.completions.create(**request).usage.total_tokens <= CONTEXT


def model_that_samples(*ids: int) -> TransformerLM:
    """Return a model that samples one of ``ids`` after any prompt."""
    return fixed_model([50.0 if token_id in ids else 0.0 for token_id in range(257)], 64).eval()


def test_stop_texts_and_stop_tokens(server: RunningServer) -> None:
    with run_server(model_that_samples(ord("a"))) as other:
        for stream in (False, True):
            response = other.post({"prompt": "b", "stop": ["x", "aaa"], "max_tokens": 9, "stream": stream}).text
            assert '"stop"' in response and '"text": "a' not in response and '"text":"a' not in response
    with run_server(model_that_samples(256)) as other:
        completion = other.client.completions.create(model="tiny", prompt=END, max_tokens=9)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("", "stop")
        assert completion.usage.prompt_tokens == len(END)  # plain text


def test_a_stream_has_only_whole_characters(server: RunningServer) -> None:
    with run_server(model_that_samples(0xC3, 0xA9)) as other:
        stream = other.client.completions.create(
            model="tiny", prompt="b", max_tokens=40, temperature=1, seed=1, stream=True, logprobs=0, top_p=1
        )
        chunks = [chunk.choices[0] for chunk in stream]
        expected = other.client.completions.create(
            model="tiny", prompt="b", max_tokens=40, temperature=1, seed=1, logprobs=0, top_p=1
        ).choices[0]
    assert "".join(chunk.text for chunk in chunks) == expected.text and "é" in expected.text
    assert [token for chunk in chunks for token in chunk.logprobs.tokens] == expected.logprobs.tokens
    assert [place for chunk in chunks for place in chunk.logprobs.text_offset] == expected.logprobs.text_offset


def test_echo_and_logprobs(server: RunningServer) -> None:
    """With max_tokens=0 the response has the log-probabilities of the prompt, as evaluations need them."""
    request: dict[str, Any] = {"model": "tiny", "prompt": "Onceé", "echo": True, "logprobs": 0, "temperature": 0}
    scored = server.client.completions.create(**request, max_tokens=0).choices[0]
    assert scored.text == "Onceé" and scored.finish_reason == "length"
    assert scored.logprobs.token_logprobs[0] is None and len(scored.logprobs.token_logprobs) == 6
    assert all(value < 0 for value in scored.logprobs.token_logprobs[1:])
    assert scored.logprobs.tokens[:4] == ["O", "n", "c", "e"]
    assert scored.logprobs.text_offset == [0, 1, 2, 3, 4, 4]
    longer = server.client.completions.create(**request, max_tokens=3).choices[0]
    assert longer.logprobs.token_logprobs[:6] == pytest.approx(scored.logprobs.token_logprobs)
    assert len(longer.logprobs.token_logprobs) == 9 and longer.text.startswith("Onceé")
    streamed = list(server.client.completions.create(**request, max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == longer.text
    nothing = server.client.completions.create(**{**request, "prompt": ""}, max_tokens=3).choices[0]
    assert END not in nothing.text and nothing.logprobs.text_offset[:2] == [0, 0]
    plain = server.client.completions.create(**{**request, "logprobs": None}, max_tokens=3).choices[0]
    assert plain.text == longer.text and plain.logprobs is None
    bias = {"logit_bias": {str(0xA9): 100}, "max_tokens": 2}
    cut = server.client.completions.create(**{**request, "prompt": [0x61, 0xC3]}, **bias).choices[0]
    assert cut.text == "a\ufffd" + 2 * "\ufffd" and cut.logprobs.text_offset == [0, 1, 2, 3], "the prompt is a text"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", b"", 400, None),
        ("completions", b"{", 400, None),
        ("completions", b"[]", 400, None),
        ("completions", b"\xff\xfe", 400, None),
        ("completions", b"[" * 500_000, 400, None),
        ("completions", b'{"prompt": "a", "other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
        ("completions", b'{"prompt": "\\ud800"}', 400, None),
        ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        ("completions", b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "temperature": "1"}, 400, "temperature"),
        ("completions", {"prompt": "a", "top_p": 1.1}, 400, "top_p"),
        ("completions", {"prompt": "a", "top_k": 10**400}, 400, "top_k"),
        ("completions", {"prompt": "a", "min_p": True}, 400, "min_p"),
        ("completions", {"prompt": "a", "repetition_penalty": 1e-320}, 400, "repetition_penalty"),
        ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": CONTEXT}, 400, "prompt"),
        ("completions", {"prompt": "a" * CONTEXT}, 400, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "messages"),
        ("completions", {"prompt": "a", "n": 0}, 400, "n"),
        ("completions", {"prompt": "a", "n": 10**9}, 400, "n"),
        ("completions", b'{"prompt": ["a", "b"], "n": ' + b"9" * 4300 + b"}", 400, "n"),
        ("completions", b'{"prompt": "a", "best_of": ' + b"9" * 4300 + b"}", 400, "best_of"),
        ("completions", b'{"prompt": "a", "max_tokens": ' + b"9" * 4300 + b"}", 400, "max_tokens"),
        (
            "chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": ' + b"9" * 4300 + b"}",
            400,
            "max_completion_tokens",
        ),
        ("completions", {"prompt": ["a"] * 99}, 400, "n"),
        ("completions", {"prompt": "a", "seed": 1 << 63}, 400, "seed"),
        ("completions", {"prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
        ("completions", {"prompt": "a", "stop": 5}, 400, "stop"),
        ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ("completions", {"prompt": "a", "logprobs": True}, 400, "logprobs"),
        ("completions", {"prompt": "a", "stream": "yes"}, 400, "stream"),
        ("completions", {"prompt": "a", "frequency_penalty": "abc"}, 400, "frequency_penalty"),
        ("completions", {"prompt": "a", "presence_penalty": 2.1}, 400, "presence_penalty"),
        ("completions", {"prompt": "a", "best_of": -3}, 400, "best_of"),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("completions", {"prompt": "a", "best_of": 1, "n": 2}, 400, "best_of"),
        ("completions", {"prompt": "a", "best_of": 2, "stream": True}, 400, "best_of"),
        ("completions", {"prompt": "a", "best_of": 10**9}, 400, "n"),
        ("completions", {"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {"257": 5}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {"-1": 5}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {"9" * 5000: 5}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {str(n): 5 for n in range(5000)}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "model": "x" * 500_000}, 404, "model"),
        ("completions", {"prompt": "a", "stream_options": []}, 400, "stream_options"),
        ("completions", {"prompt": "a", "model": "gpt"}, 404, "model"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": None}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [[]]}, 400, "prompt"),
        ("completions", {"prompt": [257]}, 400, "prompt"),
        ("completions", {"prompt": [-1]}, 400, "prompt"),
        ("completions", {"prompt": [10**30]}, 400, "prompt"),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt"),
        ("completions", {"prompt": [None] * 150_000}, 400, "prompt"),
        ("completions", {"prompt": "a" * (CONTEXT + 1)}, 400, "prompt"),
        ("completions", {"prompt": "a" * (1 << 21)}, 413, None),
        ("chat/completions", {}, 400, "messages"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": "Hi"}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "king", "content": "Hi"}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * CONTEXT}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": 1}, 400, "logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, 400, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools"),
        ("nothing", {}, 404, None),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, (dict, bytes)) else "",
)
def test_an_invalid_request_is_refused(
    server: RunningServer, path: str, body: Any, status: int, param: str | None
) -> None:
    response = server.post(body, path)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
    assert len(server.scheduler) == 0
    assert server.post({"prompt": "a", "max_tokens": 1, "new_field": {"x": [1]}}).status_code == 200


def test_too_many_log_probabilities_are_refused(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.server.app._MAX_SCORES", 2 * (4 + 3) * (1 + 2))
    request = {"prompt": "abcd", "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    assert server.post(request).status_code == 200
    refused = server.post({**request, "n": 3})
    assert refused.status_code == 400 and "63 log-probabilities are requested; at most 42" in refused.text
    assert server.post({**request, "n": 3, "logprobs": None}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_other_requests_do_not_wait_for_log_probabilities(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    is_rendering, is_healthy, to_json = threading.Event(), threading.Event(), CompletionLogprobs.to_json

    def wait(*arguments: Any) -> Any:
        is_rendering.set()
        assert is_healthy.wait(CLIENT_TIMEOUT_SECONDS)
        return to_json(*arguments)

    monkeypatch.setattr(CompletionLogprobs, "to_json", wait)
    with ThreadPoolExecutor() as pool:
        request = {"prompt": "ab", "echo": True, "logprobs": 2, "max_tokens": 2, "stream": stream}
        response = pool.submit(server.post, request)
        assert is_rendering.wait(CLIENT_TIMEOUT_SECONDS)
        try:
            assert httpx.get(f"{server.url}/health", timeout=10 * TIMEOUT_SCALE).status_code == 200
        finally:
            is_healthy.set()
        assert response.result().status_code == 200


def test_openais_client_raises_its_own_exceptions(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.completions.create(model="tiny", prompt="a" * CONTEXT, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405


@pytest.mark.parametrize("has_length", [True, False])
def test_a_long_body_is_refused_before_its_end(server: RunningServer, has_length: bool) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=CLIENT_TIMEOUT_SECONDS)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader(*("Content-Length", str(100 << 20)) if has_length else ("Transfer-Encoding", "chunked"))
    connection.endheaders()
    body = b"a" * (2 << 20)
    connection.send(body if has_length else b"%x\r\n" % len(body) + body)
    assert connection.getresponse().status == 413
    connection.close()
    assert server.post({"prompt": "a"}).status_code == 200


def test_a_body_of_100_mb_is_refused(server: RunningServer) -> None:
    assert server.post(b"a" * (100 << 20)).status_code == 413
    assert server.post({"prompt": "a"}).status_code == 200


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
        started = time.monotonic()
        second.close()
        slow.wait_for_generations(1)
        first.close()
        slow.wait_for_generations(0)
    assert slow.post({"prompt": "a", "max_tokens": 1}).status_code == 200
    assert time.monotonic() - started < 40, "500 tokens take at least 50 s"
    metrics = httpx.get(f"{slow.url}/metrics", timeout=CLIENT_TIMEOUT_SECONDS).text
    assert "\ntextmill_prompt_tokens_total 2.0\n" in metrics, "without the one that left the queue"


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


def test_the_command_prints_its_url(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(commands, "resolve_model", lambda *_: LoadedModel(make_model(257, 8).eval(), TOKENIZER))

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        address = sockets[0].getsockname()
        assert f"http://{address[0]}:{address[1]}/v1" in capsys.readouterr().out
        assert address[0] == "127.0.0.1"
        assert main(["serve", "--port", str(address[1])]) == 2  # the port is in use
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert main(["serve", "--port", "0"]) == 0
    assert "Change --host or --port" in capsys.readouterr().err
    for option in (["--max-batch-size", "0"], ["--max-batch-size", str(10**17)], ["--prefix-cache-mb", str(10**15)]):
        assert main(["serve", *option]) == 2


def test_a_private_server_serves_local_clients() -> None:
    application = build_app(make_model(257, CONTEXT).eval(), TOKENIZER, "tiny", 1, is_private=True)
    with serve_app(application) as url:
        for host in ("127.0.0.1", "localhost"):
            client = openai.OpenAI(base_url=f"{url}/v1".replace("127.0.0.1", host), api_key="none", max_retries=0)
            assert (
                client.completions.create(model="tiny", prompt="a", max_tokens=2, temperature=0).usage.completion_tokens
                == 2
            )
        assert httpx.get(f"{url}/health", headers={"Host": "evil.example"}).status_code == 421
    assert not application.state.scheduler.is_running, "it ends with the server"


def test_an_empty_answer_may_be_null(server: RunningServer) -> None:
    dialog = [("user", "a"), ("assistant", None), ("user", "b")]
    messages = [{"role": role, "content": content} for role, content in dialog]
    assert server.post({"messages": messages, "max_tokens": 1}, "chat/completions").status_code == 200


def test_messages_name_fields_and_no_types(server: RunningServer) -> None:
    message = server.post({"prompt": "a", "stop": 5}).json()["error"]["message"]
    assert message.startswith("stop: ")


def test_head_and_wrong_methods(server: RunningServer) -> None:
    assert httpx.head(f"{server.url}/health").status_code == 200
    response = httpx.get(f"{server.url}/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_server_ends_open_responses_by_an_error(number: int) -> None:
    """Long after the time that the server leaves them."""
    code = """
import signal, time
from flows.prefect_support.signals import raise_terminated
from flows.server import app
from lm.inference.engine import Engine
from tests.helpers.generating import LoadedModel, make_model
from tests.helpers.tokenizers import bytes_tokenizer
signal.signal(signal.SIGTERM, raise_terminated)
app._SHUTDOWN_SECONDS = 1
Engine.step = lambda engine: time.sleep(0.1)  # no generation ever ends
app.serve(LoadedModel(make_model(257, 64).eval(), bytes_tokenizer(["<|endoftext|>"])), "127.0.0.1", 0, 2, "cpu")
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    url = process.stdout.readline().split()[3].removesuffix("/v1")
    answers: list[Any] = []

    def ask(is_streamed: bool) -> None:
        body = {"prompt": "a", "stream": is_streamed}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=CLIENT_TIMEOUT_SECONDS))

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

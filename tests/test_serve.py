"""The HTTP server: OpenAI's own client, hostile requests, and clients that leave."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from flows import serve
from flows.cli import main
from flows.serve import build_app
from lm import dialog
from lm.completion import complete
from lm.model import TransformerLM
from lm.sampling import SampleConfig
from lm.scheduler import Scheduler
from lm.tokenizer import Tokenizer
from tests.generating import fixed_model, make_model

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

END = "<|endoftext|>"
TOKENIZER = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], [END])
CONTEXT = 512


class Served:
    """A server of a model, and the ways to ask it."""

    def __init__(self, url: str, scheduler: Scheduler, model: TransformerLM) -> None:
        self.url, self.scheduler, self.model = url, scheduler, model
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)

    def post(self, body: Any, path: str = "completions") -> Any:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return httpx.post(f"{self.url}/v1/{path}", content=content, timeout=30)

    def alone(self, prompt: str, tokens: int, **config: Any) -> str:
        wanted = SampleConfig(prompts=[prompt], max_new_tokens=tokens, temperature=0, **config)
        return complete(self.model, TOKENIZER, wanted)[0].text

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.scheduler) != count:
            assert time.monotonic() < deadline, f"{len(self.scheduler)} instead of {count} under way"
            time.sleep(0.01)


@contextmanager
def serving(model: TransformerLM, max_batch_size: int = 4, max_waiting: int = 30) -> Iterator[Served]:
    app = build_app(model, TOKENIZER, "tiny", max_batch_size, max_waiting)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.scheduler, model)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(make_model(257, CONTEXT).eval()) as found:
        yield found


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with a row and two places to wait, whose answers take seconds."""
    model = make_model(257, CONTEXT).eval()
    hidden = model.hidden

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.03)
        return hidden(*arguments)

    monkeypatch.setattr(model, "hidden", slowly)
    with serving(model, 1, 2) as found:
        yield found


def test_completions_of_openais_client(served: Served) -> None:
    expected = served.alone("Once", 12)
    for prompt in ("Once", list(b"Once")):
        found = served.client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        assert found.choices[0].text == expected
        assert found.choices[0].finish_reason == "length" and found.choices[0].logprobs is None
        assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (4, 12, 16)
        assert found.object == "text_completion" and found.model == "tiny" and found.id.startswith("cmpl-")
        assert abs(found.created - time.time()) < 60
    assert [one.id for one in served.client.models.list()] == ["tiny"]


def test_several_prompts_and_choices(served: Served) -> None:
    found = served.client.completions.create(model="tiny", prompt=["ab", "c"], n=2, max_tokens=5, temperature=0)
    assert [one.index for one in found.choices] == [0, 1, 2, 3]
    assert [one.text for one in found.choices] == [served.alone(prompt, 5) for prompt in ("ab", "ab", "c", "c")]
    assert found.usage.prompt_tokens == 3


def test_seeds(served: Served) -> None:
    def ask(**more: Any) -> list[str]:
        found = served.client.completions.create(model="tiny", prompt="a", n=2, max_tokens=20, temperature=1, **more)
        return [one.text for one in found.choices]

    assert ask(seed=-5) == ask(seed=-5)
    assert ask(seed=(1 << 63) - 1) == ask(seed=(1 << 63) - 1)
    assert len({*ask(), *ask()}) == 4


def test_streams_of_openais_client(served: Served) -> None:
    stream = served.client.completions.create(
        model="tiny", prompt="Once", max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == served.alone("Once", 12)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert usage.choices == [] and usage.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_in_done(served: Served) -> None:
    answer = served.post({"prompt": "a", "stream": True, "max_tokens": 2})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")
    assert all(line.startswith("data: ") for line in answer.text.split("\n\n") if line)


def test_chat(served: Served) -> None:
    said = [dialog.Message("system", "Be kind."), dialog.Message("user", "Hi!")]
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Hi!"},
    ]
    expected = served.alone(dialog.render(said), 30, stop=[dialog.STOP]).lstrip()
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 30}
    found = served.client.chat.completions.create(**asked)
    message = found.choices[0].message
    assert (message.role, message.content) == ("assistant", expected)
    assert found.object == "chat.completion" and found.usage.prompt_tokens == len(dialog.render(said))
    chunks = list(served.client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length" and chunks[0].object == "chat.completion.chunk"
    del asked["max_completion_tokens"]
    assert served.client.chat.completions.create(**asked).usage.total_tokens <= CONTEXT


def always(*ids: int) -> TransformerLM:
    """A model that draws one of ``ids``, whatever came before."""
    return fixed_model([50.0 if token_id in ids else 0.0 for token_id in range(257)], 64).eval()


def test_stop_texts_and_tokens(served: Served) -> None:
    with serving(always(ord("a"))) as one:
        for stream in (False, True):
            answer = one.post({"prompt": "b", "stop": ["x", "aaa"], "max_tokens": 9, "stream": stream}).text
            assert '"stop"' in answer and '"text": "a' not in answer and '"text":"a' not in answer
    with serving(always(256)) as one:
        found = one.client.completions.create(model="tiny", prompt=END, max_tokens=9)
        assert (found.choices[0].text, found.choices[0].finish_reason) == ("", "stop")
        assert found.usage.prompt_tokens == len(END)  # plain text


def test_no_stream_has_half_a_character(served: Served) -> None:
    with serving(always(0xC3, 0xA9)) as one:
        stream = one.client.completions.create(
            model="tiny", prompt="b", max_tokens=40, temperature=1, seed=1, stream=True, logprobs=0, top_p=1
        )
        chunks = [chunk.choices[0] for chunk in stream]
        whole = one.client.completions.create(
            model="tiny", prompt="b", max_tokens=40, temperature=1, seed=1, logprobs=0, top_p=1
        ).choices[0]
    assert "".join(chunk.text for chunk in chunks) == whole.text and "é" in whole.text
    assert [token for chunk in chunks for token in chunk.logprobs.tokens] == whole.logprobs.tokens
    assert [place for chunk in chunks for place in chunk.logprobs.text_offset] == whole.logprobs.text_offset


def test_echo_and_logprobs(served: Served) -> None:
    """With no new tokens: a text's own log-probabilities, as evaluations ask for them."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Onceé", "echo": True, "logprobs": 0, "temperature": 0}
    scored = served.client.completions.create(**asked, max_tokens=0).choices[0]
    assert scored.text == "Onceé" and scored.finish_reason == "length"
    assert scored.logprobs.token_logprobs[0] is None and len(scored.logprobs.token_logprobs) == 6
    assert all(value < 0 for value in scored.logprobs.token_logprobs[1:])
    assert scored.logprobs.tokens[:4] == ["O", "n", "c", "e"]
    assert scored.logprobs.text_offset == [0, 1, 2, 3, 4, 4]
    longer = served.client.completions.create(**asked, max_tokens=3).choices[0]
    assert longer.logprobs.token_logprobs[:6] == pytest.approx(scored.logprobs.token_logprobs)
    assert len(longer.logprobs.token_logprobs) == 9 and longer.text.startswith("Onceé")
    streamed = list(served.client.completions.create(**asked, max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == longer.text
    nothing = served.client.completions.create(**{**asked, "prompt": ""}, max_tokens=3).choices[0]
    assert END not in nothing.text and nothing.logprobs.text_offset[:2] == [0, 0]
    plain = served.client.completions.create(**{**asked, "logprobs": None}, max_tokens=3).choices[0]
    assert plain.text == longer.text and plain.logprobs is None


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
        ("completions", {"prompt": "a", "n": 0}, 400, "n"),
        ("completions", {"prompt": "a", "n": 10**9}, 400, "n"),
        ("completions", {"prompt": ["a"] * 99}, 400, "n"),
        ("completions", {"prompt": "a", "seed": 1 << 63}, 400, "seed"),
        ("completions", {"prompt": "a", "stop": ["a"] * 5}, 400, "stop"),
        ("completions", {"prompt": "a", "stop": 5}, 400, "stop"),
        ("completions", {"prompt": "a", "logprobs": 1}, 400, "logprobs"),
        ("completions", {"prompt": "a", "stream": "yes"}, 400, "stream"),
        ("completions", {"prompt": "a", "frequency_penalty": "abc"}, 400, "frequency_penalty"),
        ("completions", {"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty"),
        ("completions", {"prompt": "a", "best_of": -3}, 400, "best_of"),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("completions", {"prompt": "a", "logit_bias": {"1": 5}}, 400, "logit_bias"),
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
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}, 400, "logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools"),
        ("nothing", {}, 404, None),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, (dict, bytes)) else "",
)
def test_what_cannot_be_done_is_refused(served: Served, path: str, body: Any, status: int, param: str | None) -> None:
    answer = served.post(body, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
    assert len(served.scheduler) == 0
    assert served.post({"prompt": "a", "max_tokens": 1, "new_field": {"x": [1]}}).status_code == 200


def test_openais_client_knows_the_errors(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        served.client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.completions.create(model="tiny", prompt="a" * CONTEXT, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert httpx.get(f"{served.url}/v1/completions").status_code == 405


@pytest.mark.parametrize("has_length", [True, False])
def test_a_long_body_is_refused_before_its_end(served: Served, has_length: bool) -> None:
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader(*("Content-Length", str(100 << 20)) if has_length else ("Transfer-Encoding", "chunked"))
    connection.endheaders()
    body = b"a" * (2 << 20)
    connection.send(body if has_length else b"%x\r\n" % len(body) + body)
    assert connection.getresponse().status == 413
    connection.close()
    assert served.post({"prompt": "a"}).status_code == 200


def test_a_hundred_megabytes_are_refused(served: Served) -> None:
    assert served.post(b"a" * (100 << 20)).status_code == 413
    assert served.post({"prompt": "a"}).status_code == 200


def test_many_streams_at_once_are_as_alone(served: Served) -> None:
    prompts = [f"Client {number}: {'x' * number}" for number in range(20)]
    expected = [served.alone(prompt, 30) for prompt in prompts]
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30)

    async def ask(prompt: str) -> str:
        stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=30, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*map(ask, prompts))

    assert asyncio.run(ask_all()) == expected


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(slow: Served, stream: bool) -> None:
    """One that is under way, and one that waits."""
    body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = ("127.0.0.1", int(slow.url.rpartition(":")[2]))
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        for number, connection in enumerate((first, second), start=1):
            connection.sendall(head + body)
            slow.wait_for(number)
        started = time.monotonic()
        second.close()
        slow.wait_for(1)
        first.close()
        slow.wait_for(0)
    assert slow.post({"prompt": "a", "max_tokens": 1}).status_code == 200
    assert time.monotonic() - started < 10, "it was computed to its end"


def test_too_many_are_asked_to_come_again(slow: Served) -> None:
    body = {"prompt": "a", "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{slow.url}/v1/completions", json={**body, "n": 3}, timeout=30) as first:
        assert first.status_code == 200
        answer = slow.post(body)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["type"] == "rate_limit_error"
    slow.wait_for(0)
    assert slow.post({"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_failure_of_the_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(257, CONTEXT).eval()
    with serving(model) as one:

        def fail(*arguments: Any) -> None:
            raise MemoryError("secret")

        with monkeypatch.context() as patch:
            patch.setattr(model, "hidden", fail)
            answer = one.post({"prompt": "a"})
            assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
            streamed = one.post({"prompt": "a", "stream": True}).text
            assert "server_error" in streamed and streamed.endswith("data: [DONE]\n\n") and "secret" not in streamed
        assert one.post({"prompt": "a"}).status_code == 200


def test_the_command_says_where_it_serves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "latest_model", lambda root: (root, None))
    monkeypatch.setattr(serve, "load", lambda *arguments: (make_model(257, 8).eval(), TOKENIZER))

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        address = sockets[0].getsockname()
        assert f"http://{address[0]}:{address[1]}/v1" in capsys.readouterr().out
        assert address[0] == "127.0.0.1"
        assert main(["serve", "--port", str(address[1])]) == 2  # nobody else can have the port
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert main(["serve", "--port", "0"]) == 0
    assert "Choose others with --host and --port" in capsys.readouterr().err
    assert main(["serve", "--max-batch-size", "0"]) == 2

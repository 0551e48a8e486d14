"""The HTTP server: completions, chats and streams, as OpenAI's client reads them; the command ``serve``."""

import socket
import time
from typing import Any

import pytest
import uvicorn

from lm.data.dialogs import Message
from lm.inference.chat_format import PLAIN_STOP, render_plain
from lm.model.transformer import TransformerLM
from tests.helpers.completion_server import CONTEXT, END, TOKENIZER, RunningServer, httpx, openai, run_server
from tests.helpers.generating import LoadedModel, fixed_model, make_model
from tests.helpers.serving import serve_app
from textmill.cli import tools
from textmill.cli.main import main
from textmill.server.access import RequestTimeout
from textmill.server.app import build_app


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


def test_the_command_prints_its_url(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tools, "resolve_model", lambda *_: LoadedModel(make_model(257, 8).eval(), TOKENIZER))

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


@pytest.mark.parametrize(
    ("arguments", "url", "is_open"),
    [
        (["--host", "0.0.0.0"], "http://127.0.0.1:", True),
        (["--host", "0.0.0.0", "--api-key", "a"], "http://127.0.0.1:", False),
        (["--host", "::"], "http://[::1]:", True),
        (["--host", "localhost"], "http://localhost:", False),
    ],
    ids=["all addresses", "with a key", "IPv6", "loopback"],
)
def test_the_command_prints_a_url_to_open_and_warns_of_an_open_server(
    arguments: list[str],
    url: str,
    is_open: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "::" in arguments and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(tools, "resolve_model", lambda *_: LoadedModel(make_model(257, 8).eval(), TOKENIZER))

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        assert server.config.http is RequestTimeout
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert main(["serve", "--port", "0", *arguments]) == 0
    shown = capsys.readouterr().out
    assert f"Page to try it: {url}" in shown and f" on {url}" in shown
    assert ("all other addresses of this machine" in shown) == ("localhost" not in arguments)
    assert ("Everyone who can reach this machine can use the model" in caplog.text) == is_open


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

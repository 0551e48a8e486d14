"""Requests that the server refuses, and what it says."""

import http.client
from typing import Any

import pytest

from tests.helpers.completion_server import CLIENT_TIMEOUT_SECONDS, CONTEXT, RunningServer, httpx, openai

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f", "parameters": {}}]),
        ("function_call", {"name": "f"}),
        ("tool_choice", "required"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("guided_whitespace_pattern", " "),
        ("json_schema", {"type": "object"}),
        ("grammar", 'root ::= "a"'),
        ("add_generation_prompt", False),
        ("skip_special_tokens", False),
        ("ignore_eos", True),
        ("min_tokens", 2),
        ("typical_p", 0.9),
        ("best_of", 2),
        ("top_k", -2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_known_field_that_would_change_the_answer_is_refused_by_name(
    server: RunningServer, field: str, value: Any
) -> None:
    response = server.post({"messages": MESSAGES, "max_tokens": 1, field: value}, "chat/completions")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(field)


@pytest.mark.parametrize(("field", "value"), [("grammar", "a"), ("min_tokens", 2), ("min_tokens", -1)])
def test_completions_refuse_such_fields_too(server: RunningServer, field: str, value: Any) -> None:
    response = server.post({"prompt": "a", "max_tokens": 1, field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_such_fields_are_accepted_with_values_that_have_no_effect(server: RunningServer) -> None:
    harmless: dict[str, Any] = {
        "tools": [], "tool_choice": "none", "functions": None, "function_call": "auto", "modalities": ["text"],
        "response_format": {"type": "text"}, "guided_json": None, "grammar": "", "continue_final_message": False,
        "add_generation_prompt": True, "skip_special_tokens": True, "ignore_eos": False, "min_tokens": 0,
        "typical_p": 1.0, "top_n_sigma": -1, "mirostat": 0, "best_of": 1,
    }  # fmt: skip
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "b",
        "tool_calls": [],
        "function_call": None,
        "refusal": None,
    }
    request = {"messages": [*MESSAGES, answer, *MESSAGES], "max_tokens": 2, **harmless}
    response = server.post(request, "chat/completions")
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "b", "tool_calls": [CALL]}, "1: Only a message of the assistant has tool_calls."),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "1.tool_calls.0.type: Input should be"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]},
            "1.tool_calls.0.function: The arguments must be the JSON text of an object.",
        ),
        ({"role": "tool"}, "1: The message has no content."),
        ({"role": "assistant", "content": "b", "function_call": CALL["function"]}, "1.function_call: This server"),
        ({"role": "assistant", "content": "b", "prefix": True}, "1.prefix: This server does not support it"),
        ({"role": "assistant"}, "1: The message has no content."),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "c"}}],
            },
            "1.content.1: A part of type 'image_url' is not supported; send text.",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "1.content.0: A part of type 'input_audio' is not"),
        ({"role": "user", "content": [{"type": "text"}]}, "1.content.0: The part has no text."),
        ({"role": "user", "content": 5}, "1.content: Input should be a valid string."),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_messages_name_what_is_not_supported(server: RunningServer, message: Any, text: str) -> None:
    response = server.post({"messages": [*MESSAGES, message]}, "chat/completions")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert error["message"].startswith(f"messages.{text}")


def test_top_k_minus_1_turns_it_off(server: RunningServer) -> None:
    request = {"prompt": "a", "max_tokens": 20, "temperature": 2, "top_p": 1, "seed": 3}
    texts = [server.post({**request, "top_k": top_k}).json()["choices"][0]["text"] for top_k in (-1, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_too_many_log_probabilities_are_refused(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.server.app._MAX_SCORES", 2 * (4 + 3) * (1 + 2))
    request = {"prompt": "abcd", "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    assert server.post(request).status_code == 200
    refused = server.post({**request, "n": 3})
    assert refused.status_code == 400 and "63 log-probabilities are requested; at most 42" in refused.text
    assert server.post({**request, "n": 3, "logprobs": None}).status_code == 200
    monkeypatch.setattr("textmill.server.app._MAX_SCORES", 1)
    assert server.post({"prompt": "a", "max_tokens": 2, "best_of": 3}).status_code == 200, "it returns no scores"


def test_openais_client_raises_its_own_exceptions(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.completions.create(model="tiny", prompt="a" * CONTEXT, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.body.get("max_tokens") is None, "not even one fits"
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.completions.create(model="tiny", prompt="a" * 12, max_tokens=CONTEXT)
    assert refused.value.body["max_tokens"] == CONTEXT - 12
    assert server.client.models.list().data[0].max_model_len == CONTEXT
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


def test_messages_name_fields_and_no_types(server: RunningServer) -> None:
    message = server.post({"prompt": "a", "stop": 5}).json()["error"]["message"]
    assert message.startswith("stop: ")


def test_head_and_wrong_methods(server: RunningServer) -> None:
    assert httpx.head(f"{server.url}/health").status_code == 200
    response = httpx.get(f"{server.url}/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
